"""A taught classifier: against slow oracles, and exact under every history of lessons."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.nn import functional

from mbpa.checkpoint import load_checkpoint, save_checkpoint
from mbpa.teaching import Learner, Prediction, TaughtClassifier, fit_learner
from mbpa.teaching.belief import ClassBelief, fit_belief, refine_belief
from mbpa.teaching.combination import (
    LOST_POINTS,
    MARGINS,
    Combination,
    Evidence,
    RehearsedEvidence,
    _find_margins,
)
from mbpa.teaching.example_store import ExampleStore, measure_cosines, round_keys

DIM, KNOWN, NEW, EACH = 16, 12, 6, 24


def draw_keys(labels: Tensor, noise: float = 0.22, seed: int = 0) -> Tensor:
    """Keys around one random direction per label."""
    generator = torch.Generator().manual_seed(seed)
    centers = functional.normalize(torch.randn(40, DIM, generator=torch.Generator().manual_seed(9)))
    away = noise * torch.randn(len(labels), DIM, generator=generator)
    return functional.normalize(centers[labels] + away, dim=1)


def train(keys: Tensor, labels: Tensor, classes: int) -> nn.Linear:
    """A ridge regression on ±1, scaled: enough of a head."""
    wanted = 2 * functional.one_hot(labels, classes).float() - 1
    bordered = torch.cat([keys, torch.ones(len(keys), 1)], 1)
    solved = torch.linalg.solve(bordered.T @ bordered + torch.eye(DIM + 1), bordered.T @ wanted)
    head = nn.Linear(DIM, classes).requires_grad_(False)
    head.weight.copy_(5 * solved[:-1].T)
    head.bias.copy_(5 * solved[-1])
    return head


KEY_LABELS = torch.arange(KNOWN).repeat_interleave(EACH)
KEYS = draw_keys(KEY_LABELS)
NAMES = [f"old {label:02}" for label in range(KNOWN)]


@pytest.fixture(scope="module")
def learner() -> Learner:
    found = fit_learner(KEYS, KEY_LABELS, train(KEYS, KEY_LABELS, KNOWN), train)
    assert found is not None
    return found


def deploy(learner: Learner, max_lost_points: float | None = 1.0) -> TaughtClassifier:
    classifier = TaughtClassifier(learner, NAMES, max_lost_points=max_lost_points)
    names = [NAMES[label] for label in KEY_LABELS.tolist()]
    classifier.add(range(len(KEYS)), names, KEYS, trained=range(len(KEYS)))
    return classifier


def draw_lessons(each: int, seed: int = 1) -> tuple[list[str], Tensor]:
    labels = torch.arange(KNOWN, KNOWN + NEW).repeat_interleave(each)
    return [f"new {label}" for label in labels.tolist()], draw_keys(labels, seed=seed)


QUERY_LABELS = torch.arange(KNOWN + NEW).repeat_interleave(10)
QUERIES = draw_keys(QUERY_LABELS, seed=2)


def are_same(first: Prediction, second: Prediction) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def share_right(classifier: TaughtClassifier, found: Prediction) -> tuple[float, float]:
    """Shares of right answers to queries of old and of new labels."""
    names = [*NAMES, *(f"new {label}" for label in range(KNOWN, KNOWN + NEW))]
    told = [classifier.labels[place] for place in found.log_probs.argmax(1).tolist()]
    asked = QUERY_LABELS.tolist()
    right = torch.tensor([said == names[label] for said, label in zip(told, asked, strict=True)])
    is_old = QUERY_LABELS < KNOWN
    return float(right[is_old].double().mean()), float(right[~is_old].double().mean())


# The belief


def test_a_row_is_the_posterior_predictive_density_of_the_two_covariance_model() -> None:
    belief = fit_belief(KEYS, KEY_LABELS, KNOWN).double()
    inverse = torch.linalg.inv(belief.transform)  # key = z · inverse + center
    within, between = inverse.T @ inverse, inverse.T @ belief.spread.diag() @ inverse
    mean, count = KEYS[KEY_LABELS == 3][:4].double().mean(0), 4
    gain = between @ torch.linalg.inv(between + within / count)
    posterior = torch.linalg.inv(torch.linalg.inv(between) + count * torch.linalg.inv(within))
    density = MultivariateNormal(
        belief.center + gain @ (mean - belief.center), within + posterior
    ).log_prob(QUERIES.double())
    rows = belief.make_rows(
        belief.locate(mean[None]), torch.tensor([count]).double(), torch.tensor([False])
    )
    scores = rows.score(belief.locate(QUERIES.double()))[:, 0] / belief.temperature
    differences = (scores - scores[0]) - (density - density[0])
    assert differences.abs().max() < 1e-6 * density.abs().max()


def test_the_within_class_covariance_becomes_the_identity_up_to_shrinkage() -> None:
    belief = fit_belief(KEYS, KEY_LABELS, KNOWN).double()
    points = belief.locate(KEYS.double())
    raw = KEYS.double()
    members = [c == KEY_LABELS for c in range(KNOWN)]
    residuals = torch.cat([points[rows] - points[rows].mean(0) for rows in members])
    covariance = residuals.T @ residuals / (len(KEYS) - KNOWN)
    away = torch.cat([raw[rows] - raw[rows].mean(0) for rows in members])
    size = (away.square().sum() / (len(KEYS) - KNOWN)) / DIM
    isotropic = size * belief.transform.T @ belief.transform
    assert torch.allclose(0.7 * covariance + 0.3 * isotropic, torch.eye(DIM).double(), atol=1e-5)


def test_episodes_lower_the_loss_on_classes_they_never_saw() -> None:
    def loss(belief: ClassBelief) -> float:
        _, keys = draw_lessons(3)
        means = torch.stack([keys[3 * place : 3 * place + 3].mean(0) for place in range(NEW)])
        rows = belief.make_rows(
            belief.locate(means), torch.full((NEW,), 3.0), torch.ones(NEW, dtype=torch.bool)
        )
        is_new = QUERY_LABELS >= KNOWN
        scores = rows.score(belief.locate(QUERIES[is_new]))
        return float(functional.cross_entropy(scores, QUERY_LABELS[is_new] - KNOWN))

    plain = fit_belief(KEYS, KEY_LABELS, KNOWN)
    assert loss(refine_belief(plain, KEYS, KEY_LABELS, KNOWN, seed=0)) < loss(plain)


# The store


def test_cosines_are_exact_wherever_a_key_is_stored() -> None:
    generator = torch.Generator().manual_seed(3)
    keys = round_keys(functional.normalize(torch.randn(500, 384, generator=generator), dim=1))
    queries = round_keys(functional.normalize(torch.randn(7, 384, generator=generator), dim=1))
    exact = queries.double() @ keys.double().T
    assert torch.equal((queries @ keys.T).double(), exact)
    for rows in (torch.randperm(500, generator=generator), torch.arange(1, 500)):
        assert torch.equal((queries @ keys[rows].T).double(), exact[:, rows])


def test_the_largest_cosine_is_that_of_a_loop() -> None:
    labels = torch.randint(5, (60,), generator=torch.Generator().manual_seed(4))
    keys, queries = round_keys(KEYS[:60]), round_keys(QUERIES[:9])
    found = measure_cosines(queries, keys, labels, 6)
    for row, query in enumerate(queries):
        for label in range(5):
            best = max(float(query @ key) for key in keys[labels == label])
            assert found[row, label] == best
    assert (found[:, 5] == -1).all()


def test_a_store_refuses_ids_in_use_and_keys_of_another_norm() -> None:
    store = ExampleStore(DIM)
    store.add([1], ["a"], KEYS[:1])
    with pytest.raises(ValueError, match="ids must be distinct and not in use"):
        store.add([1], ["b"], KEYS[:1])
    with pytest.raises(ValueError, match="keys must have norm 1, got 2"):
        store.add([2], ["b"], 2 * KEYS[:1])
    with pytest.raises(ValueError, match="one label and one key of size 16 per id"):
        store.add([2], ["b"], KEYS[:2])
    assert store.counts == {"a": 1}


# The classifier


def predict_slowly(
    learner: Learner, classifier: TaughtClassifier, lessons: dict[str, Tensor], key: Tensor
) -> Tensor:
    """The same answer, label by label, in double precision."""
    belief, weights = learner.belief.double(), learner.combination
    query, scores = round_keys(key[None])[0].double(), {}
    point = belief.locate(query[None])[0]
    head = learner.head.double()(query).log_softmax(0)
    learner.head.float()
    for label in classifier.labels:
        keys = round_keys(lessons[label]).double()
        n, mean = len(keys), belief.locate(keys.mean(0)[None])[0]
        gain = n * belief.spread / (1 + n * belief.spread)
        variance = 1 + belief.spread / (1 + n * belief.spread)
        log_density = torch.distributions.Normal(gain * mean, variance.sqrt()).log_prob(
            point
        ).sum() + DIM / 2 * math.log(2 * math.pi)
        nearest = 10 * (keys @ query).max()
        is_new = label not in NAMES
        score = belief.temperature * log_density + is_new * belief.new_offset
        third = math.log(n) if is_new else float(head[NAMES.index(label)])
        scores[label] = torch.tensor([float(score), float(nearest), third]).double()
    old = [label for label in classifier.labels if label in NAMES]
    new = [label for label in classifier.labels if label not in NAMES]
    u = torch.stack([scores[label] @ weights.old_weights.double() for label in old])
    v = torch.stack([scores[label] @ weights.new_weights.double() for label in new])
    best = int(v.argmax())
    size = math.log(len(lessons[new[best]]))
    lead = v.exp().mean().log() - u.exp().mean().log()
    nearest_old = max(scores[label][1] for label in old)
    nearer = max(scores[label][1] for label in new) - nearest_old
    belief_lead = max(scores[c][0] for c in new) - max(scores[c][0] for c in old)
    sure = u.log_softmax(0).max(), v.log_softmax(0).max()
    surest = max(scores[c][2] for c in old)
    products = size * lead, size * nearer
    features = [1, size, lead, *sure, belief_lead, nearer, nearest_old, surest, *products]
    gate = torch.tensor([float(each) for each in features]).double() @ weights.gate_weights.double()
    p_new = gate.sigmoid()
    return torch.cat([(1 - p_new) * u.softmax(0), p_new * v.softmax(0)])


def test_probabilities_are_those_of_the_slow_version(learner: Learner) -> None:
    classifier = deploy(learner, None)
    names, keys = draw_lessons(3)
    names, keys = names[:-2], keys[:-2]  # one label has a single example
    classifier.add(range(1000, 1000 + len(names)), names, keys)
    lessons = {name: KEYS[place == KEY_LABELS] for place, name in enumerate(NAMES)}
    lessons |= {name: keys[[each == name for each in names]] for name in set(names)}
    found = classifier.predict(QUERIES).log_probs.exp().double()
    for row in range(0, len(QUERIES), 17):
        slow = predict_slowly(learner, classifier, lessons, QUERIES[row])
        assert torch.allclose(found[row], slow, atol=1e-4)


def test_new_labels_are_learnt_and_old_ones_kept(learner: Learner) -> None:
    kept, free = deploy(learner), deploy(learner, None)
    alone = float((learner.head(QUERIES[:120]).argmax(1) == QUERY_LABELS[:120]).double().mean())
    names, keys = draw_lessons(5)
    for classifier in (kept, free):
        classifier.add(range(1000, 1000 + len(names)), names, keys)
    old_kept, new_kept = share_right(kept, kept.predict(QUERIES))
    old_free, new_free = share_right(free, free.predict(QUERIES))
    assert new_free >= new_kept > 0.6
    assert old_kept >= old_free
    assert old_kept >= alone - 0.02


def test_giving_up_more_old_accuracy_never_lowers_new_answers(learner: Learner) -> None:
    names, keys = draw_lessons(2)
    found = []
    for points in (0.0, 0.5, 1.0, 4.0, None):
        classifier = deploy(learner, points)
        classifier.add(range(1000, 1000 + len(names)), names, keys)
        log_probs = classifier.predict(QUERIES).log_probs
        found.append(log_probs[:, KNOWN:].logsumexp(1))
    for less, more in itertools.pairwise(found):
        assert (more >= less - 1e-5).all()
    assert (found[-1] > found[0] + 1e-3).any()


def test_keeping_an_old_answer_never_raises_confidence(learner: Learner) -> None:
    names, keys = draw_lessons(1)
    kept, free = deploy(learner, 0.0), deploy(learner, None)
    for classifier in (kept, free):
        classifier.add(range(1000, 1000 + len(names)), names, keys)
    sure_kept, told_kept = kept.predict(QUERIES).log_probs.max(1)
    sure_free, told_free = free.predict(QUERIES).log_probs.max(1)
    differs = told_kept != told_free
    assert differs.any()
    assert (told_kept[differs] < KNOWN).all()
    assert (sure_kept[differs] < sure_free[differs]).all()
    assert torch.equal(sure_kept[told_free < KNOWN], sure_free[told_free < KNOWN])


def test_one_example_is_enough_for_its_own_query(learner: Learner) -> None:
    classifier = deploy(learner, None)
    key = draw_keys(torch.tensor([30]), seed=5)
    classifier.add([5000], ["first"], key)
    found = classifier.predict(key)
    assert classifier.labels[int(found.log_probs.argmax())] == "first"


def test_probabilities_sum_to_one_with_any_labels(learner: Learner) -> None:
    classifier = TaughtClassifier(learner, NAMES)
    assert classifier.predict(QUERIES).log_probs.shape == (len(QUERIES), 0)
    assert (classifier.predict(QUERIES).in_scope == 0).all()
    classifier.add([0], ["taught"], KEYS[:1])  # new labels only
    assert torch.equal(classifier.predict(QUERIES).log_probs, torch.zeros(len(QUERIES), 1))
    names = [NAMES[label] for label in KEY_LABELS.tolist()]
    ids = range(1, 1 + len(KEYS))
    classifier.add(ids, names, KEYS, trained=ids)
    total = classifier.predict(QUERIES).log_probs.exp().sum(1)
    assert torch.allclose(total, torch.ones(len(QUERIES)), atol=1e-5)
    classifier.forget([0])  # old labels only
    total = classifier.predict(QUERIES).log_probs.exp().sum(1)
    assert torch.allclose(total, torch.ones(len(QUERIES)), atol=1e-5)


def test_what_resembles_no_example_is_out_of_scope(learner: Learner) -> None:
    classifier = deploy(learner)
    strange = functional.normalize(
        torch.randn(200, DIM, generator=torch.Generator().manual_seed(7)), dim=1
    )
    inside = classifier.predict(QUERIES[QUERY_LABELS < KNOWN]).in_scope
    outside = classifier.predict(strange).in_scope
    assert (inside[:, None] > outside).double().mean() > 0.95


def test_a_label_with_one_example_is_not_drowned_by_one_with_many(learner: Learner) -> None:
    classifier = deploy(learner, None)
    many, one = draw_keys(torch.full((60,), 20), seed=8), draw_keys(torch.tensor([21]), seed=8)
    classifier.add(range(1000, 1060), ["many"] * 60, many)
    classifier.add([2000], ["one"], one)
    queries = draw_keys(torch.tensor([20] * 20 + [21] * 20), seed=9)
    place = {label: number for number, label in enumerate(classifier.labels)}
    told = classifier.predict(queries).log_probs[:, [place["many"], place["one"]]].argmax(1)
    assert (told[:20] == 0).double().mean() > 0.9
    assert (told[20:] == 1).double().mean() > 0.7


def test_examples_of_old_labels_can_be_taught_and_the_last_one_forgotten(learner: Learner) -> None:
    classifier = deploy(learner)
    before = classifier.predict(QUERIES)
    classifier.add([9000], [NAMES[2]], draw_keys(torch.tensor([2]), seed=3))
    assert classifier.counts[NAMES[2]] == EACH + 1
    assert not are_same(classifier.predict(QUERIES), before)
    classifier.forget((KEY_LABELS == 2).nonzero()[:, 0].tolist())
    assert classifier.labels.index(NAMES[2]) == KNOWN - 1  # now a taught label without a row
    classifier.forget([9000])
    assert NAMES[2] not in classifier.labels


def test_forgetting_leaves_no_trace(learner: Learner) -> None:
    classifier = deploy(learner)
    before = classifier.predict(QUERIES)
    names, keys = draw_lessons(3)
    classifier.add(range(1000, 1000 + len(names)), names, keys)
    assert not are_same(classifier.predict(QUERIES)._replace(in_scope=before.in_scope), before)
    assert classifier.forget([1001, 7777, 1001]) == [1001]
    assert len(classifier.forget(range(1000, 1000 + len(names)))) == len(names) - 1
    assert are_same(classifier.predict(QUERIES), before)


POOL_NAMES, POOL_KEYS = draw_lessons(4, seed=11)
POOL = list(zip(POOL_NAMES, POOL_KEYS, strict=True)) + [
    (NAMES[label], key) for label, key in zip((1, 1, 5), KEYS[[30, 31, 130]], strict=True)
]
LABELS = [*NAMES[:3], "new", *sorted(set(POOL_NAMES))]
STEP = st.one_of(
    st.tuples(st.just("add"), st.integers(0, len(POOL) - 1), st.just("")),
    st.tuples(st.just("forget"), st.integers(0, 40), st.just("")),
    st.tuples(st.just("forget all"), st.integers(0, 40), st.just("")),
    st.tuples(st.just("relabel"), st.integers(0, 40), st.sampled_from(LABELS)),
    st.tuples(st.just("rename"), st.integers(0, 40), st.sampled_from(LABELS)),
    st.tuples(st.just("restart"), st.just(0), st.just("")),
)
HISTORY = {
    "steps": st.lists(STEP, max_size=25),
    "order": st.randoms(use_true_random=False),
}


@dataclass
class Present:
    """An example as it should be: its label, and its row of the head, if it counts as trained."""

    label: str
    key: Tensor
    row: int | None


def name_rows(present: Mapping[int, Present]) -> list[str]:
    """Return the names of the head's rows, according to the trained examples."""
    names = [f"gone {row}" for row in range(len(NAMES))]
    for each in present.values():
        if each.row is not None:
            names[each.row] = each.label
    return names


