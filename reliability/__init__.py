"""Trials of the documented guarantees: kills, power cuts, damage, load, random operations.

Each trial is a module with a command, `python -m reliability NAME`, and its own oracle. The tests
run the same code at small sizes. The figures in `docs/serving.md` come from long runs, whose
reports are in `results/reliability/`.
"""
