"""Exceptions that callers may want to catch. Bad arguments raise `ValueError` instead."""


class CheckpointError(Exception):
    """A checkpoint cannot be read: a file is missing, truncated, altered, or of a newer format."""


class RunError(Exception):
    """A run directory, or the data for one, cannot be used; a one-line message says what to do."""


class MissingExtraError(ImportError):
    """An optional dependency is not installed; the message names the extra that installs it.

    Args:
        what: name of the package that is missing.
        extra: name of the extra of mbpa that installs it.
    """

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} is not installed: pip install 'mbpa[{extra}]'")


class WriterError(Exception):
    """Another memory writes to the same store; there must be one writer at a time."""


class ReadOnlyError(Exception):
    """A memory that is attached for reading only, or closed, was asked to change its entries."""


class StaleReadError(Exception):
    """The writer of a store removed entries while another memory read them, again and again."""


class StaleKeysWarning(UserWarning):
    """The embedding has changed since the keys in the memory were computed with it."""