def rename_as_documented(present: Mapping[int, Present], label: str, new: str) -> None:
    has_row = any(each.row is not None for each in present.values() if each.label == new)
    for each in present.values():
        if each.label == label != new:
            each.label, each.row = new, None if has_row else each.row


def rebuild(
    learner: Learner, present: Mapping[int, Present], ids: Sequence[int]
) -> TaughtClassifier:
    """Return a classifier to which these examples are added at once, in this order."""
    tensors = {name: tensor.clone() for name, tensor in learner.tensors().items()}
    classifier = TaughtClassifier(Learner.from_tensors(learner.head, tensors), name_rows(present))
    examples = [present[id] for id in ids]
    if examples:
        classifier.add(
            ids,
            [each.label for each in examples],
            torch.stack([each.key for each in examples]),
            trained=[id for id in ids if present[id].row is not None],
        )
    return classifier


def compare_histories(steps: Sequence[Any], order: random.Random, learner: Learner) -> None:
    """After any history, another classifier with the same examples answers the same, bit by bit."""
    classifier = deploy(learner)
    trained = zip(KEY_LABELS.tolist(), KEYS, strict=True)
    present = {id: Present(NAMES[row], key, row) for id, (row, key) in enumerate(trained)}
    for next_id, (action, number, name) in enumerate(steps, start=1000):
        taught = sorted(id for id, each in present.items() if each.row is None)
        labels = sorted({each.label for each in present.values()})
        if action == "add":
            label, key = POOL[number]
            classifier.add([next_id], [label], key[None])
            present[next_id] = Present(label, key, None)
        elif action == "restart":
            classifier = rebuild(learner, present, sorted(present))
        elif action == "forget all" and labels:
            gone = [id for id, e in present.items() if e.label == labels[number % len(labels)]]
            assert sorted(classifier.forget(gone)) == sorted(gone)
            present = {id: each for id, each in present.items() if id not in gone}
        elif action == "rename" and labels:
            label = labels[number % len(labels)]
            classifier.rename(label, name)
            rename_as_documented(present, label, name)
        elif action in ("forget", "relabel") and present:
            some = taught if number % 2 and taught else sorted(present)
            id = some[number % len(some)]
            if action == "forget":
                assert classifier.forget([id]) == [id]
                del present[id]
            else:
                classifier.relabel(id, name)
                present[id] = Present(name, present[id].key, None)
        if number % 5 == 0:
            classifier.predict(QUERIES[:1])  # an answer in between changes nothing
    ids = list(present)
    order.shuffle(ids)
    fresh = rebuild(learner, present, ids)
    assert fresh.counts == classifier.counts
    for queries in (QUERIES, QUERIES[:1]):
        assert are_same(classifier.predict(queries), fresh.predict(queries))
    assert classifier.explain(QUERIES[:2]) == fresh.explain(QUERIES[:2])


