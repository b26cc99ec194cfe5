"""Running experiments: results, saved work, killed runs, and the report."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import counting
import pytest
import torch

from experiments import EXPERIMENTS, cli, running
from experiments.data import SETS
from experiments.errors import ExperimentError
from experiments.experiment import Context, find, preset
from experiments.report import write_report
from experiments.results import (
    Result,
    environment,
    read_results,
    write_result,
)
from experiments.running import Run, device_named, execute
from experiments.sections import Figure, Table
from experiments.workspace import Workspace

TESTS = Path(__file__).parent
ROOT = TESTS.parents[1]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(TESTS), str(ROOT)]),
    "OMP_NUM_THREADS": "1",
}
CPU = torch.device("cpu")
MAIN = "import sys; from experiments.cli import main; sys.exit(main())"
PRESETS = [(name, key) for name in EXPERIMENTS for key in find(name).presets]


def in_a_process(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python that can import the tests' own experiment."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=400)


def counted(out: Path, key: str = "smoke", again: bool = False, **changes: object) -> list[Result]:
    config = dataclasses.replace(preset(counting.EXPERIMENT, key), **changes)
    run = Run(counting.EXPERIMENT, key, config, out)
    return execute(run, device=CPU, progress=False, again=again, say=lambda line: None)


def metrics(results: list[Result]) -> dict[int | None, object]:
    return {result.seed: result.metrics for result in results}


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


# Results


def a_result(**changes: object) -> Result:
    records = [
        {"method": "MbPA", "tasks_seen": 3, "name": "mean_accuracy", "value": 0.1 + 0.2},
        {"method": "MLP", "tasks_seen": None, "name": "mean_accuracy", "value": 1},
    ]
    result = Result(
        experiment="counting",
        preset="smoke",
        seed=3,
        config={"seeds": [3], "lr": 1e-05},
        environment=environment(CPU),
        seconds=1.234567,
        command="python -m experiments run counting --preset smoke",
        metrics=records,
    )
    return dataclasses.replace(result, **changes)


def written(folder: Path, result: Result) -> Path:
    path = folder / result.experiment / result.file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_result(result, path)
    return path


def test_a_result_comes_back_as_it_was(tmp_path: Path) -> None:
    written(tmp_path, a_result())
    assert read_results(tmp_path, "counting") == [a_result(seconds=1.23)]


def test_a_result_has_one_record_per_line_and_the_same_bytes_every_time(tmp_path: Path) -> None:
    first = written(tmp_path, a_result()).read_text()
    assert first == written(tmp_path, a_result()).read_text()
    records = [line.strip().rstrip(",") for line in first.splitlines() if '"method"' in line]
    assert [json.loads(line) for line in records] == a_result().metrics
    assert list(json.loads(first))[:3] == ["experiment", "preset", "seed"]
    assert [path.name for path in (tmp_path / "counting").iterdir()] == ["smoke-seed3.json"]


def test_what_is_not_finite_is_written_as_null(tmp_path: Path) -> None:
    written(tmp_path, a_result(metrics=[{"name": "loss", "value": math.nan}]))
    assert read_results(tmp_path, "counting")[0].metrics == [{"name": "loss", "value": None}]


@pytest.mark.parametrize("record", [{"name": "x"}, {"value": 1}, {"name": "x", "value": [1]}])
def test_a_malformed_record_is_refused(tmp_path: Path, record: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"metrics\[0\] must"):
        written(tmp_path, a_result(metrics=[record]))
    assert list((tmp_path / "counting").iterdir()) == []


def test_seeds_are_sorted_by_number(tmp_path: Path) -> None:
    for seed in (10, 9, 100):
        written(tmp_path, a_result(seed=seed))
    assert [result.seed for result in read_results(tmp_path, "counting")] == [9, 10, 100]


def test_unrelated_folders_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "cpu.json").write_text("[]")
    assert read_results(tmp_path) == []
    assert read_results(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "null",
        lambda text: text.replace('"seconds"', '"minutes"'),
        lambda text: text.replace('"MbPA"', "NaN"),
        lambda text: text.replace('"MbPA"', '["MbPA"]'),
        lambda text: text.replace('"name"', '"title"'),
        lambda text: text.replace('"seed": 3', '"seed": "3"'),
        lambda text: text.replace('"seed": 3', '"seed": 4'),
        lambda text: text.replace('"counting"', '"illustration"'),
        lambda text: "[" * 100_000,
        lambda text: "\udcff\udcfe",
    ],
)
def test_a_damaged_or_foreign_file_is_named_in_one_line(tmp_path: Path, damage) -> None:
    path = written(tmp_path, a_result())
    path.write_bytes(damage(path.read_text()).encode("utf-8", "surrogateescape"))
    with pytest.raises(ExperimentError, match=re.escape(str(path))) as caught:
        read_results(tmp_path, "counting")
    assert "move it" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_environment_says_what_a_number_may_depend_on() -> None:
    found = environment(CPU)
    assert set(found) == {"mbpa", "torch", "python", "device", "cores"}
    assert found["torch"] == torch.__version__


# Kept work


def same(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        pairs = zip(left, right, strict=True)
        return type(left) is type(right) and all(same(*pair) for pair in pairs)
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return left == right and type(left) is type(right)


def test_any_state_of_tensors_and_json_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {
        "step": 3,
        "loss": math.nan,
        "best": -math.inf,
        "rate": 0.1,
        "tasks": [1, (2, "three"), None, True],
        "empty": {},
        "tensor": {"tensor": "0"},
        "weights": {0: torch.randn(3, 4).T, "half": torch.ones(2, dtype=torch.float16)},
        "bytes": torch.get_rng_state(),
        "scalar": torch.tensor(3),
        "nothing": torch.zeros(0, 3),
    }
    Workspace(tmp_path).save("state", state)
    found = Workspace(tmp_path).load("state")
    assert same(found, state)


def test_a_module_and_its_optimiser_go_on_where_they_were(tmp_path: Path) -> None:
    def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        module = torch.nn.Linear(3, 2)
        return module, torch.optim.Adam(module.parameters(), lr=0.1)

    def step(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        module(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()

    straight, other = parts(), parts()
    step(*straight), step(*straight)
    step(*other)
    state = {"module": other[0].state_dict(), "optimizer": other[1].state_dict()}
    Workspace(tmp_path).save("state", state)
    resumed = parts()
    found = Workspace(tmp_path).load("state")
    assert found is not None
    resumed[0].load_state_dict(found["module"])
    resumed[1].load_state_dict(found["optimizer"])
    step(*resumed)
    assert same(dict(resumed[0].state_dict()), dict(straight[0].state_dict()))


def test_states_of_several_names_do_not_disturb_each_other(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    assert workspace.load("a") is None
    workspace.save("a", {"x": 1})
    workspace.save("b", {"x": 2})
    workspace.save("a", {"x": 3})
    assert (workspace.load("a"), workspace.load("b")) == ({"x": 3}, {"x": 2})


@pytest.mark.parametrize("name", ["", "a/b", "..", ".lock", "a b"])
def test_names_that_would_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="name must be letters"):
        Workspace(tmp_path).save(name, {})


@pytest.mark.parametrize("value", [object(), {1.5: 1}, {1, 2}, b"bytes"])
def test_what_cannot_be_stored_is_refused_and_the_old_state_stays(tmp_path: Path, value) -> None:
    workspace = Workspace(tmp_path)
    workspace.save("state", {"x": 1})
    with pytest.raises(ValueError, match=r"state\['state'\]\['x'\]"):
        workspace.save("state", {"x": value})
    assert workspace.load("state") == {"x": 1}


@pytest.mark.parametrize("part", ["manifest.json", "*.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "gone", "null"])
def test_damaged_work_is_reported_and_ignored(tmp_path: Path, capsys, part, damage) -> None:
    workspace = Workspace(tmp_path)
    workspace.save("state", {"x": torch.arange(10.0), "y": "text"})
    (path,) = (tmp_path / "state").glob(part)
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(
        {
            "cut": content[:middle],
            "flip": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "empty": b"",
            "gone": b"",
            "null": b"null",
        }[damage]
    )
    if damage == "gone":
        path.unlink()
    assert workspace.load("state") is None
    if (damage, part) != ("gone", "manifest.json"):  # that is how a first save looks when killed
        told = capsys.readouterr().err.splitlines()
        assert len(told) == 1
        assert "saved work is damaged and will be redone" in told[0]
    workspace.save("state", {"x": 2})
    assert workspace.load("state") == {"x": 2}


def test_discarded_work_leaves_nothing(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / ".unfinished" / "run")
    with workspace.alone():
        workspace.save("state", {"x": 1})
        assert workspace.is_begun()
        workspace.discard()
    assert list(tmp_path.iterdir()) == []
    assert not workspace.is_begun()


def test_time_spent_before_an_interruption_counts(tmp_path: Path, monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr("experiments.workspace.time.perf_counter", lambda: now[0])
    first = Workspace(tmp_path)
    now[0] += 50
    first.save("state", {})
    first.load("state")
    assert first.seconds == 50
    second = Workspace(tmp_path)
    second.load("state")
    now[0] += 7
    assert second.seconds == 57


KILL_SAVES = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from experiments.workspace import Workspace

torch.set_num_threads(1)
workspace = Workspace(Path(sys.argv[1]))
pause = random.Random(0)
last, seen = 0, set()
for kills in range(1000):
    if kills >= 25 and len(seen) > 10:  # a busy machine saves less between two kills
        break
    child = os.fork()
    if child == 0:
        for number in range(last + 1, 10**6):
            workspace.save("state", {"number": number, "x": torch.full((1000,), float(number))})
    time.sleep(pause.uniform(0, 0.03 * (1 + kills / 25)))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    state = workspace.load("state")
    if state is None:
        assert last == 0, "a state was lost"
        continue
    assert (state["x"] == state["number"]).all(), "torn"
    assert state["number"] >= last, "older than what was there"
    last = state["number"]
    seen.add(last)
assert len(seen) > 10, seen
"""


