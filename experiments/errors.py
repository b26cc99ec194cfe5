"""The error that experiments report to their user."""

from __future__ import annotations


class ExperimentError(Exception):
    """An experiment cannot be run or reported as requested; the message says what to do."""
