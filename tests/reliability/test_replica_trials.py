"""Short forms of the trial of replicas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reliability.postgres import PostgresMissingError, find_binaries
from reliability.trial import BrokenPromiseError

try:
    find_binaries()
except PostgresMissingError as error:
    pytest.skip(f"PostgreSQL cannot be run here: {error}", allow_module_level=True)

from reliability import replicas


@pytest.mark.heavy
def test_nothing_is_lost_when_replicas_writers_and_the_database_are_killed() -> None:
    found = replicas.kill_replicas(8, seed=3)
    assert found["kills"] == sum(found["by_kind"].values()) == 8
    assert found["acknowledged_lessons"] > 10


@pytest.mark.heavy
def test_histories_across_replicas_are_linearizable() -> None:
    found = replicas.check_histories(2, seed=1, clients=4, operations=12)
    assert found["verdicts"] == {"linearizable": 2}


@pytest.mark.heavy
def test_a_replica_survives_cuts_of_the_network() -> None:
    found = replicas.cut_network(2, seed=1)
    assert found["lessons 503"] > 0
    assert found["acknowledged"] > 0


# The oracle itself


class Holding:
    """A replica that holds these examples."""

    def __init__(self, *examples: tuple[int, str, str]) -> None:
        self._examples = [{"id": id, "label": label, "text": text} for id, label, text in examples]

    def ask(self, *request: Any) -> tuple[int, Any, Any]:
        return 200, {"examples": self._examples, "cursor": None}, {}


def write_record(folder: Path, *lines: list[Any]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "1-1.jsonl").write_text(text)


LEARN = ["learn", "1-1-1", "taught 0", 2]


@pytest.mark.parametrize(
    ("lines", "held", "message"),
    [
        ([LEARN, ["learnt", "1-1-1", [7, 8]]], [], "lost"),
        ([LEARN, ["learnt", "1-1-1", [7, 8]]], [(7, "taught 0", "1-1-1/0")], "torn"),
        (
            [LEARN, ["learnt", "1-1-1", [7, 8]]],
            [(7, "taught 0", "1-1-1/0"), (9, "taught 0", "1-1-1/1")],
            "acknowledged with",
        ),
        (
            [LEARN],
            [(7, "taught 1", "1-1-1/0"), (8, "taught 1", "1-1-1/1")],
            "another label",
        ),
        (
            [LEARN, ["learnt", "1-1-1", [7, 8]], ["forget", "1-1-1"], ["forgotten", "1-1-1"]],
            [(7, "taught 0", "1-1-1/0"), (8, "taught 0", "1-1-1/1")],
            "was forgotten",
        ),
        ([], [(7, "taught 0", "1-1-1/0")], "never taught"),
        ([["broken", "/learn", 500, "x"]], [], "answered with"),
    ],
)
def test_the_oracle_notices_what_is_wrong(
    tmp_path: Path, lines: list[Any], held: list[Any], message: str
) -> None:
    write_record(tmp_path, *lines)
    with pytest.raises(BrokenPromiseError, match=message):
        replicas.compare_with_records(tmp_path, Holding(*held))  # type: ignore[arg-type]


def test_the_oracle_accepts_what_is_in_doubt(tmp_path: Path) -> None:
    write_record(tmp_path, LEARN)
    both = [(7, "taught 0", "1-1-1/0"), (8, "taught 0", "1-1-1/1")]
    for held in ([], both):
        counts = replicas.compare_with_records(tmp_path, Holding(*held))  # type: ignore[arg-type]
        assert counts["in_doubt"] == 1
