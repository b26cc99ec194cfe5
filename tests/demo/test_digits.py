"""The demo's experiment: a small one, and the default one, whose claims hold on test images."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mbpa.demo import digits, report
from mbpa.demo.digits import DigitsConfig, DigitsResult, Record

SMALL = DigitsConfig(seeds=(0, 1), examples=(5, 20), pretraining_epochs=5)
METHODS = ["parametric", "kernel vote", "mixture", "MbPA"]


@pytest.fixture(scope="module")
def default_result() -> DigitsResult:
    """The result of fewer repetitions than `mbpa demo` makes, which would take too long here."""
    return digits.run(DigitsConfig(seeds=tuple(range(3))), progress=False)


@pytest.fixture(scope="module")
def small_result() -> DigitsResult:
    return digits.run(SMALL, progress=False)


@pytest.fixture(scope="module")
def images() -> digits.Images:
    return digits.load_images()


def mean(result: DigitsResult, method: str, examples: int, subset: str = "all") -> float:
    wanted = method, examples, subset
    return statistics.fmean(
        r["value"] for r in result.records if (r["method"], r["examples"], r["subset"]) == wanted
    )


# The claim


def test_mbpa_is_ahead_of_every_other_method_after_few_examples(default_result):
    few = [n for n in default_result.config.examples if n <= 50]
    leads = [
        mean(default_result, "MbPA", n) - max(mean(default_result, m, n) for m in METHODS[:-1])
        for n in few
    ]
    assert max(leads) > 0


def test_mbpa_is_never_more_than_two_points_behind_the_best(default_result):
    for n in default_result.config.examples:
        best = max(mean(default_result, method, n) for method in METHODS)
        assert mean(default_result, "MbPA", n) >= best - 2, n


def test_the_rescued_query_is_a_new_digit_that_adaptation_gets_right(default_result):
    rescue = default_result.rescue
    assert rescue is not None
    why = rescue.explanation
    assert why.labels is not None
    assert why.labels.index(rescue.digit) >= digits.OLD_DIGITS
    assert why.labels[int(why.after.argmax())] == rescue.digit
    assert why.labels[int(why.before.argmax())] != rescue.digit


# The protocol


def test_no_image_has_two_uses(images):
    task_seeds = (0, 7)
    parts = [images.test, images.validation, images.training.flatten()]
    together = torch.cat(parts)
    assert len(together.unique()) == len(together) == 1740
    for seed in task_seeds:
        task = digits.make_task(images, DigitsConfig(), seed)
        used = torch.cat([task.old_images, task.stream_images])
        assert not share_images(used, task.queries)
        assert not share_images(task.old_images, task.stream_images)


def share_images(left: torch.Tensor, right: torch.Tensor) -> bool:
    """No two of scikit-learn's digits are the same, so pixels identify an image."""
    return bool((torch.cdist(left, right, p=1) == 0).any())


def test_pretraining_shows_old_digits_only_and_the_stream_shows_all(images):
    task = digits.make_task(images, DigitsConfig(), seed=3)
    assert sorted(task.old_labels.unique().tolist()) == list(range(digits.OLD_DIGITS))
    assert sorted(task.stream_labels.unique().tolist()) == list(range(10))
    assert sorted(task.names) == sorted(digits.NAMES)


def test_validation_and_test_are_scored_on_their_own_images(images):
    test = digits.make_task(images, SMALL, seed=0)
    validation = digits.make_task(images, replace(SMALL, part="validation"), seed=0)
    assert torch.equal(test.stream_images, validation.stream_images)
    assert not share_images(test.queries, validation.queries)


def test_the_same_seeds_give_the_same_records(small_result):
    assert digits.run(SMALL, progress=False).records == small_result.records


def test_other_seeds_give_other_records(small_result):
    first = [r["value"] for r in small_result.records if r["seed"] == 0]
    second = [r["value"] for r in small_result.records if r["seed"] == 1]
    assert len(first) == len(second)
    assert first != second


def test_a_run_leaves_random_state_and_threads_alone():
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    digits.run(replace(SMALL, seeds=(0,)), progress=False)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_progress_goes_to_standard_error(capsys):
    digits.run(replace(SMALL, seeds=(0,)), progress=True)
    printed = capsys.readouterr()
    assert "20/20" in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("examples", [(), (0, 10), (20, 10), (10, 10)])
