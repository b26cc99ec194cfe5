"""The fuzzer finds what is planted, and what reads requests and files withstands a small dose."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import logging
import os
import random
import signal
import time
import zlib

import pytest
from peak import touch_new_memory

from reliability import fuzz
from reliability.fuzzing import file_targets, mutators, request_target
from reliability.fuzzing.coverage import ArcTracer
from reliability.fuzzing.engine import Fuzzer, Summary, Target, summarise_message
from reliability.fuzzing.isolation import Death, run_isolated
from reliability.fuzzing.limits import MemoryMeter

PLANTED = '''
def parse(data):
    """Each byte is a branch of its own: to pass all, an input must be kept for passing some."""
    if data[:1] == b"B":
        if data[1:2] == b"U":
            if data[2:3] == b"G":
                return 1 // 0
    return 0
'''


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A parser with a defect, in a file whose lines can be traced."""
    path = tmp_path_factory.mktemp("planted") / "planted_parser.py"
    path.write_text(PLANTED)
    spec = importlib.util.spec_from_file_location("planted_parser", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.parse


def make_target(check, traced=(), **options) -> Target:
    """A target that calls `check`, which returns its outcome, if it has one."""

    @contextlib.contextmanager
    def open_check(directory):
        yield lambda data: str(check(data) or "")

    return Target("planted", lambda: [b"seed"], open_check, tuple(traced), **options)


def run_target(target: Target, *, cases: int, seed: int = 0, **options) -> Summary:
    with fuzz.open_target(target) as check:
        return Fuzzer(target, check, seed=seed, **options).run(cases=cases)


@pytest.mark.heavy
def test_a_planted_defect_is_found_because_of_coverage(planted):
    letters = tuple(bytes([code]) for code in range(65, 91))
    target = make_target(planted, ["planted_parser.py"], tokens=letters)
    found = run_target(target, cases=20_000).findings
    assert [finding.signature.split(":")[0] for finding in found] == [
        "ZeroDivisionError in planted_parser.py, parse"
    ]
    assert found[0].data == b"BUG", "it is made as small as it can be"
    blind = make_target(planted, tokens=letters)
    assert run_target(blind, cases=20_000).findings == [], "without coverage"


def test_a_token_reaches_what_bytes_do_not():
    def check(data):
        assert b"</magic-token>" not in data

    target = make_target(check, tokens=(b"</magic-token>",))
    assert len(run_target(target, cases=100).findings) == 1
    assert run_target(make_target(check), cases=2_000).findings == []


def test_the_same_seed_tries_the_same_inputs():
    def inputs(seed):
        tried = []
        run_target(file_targets.JSONL, cases=60, seed=seed, announce=tried.append)
        return tried

    assert inputs(1) == inputs(1)
    assert inputs(1) != inputs(2)


def test_an_input_that_is_smallest_for_nothing_leaves_the_corpus():
    target = make_target(lambda data: "long" if len(data) > 4 else "short")
    with fuzz.open_target(target) as check:
        fuzzer = Fuzzer(target, check, seed=0)
        fuzzer.run(cases=500)
    assert sorted(map(len, fuzzer.corpus)) == [0, 5]


def test_a_finding_is_saved_and_can_be_replayed(tmp_path):
    data = b'{"format": 1, "mbpa": "", "labels": 5}'
    (path,) = [
        finding.save(tmp_path, "planted")
        for finding in run_target(make_target(json.loads), cases=50).findings[:1]
    ]
    assert path.with_suffix(".txt").read_text().startswith("JSONDecodeError")
    with pytest.raises(fuzz.BrokenPromiseError, match="JSONDecodeError"):
        fuzz.replay(make_target(json.loads), path.read_bytes())
    (outcome,) = fuzz.replay(file_targets.RUN, data)["outcome"]
    assert outcome == "is damaged labels must be a list"
    assert logging.getLogger("mbpa").isEnabledFor(logging.WARNING)  # not silenced for ever


def test_too_much_memory_is_a_finding():
    if not MemoryMeter().is_available:
        pytest.skip("this system does not tell the peak of resident memory")
    target = make_target(lambda data: touch_new_memory(80 << 20), memory_bytes=64 << 20)
    assert [finding.kind for finding in run_target(target, cases=2).findings] == ["memory"]
    modest = make_target(lambda data: touch_new_memory(8 << 20), memory_bytes=64 << 20)
    assert run_target(modest, cases=2).findings == []


def test_a_slow_case_is_a_finding():
    target = make_target(lambda data: time.sleep(0.02))
    slow = run_target(target, cases=2, slow_case_s=0.01)
    assert [finding.kind for finding in slow.findings] == ["slow"]
    assert run_target(target, cases=2, slow_case_s=10.0).findings == []


def test_a_case_that_kills_its_process_is_known():
    def work(announce):
        announce(b"harmless")
        announce(b"deadly")
        os.kill(os.getpid(), signal.SIGKILL)

    works = [("dies", work), ("lives", lambda announce: 7)]
    results = dict(run_isolated(works, jobs=2))
    assert results == {"dies": Death("exit status -9", 2, b"deadly"), "lives": 7}


def test_coverage_tells_branches_apart_and_ignores_other_files(planted):
    tracer = ArcTracer(["planted_parser.py"])
    seen = []
    for data in (b"", b"x", b"B"):
        with tracer:
            planted(data)
            json.dumps({"a": [1]})
        seen.append(tracer.features())
    assert seen[0] == seen[1] < seen[2] | seen[0]
    assert seen[0] != seen[2]
    assert len(seen[0]) < 5


@pytest.mark.parametrize(
    "target",
    [
        file_targets.CHECKPOINT,
        dataclasses.replace(file_targets.PICTURE, seeds=file_targets.make_picture_seeds),
        file_targets.CSV,
        file_targets.JSONL,
        file_targets.RUN,
    ],
    ids=lambda target: target.name,
)
def test_what_reads_files_withstands_bad_ones(target):
    summary = run_target(target, cases=250)
    assert summary.findings == []
    assert summary.outcomes["read" if target.name != "picture" else "kept"] >= 4
    assert len(summary.outcomes) > 4, "inputs must get past the first check"


@pytest.mark.heavy
def test_requests_that_make_no_sense_are_refused_and_change_nothing():
    summary = run_target(request_target.REQUESTS, cases=120)
    assert summary.findings == []
    assert {outcome.split()[1] for outcome in summary.outcomes} >= {"200", "401", "404", "422"}


def test_an_answer_that_breaks_the_description_is_a_finding(monkeypatch):
    from mbpa.serve.classifier import Classifier

    def forget(self, ids=(), label=None, *, by=None):
        return [1, 2, 3]  # which it did not

    monkeypatch.setattr(Classifier, "forget", forget)
    (finding,) = run_target(request_target.REQUESTS, cases=10).findings
    assert "/forget of 3 changed the count" in finding.message


def test_structured_mutations_keep_the_structure():
    draw = random.Random(0)
    (seed, *_) = file_targets.make_picture_seeds()
    for _ in range(50):
        changed = mutators.mutate_png(draw, seed)
        at = len(mutators.PNG_SIGNATURE)
        for kind, content in mutators.split_chunks(changed):
            at += 8 + len(content)
            assert changed[at : at + 4] == zlib.crc32(kind + content).to_bytes(4, "big")
            at += 4
        assert at == len(changed)
        json.loads(mutators.mutate_json(draw, b'{"a": [1, 2, {"b": "c"}]}'))
    parts = [b"", b"one", bytes(300)]
    assert mutators.unpack_parts(mutators.pack_parts(parts)) == parts


def test_messages_are_told_apart_by_what_they_say_and_not_by_what_they_quote():
    one = summarise_message("/a/b.csv, line 3: 'text' must be text, got 5")
    assert one == summarise_message('/c.csv, line 77: "la\'bel" must be text, got [1]')
    assert one != summarise_message("/c.csv has no column 'x', but 'y'")


def test_asking_for_atheris_where_it_is_missing_says_how_to_get_it(tmp_path):
    if importlib.util.find_spec("atheris") is not None:
        pytest.skip("atheris is installed")
    with pytest.raises(SystemExit, match="pip install atheris"):
        fuzz.run_atheris(file_targets.RUN, 1.0, 0, tmp_path)