@pytest.mark.heavy
def test_a_save_that_is_killed_leaves_the_old_state_or_the_new(tmp_path: Path) -> None:
    done = in_a_process(KILL_SAVES, tmp_path / "work")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # in particular, nothing was ever found damaged


# Runs


def test_a_run_writes_one_file_per_seed_and_leaves_nothing_else(tmp_path: Path) -> None:
    results = counted(tmp_path)
    assert sorted(files(tmp_path)) == [f"counting/smoke-seed{seed}.json" for seed in (0, 1)]
    assert read_results(tmp_path, "counting") == [
        dataclasses.replace(result, seconds=round(result.seconds, 2)) for result in results
    ]
    assert [result.config["seeds"] for result in results] == [[0], [1]]
    assert results[0].command == "python -m experiments run counting --preset smoke"


def test_existing_results_are_not_computed_again(tmp_path: Path, monkeypatch) -> None:
    first = counted(tmp_path, seeds=(1,))
    before = files(tmp_path)
    asked: list[tuple[int, ...]] = []
    original = counting.run
    experiment = dataclasses.replace(
        counting.EXPERIMENT,
        run=lambda config, context: asked.append(config.seeds) or original(config, context),
    )
    told: list[str] = []
    run = Run(experiment, "smoke", preset(experiment, "smoke"), tmp_path)
    both = execute(run, device=CPU, progress=False, say=told.append)
    assert asked == [(0,)]
    assert metrics(both)[1] == metrics(first)[1]
    assert "smoke-seed1.json" in told[0]
    assert "--again" in told[0]
    assert before.items() <= files(tmp_path).items()
    execute(run, device=CPU, progress=False, again=True, say=told.append)
    assert asked == [(0,), (0, 1)]