def test_examples_must_rise(examples):
    with pytest.raises(ValueError, match="examples must be positive and rising, got"):
        DigitsConfig(examples=examples)


def test_examples_cannot_exceed_the_images_there_are():
    with pytest.raises(ValueError, match="examples must be at most 500, got 501"):
        DigitsConfig(examples=(10, 501))


def test_seeds_cannot_be_empty():
    with pytest.raises(ValueError, match="seeds must name at least one"):
        DigitsConfig(seeds=())


# The report


def test_every_method_has_every_subset_at_every_point_for_every_seed(small_result):
    found = {(r["method"], r["subset"], r["examples"], r["seed"]) for r in small_result.records}
    assert len(found) == len(small_result.records) == 4 * 3 * 2 * 2
    assert {r["experiment"] for r in small_result.records} == {"digits"}
    assert {r["name"] for r in small_result.records} == {"top1"}
    assert all(0 <= r["value"] <= 100 for r in small_result.records)


def test_all_is_the_mean_of_old_and_new(small_result):
    for n in SMALL.examples:
        for method in METHODS:
            halves = [mean(small_result, method, n, s) for s in ("novel", "pre-trained")]
            assert mean(small_result, method, n) == pytest.approx(statistics.fmean(halves))


def record(method: str, subset: str, examples: int, seed: int, value: float) -> Record:
    return Record(
        experiment="digits",
        method=method,
        examples=examples,
        subset=subset,
        seed=seed,
        name="top1",
        value=value,
    )


def test_the_table_shows_means_and_marks_the_best_of_each_row():
    values = {"parametric": (40.0, 50.0), "MbPA": (60.0, 61.0)}
    records = [
        record(method, subset, 10, seed, value)
        for method, pair in values.items()
        for subset in report.SUBSETS
        for seed, value in enumerate(pair)
    ]
    lines = report.table(records).splitlines()
    rows = [line.split() for line in lines if " seen " in line]
    assert rows == [["10", "seen", "45.0", "60.5*"]] * 3
    assert "mean of 2 repetitions" in lines[3]
    titles = [line for line in lines if line.endswith("MbPA")]
    assert [title[:10] for title in titles] == ["old digits", "new digits", "all digits"]


def test_methods_that_tie_are_both_marked():
    records = [
        record(method, subset, 10, 0, 70.0)
        for method in ("parametric", "MbPA")
        for subset in report.SUBSETS
    ]
    assert report.table(records).count("70.0*") == 6


def test_the_figure_is_a_png(small_result):
    assert report.figure(small_result.records).startswith(b"\x89PNG")


def test_the_figure_can_be_drawn_from_one_repetition(small_result):
    records = [r for r in small_result.records if r["seed"] == 0]
    assert report.figure(records).startswith(b"\x89PNG")


def test_files_hold_the_records_and_leave_nothing_else_behind(small_result, tmp_path: Path):
    files = report.write(small_result, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.json", "demo.png"]
    document = json.loads(files["records"].read_text())
    assert document["metrics"] == small_result.records
    assert document["config"]["mbpa_lr"] == SMALL.mbpa_lr
    assert document["environment"]["torch"] == torch.__version__
    assert document["environment"]["cores"] >= 1


def test_a_failed_write_keeps_the_file_that_was_there(small_result, tmp_path, monkeypatch):
    (tmp_path / "demo.json").write_text("old")

    def full_disk(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(OSError, match="No space left"):
        report.write(small_result, tmp_path)
    assert (tmp_path / "demo.json").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_prepare_makes_the_directory_and_leaves_it_empty(tmp_path):
    report.prepare(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_the_text_explains_the_rescued_query(default_result):
    text = report.text(default_result)
    assert "One prediction explained" in text
    assert f"a new digit, {default_result.rescue.digit}, after" in text
    assert "before  " in text
    assert "neighbours (5 of " in text


def test_the_text_says_so_when_there_is_no_query_to_explain(small_result):
    assert "no image of a new digit" in report.text(replace(small_result, rescue=None))
