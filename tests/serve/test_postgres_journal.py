"""The journal in PostgreSQL against the one in files, and the copies between the two."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from databases import database, postgres  # noqa: F401 (fixtures: arguments repeat them, F811)
from runs import write_word_run

from mbpa.cli import main
from mbpa.errors import RunError
from mbpa.serve import journal_copy
from mbpa.serve.example_journal import ExampleFilter, ExampleJournal
from mbpa.serve.journal import InputError, Journal, JournalError
from mbpa.serve.run_info import JOURNAL_FILE, RunInfo
from reliability.postgres import PostgresServer

pytest.importorskip("psycopg", reason="the extra replicas is not installed")
import psycopg

from mbpa.serve.postgres_journal import PostgresJournal
from mbpa.serve.postgres_verification import check_database

LABELS = ("fruit", "tool", "new", "ünïcode")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_word_run(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def journal(run: Path, database: str) -> Iterator[PostgresJournal]:  # noqa: F811
    journal_copy.copy_to_database(run, database)
    with PostgresJournal(database) as opened:
        load(opened)
        yield opened


def load(journal: PostgresJournal) -> None:
    """Follow the log from its present end on."""
    with journal.load(size=100) as state:
        for _ in state.parts:
            pass
        journal.adopt(state)


def draw_row(draw: random.Random) -> tuple[str, str | bytes | None, bytes]:
    item = draw.choice([f"text {draw.randrange(5)}", None, b"\x89 a picture", "", "a\nb"])
    return draw.choice(LABELS), item, draw.randbytes(256)


def operate(journal: ExampleJournal, draw: random.Random, number: int) -> Any:
    """Make a random call; return its result or its error."""
    kind = draw.choice(["learn", "learn", "repeat", "forget", "forget label", "rename", "restore"])
    rows = [draw_row(draw) for _ in range(draw.randint(1, 3))]
    label, new_label, ids = draw.choice(LABELS), draw.choice(LABELS), draw.sample(range(1, 60), 3)
    request, last_trained = f"request {draw.randrange(6)}", draw.choice([None, 4])
    try:
        if kind == "learn":
            return journal.learn(rows, by="ana")
        if kind == "repeat":
            return journal.learn(rows[:1] if draw.random() < 0.5 else [("a", "b", None)], request)
        if kind == "restore":
            return journal.learn(rows, restoring=True)
        if kind == "forget":
            return journal.forget(ids, by=None)
        if kind == "forget label":
            return journal.forget([number], label)
        return journal.rename(label, new_label, last_trained=last_trained)
    except InputError as error:
        return str(error)


def describe(journal: ExampleJournal) -> Any:
    """Return everything that a journal holds, without times."""
    listed = journal.list_examples(ExampleFilter(), limit=1000, newest_first=True, last_trained=4)
    return (
        list(journal.examples()),
        [(each.id, each.label, each.text, each.is_trained) for each in listed],
        journal.restored_ids,
        journal.change,
    )


def test_it_behaves_as_the_journal_in_files(run: Path, journal: PostgresJournal) -> None:
    draws = random.Random(1), random.Random(1)
    with Journal(run / JOURNAL_FILE) as reference:
        for number in range(300):
            expected, found = (
                operate(each, draw, number)
                for each, draw in zip((reference, journal), draws, strict=True)
            )
            assert found == expected, number
            assert journal.read_changes() is not None
            before = describe(reference)
            assert describe(journal) == (*before[:3], before[3] + 1)  # one for the copy
        audits = [
            [(each.change, each.by, each.action, each.first, each.count, each.label)]
            for each in reference.audit(limit=1000)
        ]
        assert (
            audits
            == [
                [(each.change - 1, each.by, each.action, each.first, each.count, each.label)]
                for each in journal.audit(limit=1000)
                if each.action != "copy" and each.change > 1
            ]
            + audits[-1:]
        )


def test_a_copy_there_and_back_changes_nothing(
    run: Path,
    journal: PostgresJournal,
    database: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    draw = random.Random(2)
    for number in range(60):
        operate(journal, draw, number)
    journal.read_changes()
    back = tmp_path / "back"
    journal_copy.copy_to_directory(database, back)
    with Journal(back / JOURNAL_FILE, writable=False) as copied:
        assert describe(copied) == describe(journal)
        expected = [each for each in journal.audit(limit=1000) if each.action != "copy"]
        assert copied.audit(limit=1000) == expected
        requests = copied.requests()
    assert requests
    assert (back / "run.json").read_bytes() == (run / "run.json").read_bytes()


def test_a_request_is_remembered_by_every_process_and_after_a_copy(
    journal: PostgresJournal,
    database: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    row = ("new", "a text", bytes(256))
    ids = journal.learn([row], "a \x00 name")
    journal_copy.copy_to_directory(database, tmp_path / "back")
    with PostgresJournal(database) as other, Journal(tmp_path / "back" / JOURNAL_FILE) as copied:
        for each in (journal, other, copied):
            assert each.learn([row], "a \x00 name") == ids
            assert each.find_repeated([("new", "a text", None)], "a \x00 name") == ids
            assert each.find_repeated([row], "another") is None
            with pytest.raises(InputError, match="used for other examples"):
                each.learn([("new", "another", bytes(256))], "a \x00 name")


def test_writers_take_turns_and_no_position_is_missing(
    journal: PostgresJournal,
    database: str,  # noqa: F811
) -> None:
    start, writers, calls = journal.change, 4, 50
    found: list[list[int]] = []

    def write(number: int) -> None:
        with PostgresJournal(database) as mine:
            for call in range(calls):
                ids = mine.learn([("new", f"{number} {call} {i}", bytes(256)) for i in range(2)])
                found.append(ids)
                if call % 5 == 0:
                    mine.forget(ids[:1])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    positions = []
    while any(thread.is_alive() for thread in threads):
        changes = journal.read_changes()
        assert changes is not None
        positions.append(changes.position)
    for thread in threads:
        thread.join()
    changes = journal.read_changes()
    assert changes is not None
    assert positions == sorted(positions)
    assert changes.position == start + writers * (calls + calls // 5)
    ids = sorted(id for call in found for id in call)
    assert ids == list(range(5, 5 + 2 * writers * calls))


def test_changes_of_one_reading_are_those_of_one_position(journal: PostgresJournal) -> None:
    (first,) = journal.learn([("new", "one", bytes(256))])
    (second,) = journal.learn([("new", "two", bytes(256))])
    journal.rename("new", "newer")
    journal.forget([first])
    changes = journal.read_changes()
    assert changes is not None
    assert changes.touched == {first, second}
    assert [(each.id, each.label) for each in changes.present] == [(second, "newer")]
    assert changes.renames
    assert not changes.replaces_model


def test_a_lost_tail_is_noticed_even_if_its_positions_are_used_again(
    journal: PostgresJournal,
    database: str,  # noqa: F811
) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        head = connection.execute("SELECT * FROM mbpa.head").fetchone()
        assert head is not None
        (id,) = journal.learn([("new", "lost", bytes(256))], "lost")
        assert journal.read_changes() is not None
        connection.execute("DELETE FROM mbpa.events WHERE position > %s", [head[3]])
        connection.execute("DELETE FROM mbpa.examples WHERE id = %s", [id])
        connection.execute("DELETE FROM mbpa.requests WHERE name = 'lost'")
        connection.execute(
            "UPDATE mbpa.head SET position = %s, hash = %s, last_id = %s, examples = %s, "
            "checksum = %s, requests = %s",
            [head[3], head[4], head[5], head[7], head[8], head[6]],
        )
    assert journal.read_changes() is None  # the event is gone
    assert journal.learn([("new", "another", bytes(256))]) == [id]
    assert journal.read_changes() is None  # there is one at its position, with another hash
    load(journal)
    assert journal.read_changes() is not None


def test_the_log_and_the_requests_do_not_grow_for_ever(
    journal: PostgresJournal,
    database: str,  # noqa: F811
) -> None:
    kept = journal.learn([("new", "kept", bytes(256))], "an old request")
    learn = """
    SELECT mbpa.learn(0, NULL, false, '{a}', '{text}', '{NULL}', '{abcd}', %s::bytea, 'x', 'y',
        10, 50)
    """
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("UPDATE mbpa.head SET position = 9900")  # pruned at 10,000
        for number in range(60):
            connection.execute(learn, [f"{number}".encode()])
            connection.execute("SELECT mbpa.forget(0, NULL, '{}', 'a', 50)")
        ((requests,),) = connection.execute("SELECT count(*) FROM mbpa.requests")
        ((oldest, newest),) = connection.execute(
            "SELECT min(position), max(position) FROM mbpa.events WHERE position > 9900"
        )
    assert requests == 10
    assert (oldest, newest) == (9951, 10_020)
    assert journal.find_repeated([("new", "kept", bytes(256))], "an old request") is None
    actions = [each.action for each in journal.audit(limit=1000) if each.first == kept[0]]
    assert actions == ["learn"]  # it says who taught an example that is still there
    assert journal.read_changes() is None  # too far behind


# Bad input


def refuse(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that fails, and return its one line."""
    assert main(list(arguments)) in (1, 2)
    lines = capsys.readouterr().err.strip().splitlines()
    said = [line for line in lines if line.startswith("mbpa: ")]
    assert len(said) == 1, lines
    return said[0]