def test_a_seed_gives_the_same_result_alone_and_among_others(tmp_path: Path) -> None:
    assert (
        metrics(counted(tmp_path / "a", seeds=(0, 1, 2)))[2]
        == metrics(counted(tmp_path / "b", seeds=(2,)))[2]
    )


def test_other_settings_go_into_other_files(tmp_path: Path) -> None:
    counted(tmp_path)
    before = files(tmp_path)
    (changed,) = counted(tmp_path, seeds=(0,), units=5)
    assert re.fullmatch(r"custom-[0-9a-f]{8}", changed.preset)
    assert (
        changed.command == "python -m experiments run counting --preset smoke --seeds 0 --units 5"
    )
    assert before.items() < files(tmp_path).items()


def test_a_file_made_with_earlier_settings_of_the_preset_is_not_replaced(tmp_path: Path) -> None:
    counted(tmp_path)
    path = tmp_path / "counting" / "smoke-seed0.json"
    path.write_text(path.read_text().replace('"units": 4', '"units": 3'))
    before = files(tmp_path)
    with pytest.raises(ExperimentError, match=r"smoke-seed0\.json was made with other settings"):
        counted(tmp_path)
    assert files(tmp_path) == before
    counted(tmp_path, again=True)
    assert '"units": 4' in path.read_text()


def test_a_damaged_result_stops_the_run_and_stays(tmp_path: Path) -> None:
    counted(tmp_path)
    (tmp_path / "counting" / "smoke-seed0.json").write_text("{")
    before = files(tmp_path)
    with pytest.raises(ExperimentError, match=r"smoke-seed0\.json is damaged"):
        counted(tmp_path)
    assert files(tmp_path) == before


class Stopped(BaseException):
    """Stops a run halfway."""


def interrupted(out: Path, after: int, monkeypatch, **changes: object) -> None:
    """Run until this many states are saved, and stop in the next save."""
    original, saves = Workspace.save, []

    def save(self: Workspace, name: str, state: dict[str, object]) -> None:
        saves.append(name)
        if len(saves) > after:
            raise Stopped
        original(self, name, state)

    with monkeypatch.context() as patched:
        patched.setattr(Workspace, "save", save)
        with pytest.raises(Stopped):
            counted(out, **changes)


