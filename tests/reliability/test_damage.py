"""The damage trial tells what is detected from what is not, and files withstand a small dose."""

from __future__ import annotations

import hashlib
import os
import random
import signal

import pytest
from peak import touch_new_memory

from mbpa.errors import RunError
from reliability import damage
from reliability.damage import Cases, Checker, Subject, Tally, check_all, check_cases
from reliability.mutation import KINDS, list_truncations, mutate_file

CONTENT = random.Random(0).randbytes(1600)


@pytest.fixture(scope="module")
def subjects():
    return {subject.name: subject for subject in damage.make_subjects()}


def make_subject(read, **options) -> Subject:
    return Subject(
        "planted", {"data": CONTENT}, "data", read, lambda: (RunError,), "data", **options
    )


def check_some(subject: Subject, tmp_path, mutations: int, lengths=()) -> Tally:
    cases = Cases(subject, lengths, mutations, seed=0)
    return check_cases(cases, Checker(subject, tmp_path), range(len(cases)))


def outcomes(tally: Tally) -> set[str]:
    return {outcome for counts in tally.counts.values() for outcome in counts}


def read_verified(directory):
    """A reader that keeps the promise."""
    data = (directory / "data").read_bytes()
    if hashlib.sha256(data).digest() != hashlib.sha256(CONTENT).digest():
        raise RunError(f"{directory / 'data'} is damaged")
    return data


def test_what_is_verified_keeps_the_promise(tmp_path):
    tally = check_some(make_subject(read_verified), tmp_path, 100, range(0, len(CONTENT), 100))
    assert outcomes(tally) == {"detected"}
    assert tally.counts.keys() == {"truncated", *KINDS}
    assert {counts.total() for kind, counts in tally.counts.items() if kind in KINDS} == {20}
    assert tally.broken == 0


def test_damage_beside_what_is_read_is_harmless(tmp_path):
    tally = check_some(make_subject(lambda directory: None), tmp_path, 10)
    assert outcomes(tally) == {"harmless"}
    assert tally.broken == 0


def read_unverified(directory):
    return (directory / "data").read_bytes()


def read_misnamed(directory):
    if (directory / "data").read_bytes() != CONTENT:
        raise RunError("something is damaged")


def read_carelessly(directory):
    return (directory / "data").read_bytes().index(CONTENT)


def read_greedily(directory):
    if (directory / "data").read_bytes() != CONTENT:
        touch_new_memory(40 << 20)


@pytest.mark.parametrize(
    ("read", "outcome"),
    [
        (read_unverified, "unnoticed"),
        (read_misnamed, "misnamed"),
        (read_carelessly, "raised"),
        (read_greedily, "allocated"),
    ],
)
def test_a_reader_that_breaks_the_promise_is_caught(read, outcome, tmp_path):
    tally = check_some(make_subject(read), tmp_path, 10)
    assert outcomes(tally) == {outcome}
    assert tally.broken == 10
    assert len(tally.as_figures()["failures"]) == 10


def test_a_case_that_kills_the_process_is_counted_and_the_others_are_checked():
    def read(directory):
        data = (directory / "data").read_bytes()
        if len(data) == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return read_verified(directory)

    cases = Cases(make_subject(read), range(20), 30, seed=0)
    tally = check_all([cases], jobs=1)["planted"]
    assert tally.counts["truncated"] == {"detected": 19, "died": 1}
    assert sum(counts.total() for counts in tally.counts.values()) == 50
    assert tally.failures == [(7, "truncated", "died", "exit status -9")]


def test_a_mutation_that_can_change_nothing_is_not_counted_as_harmless(tmp_path):
    empty = Subject("planted", {"data": b"\0"}, "data", read_unverified, lambda: (), "data")
    tally = check_some(empty, tmp_path, 10)
    assert tally.counts["swapped sectors"] == {"impossible": 2}
    assert tally.counts["zeroed sector"] == {"impossible": 2}
    assert tally.counts["byte"] == {"unnoticed": 2}


@pytest.mark.parametrize("size", [2, 20, 513, 5000])
@pytest.mark.parametrize("kind", KINDS)
def test_every_mutation_changes_the_file_and_keeps_its_size(kind, size):
    data = random.Random(size).randbytes(size)
    changed = [mutate_file(random.Random(seed), data, kind) for seed in range(20)]
    assert all(each != data and len(each) == size for each in changed)
    assert changed == [mutate_file(random.Random(seed), data, kind) for seed in range(20)]


def test_small_files_are_cut_everywhere_and_large_ones_at_every_sector():
    draw = random.Random(0)
    assert list_truncations(1000, draw) == list(range(1000))
    lengths = list_truncations(3000, draw, every_length_bytes=1000, random_lengths=5)
    assert {511, 512, 513, 1023, 1024, 1025, 2559, 2560, 2561} <= set(lengths)
    assert len(lengths) in range(17, 23)
    assert max(lengths) < 3000


def test_damaged_checkpoints_are_detected(subjects, tmp_path):
    checkpoints = [name for name in subjects if name.startswith(("model/", "checkpoint/"))]
    assert len(checkpoints) == 6
    for number, name in enumerate(checkpoints):
        directory = tmp_path / str(number)
        directory.mkdir()
        tally = check_some(subjects[name], directory, 50, range(0, len(subjects[name].data), 37))
        assert tally.broken == 0, tally.failures
        assert sum(counts["detected"] for counts in tally.counts.values()) >= 50


def test_the_journal_of_a_killed_process_has_a_log_that_counts(subjects, tmp_path):
    """Otherwise damage to that log could do no harm."""
    log = subjects["journal.sqlite-wal after a kill"]
    assert len(log.data) > 10_000
    checker = Checker(log, tmp_path)
    assert checker.check(log.data)[0] == "harmless"
    assert checker.check(b"")[0] != "harmless"


def test_a_whole_run_answers_the_same_when_nothing_is_damaged(subjects, tmp_path):
    run = subjects["run.json"]
    whole = damage.make_whole_subjects(list(subjects.values()), run.files)
    assert len(whole) == len(subjects) - 3, "all but the checkpoint of `MbPA.save`"
    checker = Checker(whole[0], tmp_path)
    assert checker.check(run.data)[0] == "harmless"
    assert checker.check(run.data[:-9])[0] == "detected"
    other = run.data.replace(b'"threshold": 0.3', b'"threshold": 0.9')
    assert checker.check(other)[0] != "harmless"


@pytest.mark.parametrize("name", ["run.json", "journal.sqlite", "journal.sqlite-wal after a kill"])
def test_damaged_runs_are_detected(subjects, name, tmp_path):
    size = len(subjects[name].data)
    tally = check_some(subjects[name], tmp_path, 50, range(0, size, max(1, size // 20)))
    assert tally.broken == 0, tally.failures