@pytest.mark.heavy
@settings(max_examples=60, deadline=None)
@given(**HISTORY)
def test_answers_depend_only_on_the_examples_present(steps, order, learner) -> None:
    compare_histories(steps, order, learner)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(**HISTORY)
def test_answers_depend_only_on_the_examples_present_after_many_histories(
    steps, order, learner
) -> None:
    compare_histories(steps, order, learner)


def test_an_explanation_agrees_with_the_answer(learner: Learner) -> None:
    classifier = deploy(learner)
    names, keys = draw_lessons(3)
    classifier.add(range(1000, 1000 + len(names)), names, keys)
    found = classifier.predict(QUERIES[-3:])
    for row, why in enumerate(classifier.explain(QUERIES[-3:], labels=4, examples=6)):
        best = found.log_probs[row].topk(4)
        assert why.labels == tuple(classifier.labels[place] for place in best.indices.tolist())
        assert why.probabilities == pytest.approx(best.values.exp().tolist())
        assert why.in_scope == float(found.in_scope[row])
        near = [each.cosine for each in why.examples]
        assert len(near) == 6
        assert near == sorted(near, reverse=True)
        assert max(why.cosines) <= near[0]
        for label, alone in zip(why.labels, why.head, strict=True):
            assert (alone is None) == label.startswith("new")