@pytest.mark.parametrize("after", [0, 1, 4, 5, 7])  # of four saves for each of two seeds
def test_a_run_resumes_after_any_unit(tmp_path: Path, monkeypatch, after: int) -> None:
    interrupted(tmp_path / "a", after, monkeypatch)
    assert read_results(tmp_path / "a", "counting") == []
    left = list((tmp_path / "a").rglob("manifest.json"))
    assert len(left) == math.ceil(after / 4)
    resumed = counted(tmp_path / "a")
    assert metrics(resumed) == metrics(counted(tmp_path / "b"))
    assert sorted(files(tmp_path / "a")) == sorted(files(tmp_path / "b"))


def test_a_run_interrupted_between_its_files_resumes_with_its_kept_work(
    tmp_path: Path, monkeypatch
) -> None:
    original, calls = running.write_result, []

    def write(result: Result, path: Path) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise Stopped
        original(result, path)

    monkeypatch.setattr(running, "write_result", write)
    with pytest.raises(Stopped):
        counted(tmp_path)
    told: list[str] = []
    run = Run(counting.EXPERIMENT, "smoke", counting.CountingConfig(), tmp_path)
    monkeypatch.setattr(Workspace, "save", lambda *_: pytest.fail("nothing is left to compute"))
    results = execute(run, device=CPU, progress=False, say=told.append)
    assert [result.seed for result in results] == [0, 1]
    assert any("continuing where an interrupted run left off" in line for line in told)
    assert sum(line.startswith("wrote") for line in told) == 1


def test_damaged_work_is_done_again(tmp_path: Path, monkeypatch, capsys) -> None:
    interrupted(tmp_path / "a", 6, monkeypatch)
    payload = next((tmp_path / "a").rglob("*.safetensors"))
    payload.write_bytes(payload.read_bytes()[:-1])
    assert metrics(counted(tmp_path / "a")) == metrics(counted(tmp_path / "b"))
    assert "saved work is damaged" in capsys.readouterr().err


def test_work_of_other_settings_seeds_devices_or_code_is_not_resumed(
    tmp_path: Path, monkeypatch
) -> None:
    def folder(device: str = "cpu", kind: str = "run", **changes: object) -> Path:
        config = counting.CountingConfig(**changes)
        run = Run(counting.EXPERIMENT, "smoke", config, tmp_path, kind)
        return run.workspace(torch.device(device)).folder

    others = [folder("cuda"), folder(seeds=(0,)), folder(units=5), folder(kind="tune")]
    others.append(folder(inner=counting.Inner(rate=0.1)))
    assert folder() == folder()
    monkeypatch.setattr(running, "_digest_code", lambda module: "other")
    others.append(folder())
    monkeypatch.undo()
    assert len({folder(), *others}) == 7


