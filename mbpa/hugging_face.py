"""Models of transformers on this machine. Nothing is downloaded.

A model is a directory, or the name of one in Hugging Face's cache.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mbpa.errors import MissingExtraError


def find_model(name: str | os.PathLike[str], *, extra: str) -> Path:
    """Return the directory of a model's files.

    Args:
        name: a directory, or the name of a model in Hugging Face's cache.
        extra: extra of mbpa that installs transformers, for the error if it is missing.

    Raises:
        ValueError: there is none; the message says what it must be, without a subject.
    """
    if Path(name).is_dir():
        return Path(name)
    import_transformers(extra=extra)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(os.fspath(name), local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ValueError(
            "a directory, or the name of a model in Hugging Face's cache "
            f"(`hf download NAME` puts it there), got {os.fspath(name)!r}"
        ) from error


def import_transformers(*, extra: str) -> Any:
    """Return the module `transformers`; raise `MissingExtraError` if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("transformers", extra=extra) from error
    return transformers


@contextlib.contextmanager
def hide_progress_bars(transformers: Any) -> Iterator[None]:
    """Disable progress bars while loading a model, which is too fast to need them."""
    logging = transformers.utils.logging
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