def test_a_saved_learner_answers_the_same(learner: Learner, tmp_path: Path) -> None:
    save_checkpoint(
        tmp_path / "learner",
        tensors={"head": learner.head.state_dict(), "learner": learner.tensors()},
        description={},
    )
    saved = load_checkpoint(tmp_path / "learner").tensors
    head = nn.Linear(DIM, KNOWN)
    head.load_state_dict(saved["head"])
    again = Learner.from_tensors(head, saved["learner"])
    assert are_same(deploy(learner).predict(QUERIES), deploy(again).predict(QUERIES))
    with pytest.raises(ValueError, match=r"transform must have shape \(3, 3\), got \(16, 16\)"):
        Learner.from_tensors(nn.Linear(3, KNOWN), saved["learner"])


@pytest.mark.heavy
def test_fitting_is_deterministic(learner: Learner) -> None:
    again = fit_learner(KEYS, KEY_LABELS, learner.head, train)
    assert again is not None
    for name, tensor in learner.tensors().items():
        assert torch.equal(tensor, again.tensors()[name])


@pytest.mark.parametrize("labels", [5, KNOWN])
def test_too_few_labels_or_examples_cannot_be_rehearsed(labels: int) -> None:
    keep = labels > KEY_LABELS if labels == 5 else torch.arange(len(KEY_LABELS)) % EACH < 3
    head = train(KEYS[keep], KEY_LABELS[keep], labels)
    assert fit_learner(KEYS[keep], KEY_LABELS[keep], head, train) is None