KILL_RUNS = """
import os, random, shutil, signal, sys, time
from pathlib import Path
import torch, counting
from experiments.cli import main
from experiments.results import read_results

torch.set_num_threads(1)
out = Path(sys.argv[1])
words = ["run", "counting", "--preset", "smoke", "--no-progress", "--units", "6", "--out"]


def metrics(folder):
    return {(r.preset, r.seed): r.metrics for r in read_results(folder, "counting")}


assert main([*words, str(out / "first")]) == 0  # which also finds out what the run depends on
start = time.perf_counter()
assert main([*words, str(out / "whole")]) == 0
duration = time.perf_counter() - start
wanted = metrics(out / "whole")
assert len(wanted) == 2
pause, kills = random.Random(0), 0
while kills < 25:
    folder = out / "killed"
    shutil.rmtree(folder, ignore_errors=True)
    while True:
        child = os.fork()
        if child == 0:
            os._exit(main([*words, str(folder)]))
        time.sleep(pause.uniform(0, 1.2 * duration))
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        found = metrics(folder)
        assert found.items() <= wanted.items(), "a result differs"
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            break
        kills += 1
    assert found == wanted
    assert not list(folder.rglob(".unfinished")), "something was left"
print(kills)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    done = in_a_process(KILL_RUNS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "continuing where an interrupted run left off" in done.stdout


def test_the_second_of_two_at_one_run_is_refused(tmp_path: Path, capsys) -> None:
    run = Run(counting.EXPERIMENT, "smoke", counting.CountingConfig(), tmp_path)
    workspace = run.workspace(CPU)
    with workspace.alone():
        words = ["run", "counting", "--preset", "smoke", "--out", str(tmp_path)]
        assert cli.main(words) == 2
        told = capsys.readouterr().err
        assert len(told.splitlines()) == 1
        assert "another process is working on this run" in told
        assert len(counted(tmp_path, seeds=(5,))) == 1  # which is another run
    assert len(counted(tmp_path)) == 2


def test_a_lock_removed_with_its_folder_no_longer_counts(tmp_path: Path) -> None:
    first, second = Workspace(tmp_path / "run"), Workspace(tmp_path / "run")
    with first.alone():
        first.discard()
        with second.alone(), pytest.raises(ExperimentError), Workspace(tmp_path / "run").alone():
            pass


def test_records_for_other_seeds_than_asked_for_are_a_mistake(tmp_path: Path) -> None:
    experiment = dataclasses.replace(counting.EXPERIMENT, run=lambda config, context: {5: []})
    run = Run(experiment, "smoke", counting.CountingConfig(), tmp_path)
    with pytest.raises(ValueError, match=r"must return records for the seeds \(0, 1\)"):
        execute(run, device=CPU, progress=False)


def test_seeds_may_make_one_result_together(tmp_path: Path) -> None:
    calls = []

    def work(config: counting.CountingConfig, context: Context) -> dict[None, list[object]]:
        calls.append(config.seeds)
        return {None: [{"name": "mean", "value": 1.0}]}

    experiment = dataclasses.replace(counting.EXPERIMENT, run=work)
    run = Run(experiment, "smoke", counting.CountingConfig(), tmp_path)
    (result,) = execute(run, device=CPU, progress=False, say=lambda line: None)
    assert (result.seed, result.file_name) == (None, "smoke.json")
    assert result.config["seeds"] == [0, 1]
    execute(run, device=CPU, progress=False, say=lambda line: None)
    assert calls == [(0, 1)]


def test_a_bar_shows_what_an_interrupted_run_had_done(tmp_path: Path, capsys) -> None:
    with Context(CPU, None, Workspace(tmp_path)).bar(10, "work", "units", initial=4) as bar:
        bar.update(6)
    assert "10/10" in capsys.readouterr().err
    with Context(CPU, None, Workspace(tmp_path), progress=False).bar(10, "work", "units") as bar:
        bar.update()
    assert capsys.readouterr().err == ""


def test_devices_are_found_by_name() -> None:
    assert device_named("cpu") == CPU
    if torch.cuda.is_available():
        assert device_named("auto").type == device_named("cuda").type == "cuda"
    else:
        assert device_named("auto") == CPU
        with pytest.raises(ExperimentError, match="no CUDA device"):
            device_named("cuda")


# Commands that make results again


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "key"), PRESETS)
def test_every_preset_can_be_parsed_and_typed_again(name: str, key: str) -> None:
    experiment = find(name)
    parsed = cli.parse(["run", name, "--preset", key])
    assert isinstance(parsed, cli.Run)
    assert parsed.settings == experiment.presets[key]
    kinds = dict.fromkeys(experiment.presets, "run") | {key: "tune"}
    for other, kind in kinds.items():
        changed = dataclasses.replace(experiment.presets[other], seeds=(3, 5))
        command = Run(experiment, key, changed, Path("results"), kind).command
        typed = cli.parse(shlex.split(command)[3:])
        assert isinstance(typed, cli.Run)
        assert typed.settings == changed, (other, command)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_keeps_to_the_rules(name: str) -> None:
    experiment = find(name)
    assert experiment.name == name
    assert {"smoke", "quick", "paper"} <= set(experiment.presets)
    assert experiment.summary
    assert experiment.reproduces
    general = {field.name for field in dataclasses.fields(cli.Options)}
    for config in experiment.presets.values():
        assert type(config).__dataclass_params__.frozen
        assert config.seeds
        assert not general & {field.name for field in dataclasses.fields(config)}


# The report


def parsed_page(path: Path) -> ET.Element:
    """Read as XML, which is stricter than HTML."""
    text = path.read_text("utf-8")
    assert text.startswith("<!DOCTYPE html>")
    return ET.fromstring(text)


@pytest.mark.heavy
def test_the_report_is_one_page_that_needs_nothing_else(tmp_path: Path) -> None:
    counted(tmp_path / "results", "paper")
    page = write_report(tmp_path / "results", tmp_path / "report")
    root = parsed_page(page)
    links = [v for node in root.iter() for k, v in node.attrib.items() if k in ("href", "src")]
    assert len(links) == 3
    assert all(link.startswith(("#", "data:")) for link in links)
    assert not re.search(r"(src|href)=[\"']?(https?:)?//|@import|url\(", page.read_text())
    assert not {"script", "link", "iframe"} & {node.tag for node in root.iter()}
    ids = {node.attrib["id"] for node in root.iter() if "id" in node.attrib}
    assert {link[1:] for link in links if link.startswith("#")} <= ids


@pytest.mark.heavy
def test_the_report_shows_text_tables_figures_commands_and_environment(tmp_path: Path) -> None:
    results = counted(tmp_path / "results", "paper")
    page = write_report(tmp_path / "results", tmp_path / "report")
    root = parsed_page(page)
    text = " ".join(root.itertext())
    for wanted in (
        "with < and &.",
        "Totals <of> all & more.",
        "python -m experiments run counting --preset paper",
    ):
        assert wanted in text
    assert f"torch {torch.__version__}" in text
    assert "seeds 0, 1, 2" in text
    cells = [node.text for node in root.iter("td")]
    assert f"{results[0].metrics[0]['value']:.3f}" in cells
    shown = [image.attrib["alt"] for image in root.iter("img")]
    assert shown == ["Totals <of> all & more.", "The same."]
    for name in ("counts", "again"):
        assert (page.parent / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        ET.fromstring((page.parent / f"{name}.svg").read_bytes())


@pytest.mark.heavy
def test_the_same_results_give_the_same_report_to_the_byte(tmp_path: Path) -> None:
    counted(tmp_path / "results")
    for out in ("a", "b"):
        write_report(tmp_path / "results", tmp_path / out)
    assert files(tmp_path / "a") == files(tmp_path / "b")


@pytest.mark.heavy
def test_presets_searches_and_changed_settings_are_told_apart(tmp_path: Path) -> None:
    counted(tmp_path / "results")
    counted(tmp_path / "results", "paper")
    counted(tmp_path / "results", units=2)
    run = Run(
        counting.EXPERIMENT,
        "quick",
        counting.EXPERIMENT.presets["quick"],
        tmp_path / "results",
        "tune",
    )
    execute(run, device=CPU, progress=False, say=lambda line: None)
    root = parsed_page(write_report(tmp_path / "results", tmp_path / "report"))
    shown = [node.text or "" for node in root.iter("span") if node.attrib.get("class") == "preset"]
    assert [label.split("-")[0] for label in shown] == ["paper", "smoke", "custom", "quick"]
    assert "How the settings were chosen" in " ".join(root.itertext())
    names = {path.name for path in (tmp_path / "report").glob("counts*.png")}
    assert {"counts.png", "counts-smoke.png"} < names
    assert len(names) == 3
    alone = parsed_page(write_report(tmp_path / "results", tmp_path / "one", ["smoke"]))
    assert len(list(alone.iter("img"))) == 2


@pytest.mark.heavy
def test_a_report_tells_what_it_draws(tmp_path: Path, capsys) -> None:
    counted(tmp_path / "results", "paper")
    words = ["report", str(tmp_path / "results"), "--out", str(tmp_path / "report")]
    assert cli.main(words) == 0
    assert "drawing counting" in capsys.readouterr().err
    assert cli.main([*words, "--no-progress"]) == 0
    assert capsys.readouterr().err == ""


def test_a_report_without_results_says_how_to_get_some(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="holds no results: `python -m experiments run NAME"):
        write_report(tmp_path, tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_tables_are_aligned_and_numbers_are_to_the_right() -> None:
    table = Table(
        "Title",
        ["method", "score", "note"],
        [["MLP", "1.5 ± 0.2", "a"], ["MbPA", "12.0", ""]],
        "End.",
    )
    assert table.as_text().splitlines() == [
        "Title",
        "",
        "method      score  note",
        "------  ---------  ----",
        "MLP     1.5 ± 0.2  a",
        "MbPA         12.0",
        "End.",
    ]
    assert Table("Empty", ["a"], []).as_text()


def test_where_there_is_little_room_words_are_broken_into_lines_and_numbers_are_not() -> None:
    words = "a great many words-with-hyphens that\nhardly fit a terminal"
    rows = [["MLP", "1,234.5 ± 0.2", words], ["MbPA", "12.0", "few"]]
    table = Table("Title", ["method", "score", "note"], rows, "Some more words after the end.")
    assert table.as_text(45).splitlines() == [
        "Title",
        "",
        "method          score  note",
        "------  -------------  ----------------------",
        "MLP     1,234.5 ± 0.2  a great many",
        "                       words-with-hyphens",
        "                       that hardly fit a",
        "                       terminal",
        "MbPA             12.0  few",
        "Some more words after the end.",
    ]
    assert max(map(len, table.as_text(10).splitlines()[2:-4])) == 43  # no word is cut to pieces
    assert table.as_text(1000) == table.as_text()


def test_a_table_has_as_many_cells_as_columns_in_every_row() -> None:
    with pytest.raises(ValueError, match="a row must have 1 cells"):
        Table("Bad", ["a"], [["1", "2"]])
    with pytest.raises(ValueError, match="name must be letters"):
        Figure("../x", "", lambda canvas: None)


# The commands


ERRORS = {
    ("run", "dreaming"): "no experiment is called 'dreaming': name one of illustration",
    ("run", "counting", "--preset", "huge"): "counting has no preset 'huge': name one of smoke",
    ("tune", "counting", "--preset=huge"): "counting has no preset 'huge': name one of smoke",
    ("run",): "name an experiment: illustration",
    ("report", "nowhere"): "nowhere holds no results: `python -m experiments run NAME",
}


@pytest.mark.parametrize("arguments", ERRORS, ids=" ".join)
def test_errors_are_one_line_that_says_what_to_do(arguments, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(list(arguments)) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == 1
    assert told.err.startswith(f"experiments: {ERRORS[arguments]}")
    assert list(tmp_path.iterdir()) == []


def test_a_run_prints_its_files_and_a_table_and_says_when_it_has_them(tmp_path, capsys) -> None:
    words = ["run", "counting", "--preset", "smoke", "--units", "3", "--inner.rate", "0.1"]
    assert cli.main([*words, "--out", str(tmp_path)]) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert re.fullmatch(r"wrote .*/counting/custom-\w+-seed0.json", lines[0])
    assert any(line.startswith("done in ") for line in lines)
    assert lines[4:6] == ["Totals", ""]
    assert lines[-1] == "smoke only tests the code: its numbers mean nothing"
    assert "6/6" in told.err
    assert cli.main([*words, "--out", str(tmp_path), "--no-progress"]) == 0
    told = capsys.readouterr()
    assert "--again" in told.out
    assert told.err == ""
    assert told.out.splitlines()[-6:] == lines[-6:]


def test_help_of_an_experiment_shows_both_kinds_of_options(capsys) -> None:
    assert cli.main(["run", "counting", "--help", "--preset", "paper"]) == 0
    printed = capsys.readouterr().out
    for wanted in ("--seeds", "One count each.", "--inner.rate", "--again", "(default: 50)"):
        assert wanted in printed


def test_impossible_settings_are_refused(tmp_path: Path, capsys) -> None:
    assert cli.main(["run", "counting", "--units", "0", "--out", str(tmp_path)]) == 2
    assert "units must be at least 1, got 0" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_search_is_kept_and_its_choice_printed(tmp_path: Path, capsys) -> None:
    for _ in range(2):
        assert cli.main(["tune", "counting", "--no-progress", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4].split() == ["sum", "units", "7"]
    told = f"python -m experiments run counting --preset quick --units 7 --out {tmp_path}"
    assert lines[-3:] == ["", "to run with these:", told]
    (result,) = read_results(tmp_path, "counting")
    assert (result.preset, result.file_name) == ("tune-quick", "tune-quick.json")


def test_a_search_says_how_to_run_with_what_it_chose(tmp_path: Path, capsys) -> None:
    out = tmp_path / "a folder"
    words = ["tune", "counting", "--preset", "smoke", "--inner.rate", "0.1", "--device", "cpu"]
    assert cli.main([*words, "--out", str(out), "--no-progress"]) == 0
    command = capsys.readouterr().out.split("to run with these:\n")[1].splitlines()[0]
    assert command.endswith(f" --out '{out}' --device cpu")
    assert cli.main([*shlex.split(command)[3:], "--no-progress"]) == 0
    found = [r for r in read_results(out, "counting") if not r.preset.startswith("tune-")]
    assert {result.preset[:7] for result in found} == {"custom-"}
    assert {(r.config["units"], r.config["inner"]["rate"]) for r in found} == {(7, 0.1)}


def test_an_experiment_without_a_search_says_so(tmp_path: Path) -> None:
    experiment = dataclasses.replace(counting.EXPERIMENT, tune=None)
    run = Run(experiment, "smoke", counting.CountingConfig(), tmp_path, "tune")
    with pytest.raises(ExperimentError, match="counting has no settings to search for"):
        execute(run, device=CPU)


@pytest.mark.parametrize("command", ["run", "report"])
@pytest.mark.parametrize("out", ["file", "file/below"])
def test_an_out_that_cannot_be_written_to_gives_a_one_line_error(
    tmp_path, capsys, command, out
) -> None:
    (tmp_path / "file").write_text("mine")
    counted(tmp_path / "results")
    before = files(tmp_path)
    words = {
        "run": ["run", "counting", "--no-progress"],
        "report": ["report", str(tmp_path / "results"), "--no-progress"],
    }
    assert cli.main([*words[command], "--out", str(tmp_path / out)]) == 2
    told = capsys.readouterr()
    assert len(told.err.splitlines()) == 1
    assert f"cannot write to {tmp_path / out}" in told.err
    assert "--out" in told.err
    assert files(tmp_path) == before


@pytest.mark.skipif(sys.platform != "linux", reason="needs a place where nothing can be made")
def test_a_folder_that_cannot_be_created_gives_a_one_line_error(capsys) -> None:
    assert cli.main(["run", "counting", "--no-progress", "--out", "/proc/none"]) == 2
    assert "cannot write to /proc/none" in capsys.readouterr().err


def test_a_damaged_result_stops_the_report_and_writes_nothing(tmp_path: Path, capsys) -> None:
    counted(tmp_path / "results")
    path = tmp_path / "results" / "counting" / "smoke-seed1.json"
    path.write_text(path.read_text()[:-100])
    before = files(tmp_path)
    assert cli.main(["report", str(tmp_path / "results"), "--out", str(tmp_path / "report")]) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert str(path) in told
    assert "move it away" in told
    assert files(tmp_path) == before


def test_a_report_without_matplotlib_names_the_extra(tmp_path, monkeypatch, capsys) -> None:
    counted(tmp_path / "results")
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["report", str(tmp_path / "results"), "--no-progress"]) == 1
    told = capsys.readouterr().err
    assert told == "experiments: matplotlib is not installed: pip install 'mbpa[experiments]'\n"


@pytest.mark.heavy
def test_an_interrupt_says_how_to_resume(tmp_path: Path) -> None:
    words = ["run", "counting", "--preset", "smoke", "--no-progress", "--pause", "5"]
    command = [sys.executable, "-c", f"import counting; {MAIN}", *words, "--out", str(tmp_path)]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.rglob("manifest.json")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 130, told
    assert told == "experiments: interrupted; run the same command again to continue\n"
    assert list(tmp_path.rglob("manifest.json"))


@pytest.mark.parametrize("word", ["list", "run", "tune", "reproduce", "report"])
def test_every_command_has_help(word, capsys) -> None:
    assert cli.main([word, "--help"]) == 0
    assert f"usage: python -m experiments {word}" in capsys.readouterr().out


def test_the_name_of_an_experiment_may_follow_the_general_options() -> None:
    command = cli.parse(["run", "--preset", "smoke", "illustration"])
    assert isinstance(command, cli.Run)
    assert (command.name, command.general.preset) == ("illustration", "smoke")


def test_all_experiments_of_a_preset_are_reproduced_though_one_fails(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    places = {"failing": "counting:FAILING", "counting": "counting:EXPERIMENT"}
    for name in list(EXPERIMENTS):
        monkeypatch.delitem(EXPERIMENTS, name)
    for name, place in places.items():
        monkeypatch.setitem(EXPERIMENTS, name, place)
    out = tmp_path / "out"
    words = ["reproduce", "--preset", "smoke", "--out", str(out), "--no-progress"]
    assert cli.main(words) == 1
    assert capsys.readouterr().err == "failing: it cannot be\n"
    assert len(list((out / "counting").glob("smoke-seed*.json"))) == 2
    assert (out / "report" / "index.html").exists()
    assert cli.main([*words[:2], "none", *words[3:]]) == 2
    assert "no experiment has the preset 'none'" in capsys.readouterr().err


def test_the_list_names_every_experiment_and_its_commands(capsys) -> None:
    assert cli.main(["list"]) == 0
    printed = capsys.readouterr().out
    for name, key in PRESETS:
        assert f"python -m experiments run {name} --preset {key}\n" in printed
        assert find(name).reproduces in printed


def test_missing_data_gives_a_one_line_error(tmp_path: Path, monkeypatch, capsys) -> None:
    words = ["run", "permuted-mnist", "--preset", "quick", "--no-progress"]
    assert (
        cli.main([*words, "--data-dir", str(tmp_path / "data"), "--out", str(tmp_path / "out")])
        == 2
    )
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert "python -m experiments data fetch mnist" in told
    assert not list(tmp_path.rglob("*.json"))


def test_commands_on_data_are_mounted(tmp_path: Path, capsys) -> None:
    assert cli.main(["data", "list", "--data-dir", str(tmp_path)]) == 0
    assert "mnist" in capsys.readouterr().out
    assert cli.main(["data", "check", "mnist", "--data-dir", str(tmp_path)]) == 1


def test_wrong_data_gives_a_one_line_error(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "data" / "mnist"
    folder.mkdir(parents=True)
    for file in SETS["mnist"].files:
        (folder / file.name).write_bytes(b"not images")
    words = ["--data-dir", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    assert cli.main(["run", "permuted-mnist", "--no-progress", *words]) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert str(folder) in told
    assert not list(tmp_path.rglob("*.json"))


def test_the_example_of_the_documentation_runs(tmp_path: Path, monkeypatch, capsys) -> None:
    text = (ROOT / "docs" / "experiments.md").read_text("utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "dice.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(EXPERIMENTS, "dice", "dice:EXPERIMENT")
    out = ["--out", str(tmp_path / "results"), "--no-progress"]
    assert cli.main(["run", "dice", "--preset", "smoke", "--throws", "20", *out]) == 0
    assert "Means" in capsys.readouterr().out
    assert cli.main(["run", "dice", "--help"]) == 0
    assert "Of one die." in capsys.readouterr().out
    write_report(tmp_path / "results", tmp_path / "report")
