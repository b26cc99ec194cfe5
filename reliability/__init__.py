"""Trials of what the documentation promises: kills, power cuts, damage, load, random operations.

Each trial is a module with a command, `python -m reliability NAME`, and an oracle of its own. The
tests run small sizes of the same code; the figures in `docs/serving.md` come from long runs, whose
reports lie in `results/reliability/`.
"""
