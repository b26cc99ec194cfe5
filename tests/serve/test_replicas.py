"""Several classifiers and services around one database."""

from __future__ import annotations

import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from databases import database, postgres  # noqa: F401 (fixtures: arguments repeat them, F811)
from servers import open_client, running

from mbpa.cli import main
from mbpa.serve import journal_copy, journaled_model, postgres_journal, retraining
from mbpa.serve.answers import Lesson
from mbpa.serve.classifier import Classifier
from mbpa.serve.client import POSITION_HEADER, ServiceClient
from mbpa.serve.follower import Follower
from mbpa.serve.journal import InputError, JournalError
from mbpa.serve.shared_journal import SharedJournal
from reliability.postgres import PostgresMissingError, PostgresServer
from reliability.proxy import Proxy
from reliability.small_run import draw_keys, write_small_run

pytest.importorskip("psycopg", reason="the extra replicas is not installed")

from mbpa.serve.app import create_app

QUERIES = draw_keys(8, seed=9)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_small_run(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def shared(run: Path, database: str) -> str:  # noqa: F811
    journal_copy.copy_to_database(run, database)
    return database


@pytest.fixture
def load(run: Path, shared: str) -> Iterator[Callable[..., Classifier]]:
    """Return a function that loads a replica."""
    with ExitStack() as stack:
        yield lambda url=shared: stack.enter_context(Classifier.load(run, database=url))


def get_answers(classifier: Classifier) -> Any:
    return (
        classifier.predict(keys=QUERIES, top=20),
        classifier.explain(keys=QUERIES[:2], top=20),
        classifier.labels,
        classifier.stats(),
    )


def operate(classifier: Classifier, draw: random.Random) -> None:
    """Make a random change."""
    labels = [f"new {i}" for i in range(4)] + ["trained 0", "trained 1"]
    kind = draw.choice(["learn", "learn", "learn", "forget", "forget label", "rename", "merge"])
    one, other = draw.sample(labels, 2)
    try:
        if kind == "learn":
            keys = draw_keys(3, seed=draw.randrange(1000))
            classifier.learn([Lesson(one, f"{draw.random()}", key) for key in keys])
        elif kind == "forget":
            ids = [each.id for each in classifier.examples()]
            classifier.forget(draw.sample(ids, min(3, len(ids))))
        elif kind == "forget label":
            classifier.forget(label=draw.choice(labels[:4]))
        elif kind == "rename":
            classifier.rename(one, other)
        else:
            classifier.merge(one, other)
    except InputError:
        pass  # there is no such label, or the new one exists


@pytest.mark.heavy
def test_replicas_at_one_position_answer_equally_to_the_bit(
    load: Callable[..., Classifier], shared: str, tmp_path: Path
) -> None:
    replicas, draw = [load(), load(), load()], random.Random(3)
    for step in range(120):
        operate(draw.choice(replicas), draw)
        if step % 10 == 0:
            for each in replicas:
                each.follow()
            first, *others = map(get_answers, replicas)
            assert all(other == first for other in others), step
    for each in replicas:
        each.follow()
    expected = get_answers(replicas[0])
    assert get_answers(load()) == expected  # one that has just started
    journal_copy.copy_to_directory(shared, tmp_path / "copy")
    with Classifier.load(tmp_path / "copy") as alone:  # and one in files
        assert get_answers(alone) == expected


def test_a_replica_knows_its_own_lesson_and_those_before_it(
    load: Callable[..., Classifier],
) -> None:
    one, other = load(), load()
    key = draw_keys(2, seed=1)
    first = one.learn([Lesson("new", "first", key[0])], request="a")
    assert other.predict(keys=key[:1])[0].top[0][0] != "new"
    second = other.learn([Lesson("newer", "second", key[1])])
    assert second == [first[0] + 1]
    assert {"new", "newer"} <= set(other.labels)
    assert other.learn([Lesson("new", "first", key[0])], request="a") == first
    with pytest.raises(InputError, match="used for other"):
        other.learn([Lesson("new", "another", key[0])], request="a")


def test_who_is_refused_because_of_a_lesson_reads_that_lesson(
    load: Callable[..., Classifier],
) -> None:
    one, other = load(), load()
    one.learn([Lesson("new", "first", QUERIES[0])], request="a")
    assert other.position != one.position
    with pytest.raises(InputError, match="used for other"):
        other.learn([Lesson("new", "another", QUERIES[0])], request="a")
    assert other.position == one.position
    assert "new" in other.labels


def test_sums_of_positions_do_not_overflow(
    load: Callable[..., Classifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From position 22,768 on, adding 10,000 to it exceeds 16 bits; here it is from position 8."""
    monkeypatch.setattr(postgres_journal, "MAX_CHANGES_AT_ONCE", 32_760)
    one, other = load(), load()
    for number in range(12):
        one.learn([Lesson("new", f"text {number}", QUERIES[0])])
        other.follow()
    assert one.position == other.position
    assert one.position is not None
    assert one.position > 8
    assert get_answers(one) == get_answers(other)


@pytest.mark.heavy
def test_a_follower_logs_what_it_did_not_expect_and_goes_on(
    load: Callable[..., Classifier],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, other = load(), load()
    follow, calls = other.follow, []

    def fail_first(position: int | None = None) -> None:
        calls.append(position)
        if len(calls) == 1:
            raise ValueError("nobody expected this")
        follow(position)

    monkeypatch.setattr(other, "follow", fail_first)
    journal = other.journal
    assert isinstance(journal, SharedJournal)
    follower = Follower(other, journal)
    follower.start()
    try:
        one.learn([Lesson("new", "a lesson", QUERIES[0])])
        wait_until(lambda: "new" in other.labels)
    finally:
        follower.stop()
    assert "nobody expected this" in caplog.text


@pytest.mark.heavy
def test_a_replica_that_is_slow_to_load_does_not_load_for_ever(
    load: Callable[..., Classifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = load(), load()
    with other.journal._reader.use() as connection:  # type: ignore[attr-defined]
        connection.execute("SET idle_in_transaction_session_timeout = '2s'")
    real = journaled_model.read_shared_model

    def read_slowly(*arguments: Any) -> Any:
        time.sleep(3.5)
        return real(*arguments)

    monkeypatch.setattr(journaled_model, "read_shared_model", read_slowly)
    one.learn([Lesson("new", "text", QUERIES[0])])
    other._must_load = True
    other.follow()
    assert other.journal.read_only is None
    assert other.position == one.position
    other.learn([Lesson("new", "another", QUERIES[0])])
    one.follow()
    assert get_answers(one) == get_answers(other)


def test_a_change_of_label_sees_what_others_have_written(load: Callable[..., Classifier]) -> None:
    one, other = load(), load()
    one.learn([Lesson("new", "text", QUERIES[0])])
    with pytest.raises(InputError, match="already a label"):
        other.rename("trained 0", "new")
    assert other.merge("trained 0", "new")
    with pytest.raises(InputError, match="there is no label"):
        one.rename("trained 0", "newest")
    assert get_answers(one) == get_answers(other)


@pytest.mark.heavy
def test_a_new_model_reaches_all_replicas(load: Callable[..., Classifier], tmp_path: Path) -> None:
    one, other = load(), load()
    for label in ("new", "trained 0"):
        keys = draw_keys(6, seed=len(label))
        one.learn([Lesson(label, f"{label} {i}", key) for i, key in enumerate(keys)])
    snapshot = one.take_snapshot()
    made = retraining.train(tmp_path, one.info, snapshot)
    other.learn([Lesson("late", "meanwhile", QUERIES[0])])
    retraining.change_over(one, tmp_path, made)
    other.follow()
    assert one.info == other.info == made
    assert one.trained_labels == {f"trained {i}" for i in range(4)} | {"new"}
    assert "late" in one.labels
    assert get_answers(one) == get_answers(other) == get_answers(load())
    assert one.journal.audit(limit=1)[0].action == "retrain"
    other.rename("late", "later")
    with pytest.raises(InputError, match="renamed meanwhile"):
        retraining.change_over(one, tmp_path, made)
    assert get_answers(one) == get_answers(other)


@pytest.mark.heavy
def test_a_replica_loads_everything_anew_after_a_fail_over_that_lost_a_tail(
    run: Path, tmp_path: Path
) -> None:
    try:
        server = PostgresServer()
    except PostgresMissingError as error:
        pytest.skip(f"PostgreSQL cannot be run here: {error}")
    with server, ExitStack() as stack:
        journal_copy.copy_to_database(run, server.url)
        one, other = (
            stack.enter_context(Classifier.load(run, database=server.url)) for _ in range(2)
        )
        one.learn([Lesson("new", "kept", QUERIES[0])])
        server.stop()
        shutil.copytree(server.data, server.folder / "standby")
        for path in [server.folder / "standby", *(server.folder / "standby").rglob("*")]:
            status = server.data.stat()
            shutil.chown(path, status.st_uid, status.st_gid)
        server.start()
        one.learn([Lesson("lost", "lost", QUERIES[1])])
        other.follow()
        assert "lost" in other.labels
        server.stop()
        shutil.rmtree(server.data)
        (server.folder / "standby").rename(server.data)
        server.start()
        started = stack.enter_context(Classifier.load(run, database=server.url))
        started.learn([Lesson("other", "in its place", QUERIES[2])])
        for each in (one, other):
            each.follow()
            assert get_answers(each) == get_answers(started)
            assert "lost" not in each.labels
            assert {"new", "other"} <= set(each.labels)


# Over HTTP


@pytest.fixture
def services(load: Callable[..., Classifier]) -> Iterator[list[httpx.Client]]:
    """Return clients of two services."""
    with ExitStack() as stack:
        yield [serve(stack, load()) for _ in range(2)]


def serve(stack: ExitStack, classifier: Classifier) -> httpx.Client:
    """Serve a classifier as long as the stack is open; return a client."""
    url = stack.enter_context(running(create_app(classifier)))
    return stack.enter_context(open_client(url))


def teach(client: httpx.Client, label: str, text: str, **options: Any) -> httpx.Response:
    embedding = QUERIES[0].tolist()
    body = {"examples": [{"label": label, "text": text, "embedding": embedding}]}
    return client.post("/learn", json={**body, **options})


def wait_until(condition: Callable[[], bool], limit_s: float = 20.0) -> float:
    """Wait for a condition and return the seconds that it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit_s, "the condition did not come true"
        time.sleep(0.01)
    return time.monotonic() - start


def test_what_one_service_learns_the_other_knows(services: list[httpx.Client]) -> None:
    one, other = services
    taught = teach(one, "new", "a text", request="r")
    position = taught.headers[POSITION_HEADER]
    stats = other.get("/stats", headers={POSITION_HEADER: position})
    assert int(stats.headers[POSITION_HEADER]) >= int(position)
    assert stats.json()["examples"] == 25
    assert teach(other, "new", "a text", request="r").json() == taught.json()
    wait_until(lambda: one.get("/labels").json() == other.get("/labels").json())
    ids = taught.json()["ids"]
    assert other.post("/forget", json={"ids": ids}).json() == {"ids": ids}
    latest = one.get("/stats", headers={POSITION_HEADER: "latest"}).json()
    assert latest["examples"] == 24
    assert latest["replica"]["position"] == latest["change"] == 4
    assert latest["replica"]["lag"] == 0
    assert latest["replica"]["snapshot"] == 2
    assert one.get("/health").json()["status"] == "ok"
    assert one.get("/health").json()["replica"]["stale_s"] < 3
    metrics = one.get("/metrics").text
    for line in ("mbpa_position 4.0", "mbpa_lag 0.0", "mbpa_snapshot 2.0", "mbpa_stale_seconds 0."):
        assert line in metrics


@pytest.mark.heavy
def test_a_position_that_is_not_reached_is_refused(services: list[httpx.Client]) -> None:
    one, _ = services
    found = one.get("/labels", headers={POSITION_HEADER: "1000"})
    assert found.status_code == 503
    assert found.json()["error"].startswith("this replica is at position 2, not 1000")
    assert found.headers["Retry-After"] == "1"
    for wrong in ("-1", "one", "9" * 30):
        found = one.get("/labels", headers={POSITION_HEADER: wrong})
        assert found.status_code == 422
        assert "must be a position or 'latest'" in found.json()["error"]


@pytest.mark.heavy
def test_the_client_reads_what_it_wrote_elsewhere(services: list[httpx.Client]) -> None:
    one, other = (str(each.base_url) for each in services)
    client = ServiceClient(one)
    for number in range(10):
        embedding = QUERIES[0].tolist()
        lesson = {"label": f"new {number}", "text": "a text", "embedding": embedding}
        client.post("/learn", {"examples": [lesson]})
        client.url = other.rstrip("/") if number % 2 == 0 else one.rstrip("/")
        labels = [each["label"] for each in client.get("/labels")["labels"]]
        assert f"new {number}" in labels


@pytest.mark.heavy
def test_a_backup_of_a_replica_is_a_run(
    services: list[httpx.Client], load: Callable[..., Classifier], tmp_path: Path
) -> None:
    one, _ = services
    for number in range(8):
        teach(one, f"trained {number % 4}", f"more {number}")
    out = tmp_path / "backup.tar"
    assert main(["backup", str(one.base_url).rstrip("/"), "--out", str(out)]) == 0
    assert main(["restore", str(out), "--out", str(tmp_path / "restored")]) == 0
    with Classifier.load(tmp_path / "restored") as restored:
        assert get_answers(restored) == get_answers(load())


@pytest.mark.slow
def test_training_and_renaming_over_http_reach_all_replicas(services: list[httpx.Client]) -> None:
    one, other = services
    assert one.post("/retrain", json={}).json()["labels"] == 4
    assert main(["rename", str(other.base_url).rstrip("/"), "trained 0", "renamed"]) == 0
    wait_until(lambda: one.get("/labels").json() == other.get("/labels").json())
    query = {"embeddings": QUERIES.tolist(), "top": 9}
    assert one.post("/predict", json=query).json() == other.post("/predict", json=query).json()


@pytest.mark.heavy
def test_check_lists_replicas(
    services: list[httpx.Client],
    run: Path,
    shared: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    teach(services[0], "new", "a text")

    def list_replicas() -> list[str]:
        assert main(["check", str(run), "--database", shared]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "25 examples of 5 labels at position 3" in lines[2]
        return [line for line in lines if line.startswith("replica ")]

    wait_until(lambda: sum("at position 3, 0 behind" in line for line in list_replicas()) == 2)


# While the database is away


@pytest.fixture
def proxied(
    postgres: PostgresServer,  # noqa: F811
    shared: str,
    load: Callable[..., Classifier],
) -> Iterator[tuple[Proxy, httpx.Client]]:
    """Return a proxy, and a client of a service that reaches the database through it."""
    with Proxy(postgres.port) as proxy, ExitStack() as stack:
        url = shared.replace(f":{postgres.port}/", f":{proxy.port}/")
        yield proxy, serve(stack, load(url))


@pytest.mark.heavy
@pytest.mark.parametrize("mode", ["cut", "hold"])
def test_a_replica_without_its_database_answers_and_says_how_old_its_state_is(
    proxied: tuple[Proxy, httpx.Client], load: Callable[..., Classifier], mode: Any
) -> None:
    proxy, client = proxied
    assert teach(client, "new", "before").status_code == 200
    query = {"embeddings": QUERIES.tolist()}
    before = client.post("/predict", json=query)
    assert "X-MbPA-Stale" not in before.headers
    proxy.mode = mode
    start = time.monotonic()
    refused = teach(client, "new", "meanwhile", request="meanwhile")
    assert refused.status_code == 503
    assert "cannot be used" in refused.json()["error"]
    assert refused.headers["Retry-After"] == "1"
    assert time.monotonic() - start < 8
    again = time.monotonic()
    assert teach(client, "new", "meanwhile", request="meanwhile").status_code == 503
    assert time.monotonic() - again < 2  # from now on at once
    health = client.get("/health").json()
    assert health["status"] == "read-only"
    assert "cannot be used" in health["reason"]
    wait_until(lambda: client.get("/health").json()["replica"]["stale_s"] > 3)
    stale = client.post("/predict", json=query)
    assert stale.json() == before.json()
    assert float(stale.headers["X-MbPA-Stale"]) >= 3
    latest = client.get("/labels", headers={POSITION_HEADER: "latest"})
    assert latest.status_code == 503
    load().learn([Lesson("elsewhere", "meanwhile", QUERIES[1])])
    proxy.mode = "pass"
    wait_until(lambda: client.get("/health").json()["status"] == "ok")
    latest = client.get("/labels", headers={POSITION_HEADER: "latest"})
    assert "elsewhere" in [each["label"] for each in latest.json()["labels"]]
    taught = teach(client, "new", "meanwhile", request="meanwhile")
    assert taught.status_code == 200
    assert "X-MbPA-Stale" not in client.post("/predict", json=query).headers
    listed = client.get("/examples", params={"label": "new"}).json()["examples"]
    assert [each["text"] for each in listed] == ["before", "meanwhile"]


@pytest.mark.heavy
def test_a_slow_network_delays_and_nothing_else(proxied: tuple[Proxy, httpx.Client]) -> None:
    proxy, client = proxied
    proxy.delay_s = 0.1
    for number in range(3):
        assert teach(client, "new", f"slow {number}").status_code == 200
    assert client.get("/stats").json()["examples"] == 27


@pytest.mark.heavy
def test_killed_backends_are_replaced(
    services: list[httpx.Client],
    postgres: PostgresServer,  # noqa: F811
    shared: str,
) -> None:
    one, other = services
    name = shared.rpartition("/")[2]
    end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
    for number in range(3):
        postgres.execute(end, name, database="postgres")

        def is_taught(number: int = number) -> bool:
            return teach(one, "new", f"{number}", request=f"{number}").status_code == 200

        wait_until(is_taught)
    wait_until(lambda: other.get("/stats").json()["examples"] == 27)


@pytest.mark.heavy
def test_a_full_disk_of_the_server_is_reported_and_nothing_is_stored(
    run: Path,
) -> None:
    """The data lie on a file system of 100 MB, which is then filled."""
    small = Path(tempfile.mkdtemp(prefix="mbpa-small-"))
    mounting = ["mount", "-t", "tmpfs", "-o", "size=100m,mode=755", "tmpfs", str(small)]
    if subprocess.run(mounting, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        settings = {"max_wal_size": "32MB", "min_wal_size": "32MB"}
        try:
            server = PostgresServer(settings, parent=small)
        except PostgresMissingError as error:
            pytest.skip(f"PostgreSQL cannot be run here: {error}")
        with server:
            _fill_disk(server, run, small)
    finally:
        subprocess.run(["umount", str(small)], check=True)
        small.rmdir()


def _teach_much(classifier: Classifier) -> None:
    for number in range(2000):
        classifier.learn([Lesson("new", f"{number} {'x' * 9000}", QUERIES[0])] * 16)


def _fill_disk(server: PostgresServer, run: Path, small: Path) -> None:
    journal_copy.copy_to_database(run, server.url)
    with Classifier.load(run, database=server.url) as classifier:
        classifier.learn([Lesson("new", "before", QUERIES[0])])
        before = get_answers(classifier)
        server.execute("CHECKPOINT")
        with open(small / "filler", "wb") as filler:
            free = shutil.disk_usage(small).free
            filler.write(bytes(max(0, free - 100_000)))
            filler.flush()
            with pytest.raises(JournalError, match="the disk of the database is full"):
                _teach_much(classifier)
        (small / "filler").unlink()
        classifier.follow()
        count = len(classifier)
        assert count % 16 == 25 % 16
        classifier.learn([Lesson("new", "after", QUERIES[0])])
        assert len(classifier) == count + 1
        assert before[2].keys() == classifier.labels.keys()