def test_a_head_with_other_rows_than_asked_for_is_refused() -> None:
    head = train(KEYS, KEY_LABELS, KNOWN)
    with pytest.raises(ValueError, match="train_head must return a head with a row for each"):
        fit_learner(KEYS, KEY_LABELS, head, lambda keys, labels, count: train(keys, labels, KNOWN))


def test_errors_say_what_must_hold(learner: Learner) -> None:
    with pytest.raises(ValueError, match="trained_labels must be 12 distinct names, got 1"):
        TaughtClassifier(learner, ["a"])
    with pytest.raises(ValueError, match="max_lost_points must be None or at least 0"):
        TaughtClassifier(learner, NAMES, max_lost_points=-1.0)
    classifier = deploy(learner)
    with pytest.raises(ValueError, match="id must be of an example that is present, got 77777"):
        classifier.relabel(77777, "x")


# Margins


def test_a_combination_worse_than_the_head_alone_does_not_lock_out_new_labels() -> None:
    """No margin wins back what the combination loses without any new label."""
    queries, is_old = 100, torch.ones(100, dtype=torch.bool)
    right, wrong = torch.tensor([0.0, -5.0, -5.0]), torch.tensor([-5.0, 0.0, -5.0])
    belief = right.repeat(queries, 1)
    belief[:2] = wrong  # two queries that the head alone would answer correctly
    evidence = Evidence(
        old_belief=belief,
        old_cosine=torch.zeros(queries, 3),
        head=right.repeat(queries, 1),
        new_belief=torch.full((queries, 2), -9.0),
        new_cosine=torch.zeros(queries, 2),
        new_counts=torch.ones(2),
    )
    rehearsed = RehearsedEvidence(evidence, torch.zeros(queries, dtype=torch.int64), ~is_old, 1)
    weights = torch.tensor([1.0, 0.0, 0.0])  # the belief alone
    combined = Combination(
        old_weights=weights,
        new_weights=weights,
        gate_weights=torch.zeros(11),
        scope_weights=torch.zeros(4),
        margin_counts=torch.ones(1),
        margins=torch.zeros(len(LOST_POINTS), 1),
        break_even=torch.tensor(0.0),
        thresholds=torch.ones(1),
        rehearsed=torch.zeros(2, 1, 2),
    )
    margins = _find_margins(combined, [rehearsed])
    assert margins.max() < MARGINS[-1] / 2  # no query of an old label goes to a new one
    lead = combined.log_probs(evidence, None)
    assert (lead[:, 3:].amax(1) < lead[:, :3].amax(1)).all()
