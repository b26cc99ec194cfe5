"""The error that an experiment raises for its user."""

from __future__ import annotations


class ExperimentError(Exception):
    """An experiment cannot be run or reported as asked; the message says what to do."""