def test_bad_addresses_and_databases_are_refused_in_one_line(
    run: Path,
    database: str,  # noqa: F811
    postgres: PostgresServer,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def serve(url: str) -> str:
        return refuse(capsys, "serve", str(run), "--port", "0", "--database", url)

    assert "must be given as postgresql://" in serve("mysql://localhost/x")
    assert "the address of the database is wrong" in serve("postgresql://[::1/x")
    assert "password authentication failed" in serve(postgres.make_url(password="wrong"))
    assert "correct" not in serve(postgres.make_url(password="correct%20but%20secret"))
    assert "does not exist" in serve(postgres.make_url(database="missing"))
    assert "cannot be used" in serve(postgres.make_url(port=9))
    assert "holds no run: put one there with `mbpa journal copy`" in serve(database)
    assert main(["journal", "copy", str(run), database]) == 0
    assert capsys.readouterr().out == "copied 4 examples\n"
    assert "holds a run already" in refuse(capsys, "journal", "copy", str(run), database)
    write_word_run(tmp_path / "other")
    text = (tmp_path / "other" / "run.json").read_text()
    assert text == (run / "run.json").read_text()  # the same run, made twice
    replace(RunInfo.read(tmp_path / "other"), threshold=0.5).write(tmp_path / "other")
    other = str(tmp_path / "other")
    assert f"holds another run than {other}" in refuse(
        capsys, "serve", other, "--port", "0", "--database", database
    )
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("UPDATE mbpa.head SET format = 99")
    assert "was written by a newer mbpa" in serve(database)
    out = str(tmp_path / "out")
    assert "written by a newer mbpa" in refuse(capsys, "journal", "copy", database, out)
    assert not Path(out).exists()
    assert "one of the two must be" in refuse(capsys, "journal", "copy", str(run), out)
    assert "one of the two must be" in refuse(capsys, "journal", "copy", database, database)
    with Journal(run / JOURNAL_FILE) as journal:
        assert len(journal) == 4


def test_a_copy_that_fails_leaves_the_database_empty(
    run: Path,
    database: str,  # noqa: F811
) -> None:
    with Journal(run / JOURNAL_FILE) as journal:
        journal.learn([("new", "no \x00 in PostgreSQL", bytes(256))])
    with pytest.raises(JournalError, match="invalid byte sequence"):
        journal_copy.copy_to_database(run, database)
    with psycopg.connect(database) as connection:
        ((schema,),) = connection.execute("SELECT to_regnamespace('mbpa')::text")
    assert schema is None


# Damage


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE mbpa.examples SET label = 'tool' WHERE id = 1", "example 1 was altered"),
        ("UPDATE mbpa.examples SET key = 'abcd' WHERE id = 2", "example 2 was altered"),
        ("DELETE FROM mbpa.examples WHERE id = 3", "4 examples were written, 3 were found"),
        ("UPDATE mbpa.events SET name = 'eve' WHERE position = 3", "event 3 of the log"),
        ("UPDATE mbpa.models SET files = 'x'", "the model in the database is damaged"),
    ],
)
def test_damage_is_found(
    run: Path,
    journal: PostgresJournal,
    database: str,  # noqa: F811
    statement: str,
    message: str,
) -> None:
    journal.learn([("new", "text", bytes(256))], by="ana")
    journal.forget([5], by="ana")
    assert check_database(database, run)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(statement)
    with pytest.raises((JournalError, RunError), match=message):
        check_database(database, run)


def test_what_forgetting_leaves_behind(
    journal: PostgresJournal,
    database: str,  # noqa: F811
    postgres: PostgresServer,  # noqa: F811
) -> None:
    """The documentation says: until the table is rewritten, and in the write-ahead log."""
    secret = "4711 a very secret text"
    ids = journal.learn([("new", secret, bytes(256))])

    def find(folder: str) -> bool:
        place = postgres.data / folder
        return any(
            secret.encode() in path.read_bytes() for path in place.rglob("*") if path.is_file()
        )

    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("CHECKPOINT")
        assert find("base")
        journal.forget(ids)
        assert journal.example(ids[0]) is None
        connection.execute("VACUUM FULL mbpa.examples")
        connection.execute("CHECKPOINT")
        assert not find("base")
        assert find("pg_wal")
