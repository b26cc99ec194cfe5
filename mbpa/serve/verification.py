"""`mbpa check`: verify that a run is as it was written."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from mbpa.errors import RunError
from mbpa.serve.journal import Journal, JournalError
from mbpa.serve.run_info import JOURNAL_FILE, RunInfo, read_model, stack_keys
from mbpa.teaching import Learner

EXAMPLES_PER_PART = 1000


def check_run(directory: Path) -> list[tuple[str, str]]:
    """Verify every checksum of a run, and that its parts fit together; change nothing.

    Returns:
        The parts that were verified, each as a name and a few words.

    Raises:
        RunError: something is missing, damaged, or in use; the message names the file.
    """
    RunInfo.read(directory)  # first of all, report a directory that is not a run
    try:
        journal = Journal(directory / JOURNAL_FILE, create=False, writable=False)
    except JournalError as error:
        raise RunError(str(error)) from error
    with journal:  # its lock keeps others from replacing the run meanwhile
        info = RunInfo.read(directory)
        model = read_model(directory, info, "cpu")
        examples = journal.examples(with_pictures=False)
        while part := list(islice(examples, EXAMPLES_PER_PART)):
            stack_keys(journal.name, part, info.key_dim)
        labels, count, change = journal.labels(), len(journal), journal.change
    with_rows = "without" if model.rows is None else "with"
    is_learner = isinstance(model.method, Learner)
    parts = (
        "the head and the learner" if is_learner else f"the head, {with_rows} rows for new labels"
    )
    return [
        ("run.json", f"{len(info.labels)} trained labels, keys of {info.key_dim} numbers"),
        ("model", parts),
        ("journal", f"{count} examples of {len(labels)} labels after {change} changes"),
    ]
