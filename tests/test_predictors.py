"""Votes, mixtures and their options, against their formulas."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mbpa

CLASSES = 4


def model_with(
    predictor: mbpa.Predictor, *, targets: bool = False, entries: int = 30
) -> tuple[mbpa.MbPA, Tensor]:
    torch.manual_seed(0)
    keys, queries = torch.randn(entries, 3).double(), torch.randn(6, 3).double()
    kind = {"value_shape": (CLASSES,), "value_dtype": torch.float64} if targets else {}
    memory = mbpa.ExactMemory(entries, 3, dtype=torch.float64, **kind)
    model = mbpa.MbPA(head=nn.Linear(3, CLASSES).double(), memory=memory, predictor=predictor)
    values = torch.randn(entries, CLASSES).double() if targets else torch.arange(entries) % CLASSES
    model.write(keys, values)
    return model, queries


def votes(model: mbpa.MbPA, queries: Tensor, k: int, kernel: object) -> Tensor:
    """Count the votes entry by entry."""
    entries = model.memory.entries()
    shares = torch.zeros(len(queries), CLASSES).double()
    for row, query in enumerate(queries):
        distances = (entries.keys - query).square().sum(1)
        nearest = distances.argsort()[:k]
        weights = torch.tensor([kernel(entries.keys[i], query) for i in nearest])
        for i, weight in zip(nearest, weights / weights.sum(), strict=True):
            shares[row, entries.values[i]] += weight
    return shares


@pytest.mark.parametrize("k", [1, 7, 30, 1000])
def test_the_vote_counts_weighted_labels(k: int) -> None:
    model, queries = model_with(mbpa.NeighborVote(k=k))
    expected = votes(model, queries, k, lambda h, q: 1 / (1e-3 + (h - q).square().sum()))
    assert (model(queries).exp() - expected).abs().max() < 1e-12


@pytest.mark.parametrize("power", [0.5, 4])
def test_the_vote_counts_labels_weighted_by_a_power(power: float) -> None:
    model, queries = model_with(mbpa.NeighborVote(mbpa.InverseDistance(power=power), k=7))
    expected = votes(model, queries, 7, lambda h, q: (1e-3 + (h - q).square().sum()) ** -power)
    assert (model(queries).exp() - expected).abs().max() < 1e-12


def test_the_neural_cache_is_a_vote_over_the_whole_memory() -> None:
    model, queries = model_with(mbpa.NeighborVote(mbpa.exp_dot(0.4), k=30))
    expected = votes(model, queries, 30, lambda h, q: torch.exp(0.4 * h @ q))
    assert (model(queries).exp() - expected).abs().max() < 1e-12


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_a_balanced_vote_follows_what_the_memory_holds_now(power: float) -> None:
    """After overwriting and deleting, and with neighbours that were read before."""
    kernel = mbpa.Balanced(mbpa.InverseDistance(), power)
    model, queries = model_with(mbpa.NeighborVote(kernel, k=9))

    def check() -> None:
        entries = model.memory.entries()
        labels = {tuple(key.tolist()): int(v) for _, key, v in zip(*entries, strict=True)}
        counts = entries.values.bincount(minlength=CLASSES).double()

        def weigh(h: Tensor, q: Tensor) -> Tensor:
            return 1 / (1e-3 + (h - q).square().sum()) / counts[labels[tuple(h.tolist())]] ** power

        expected = votes(model, queries, 9, weigh)
        assert (model(queries).exp() - expected).abs().max() < 1e-12
        found = model.memory.read(queries, 12)
        assert (model(queries, neighbors=found).exp() - expected).abs().max() < 1e-12
        why = model.explain(queries)
        assert (why.after.exp() - expected).abs().max() < 1e-12

    check()
    model.write(torch.randn(12, 3).double(), torch.zeros(12, dtype=torch.int64))  # overwrites 12
    check()
    model.memory.delete(model.memory.ids[-9:])
    check()
    model.memory.replace_keys(model.memory.ids[:2], torch.randn(2, 3).double())
    model.memory.resize(14)
    check()


def test_a_balanced_predictor_is_saved_with_the_model(tmp_path: Path) -> None:
    kernel = mbpa.Balanced(mbpa.Gaussian(0.7), 0.5)
    model, queries = model_with(mbpa.Adapted(mbpa.Gradient(0.5, 3), k=6, kernel=kernel))
    model.save(tmp_path / "model")
    loaded = mbpa.MbPA.load(tmp_path / "model")
    assert loaded.predictor == model.predictor
    assert torch.equal(loaded(queries), model(queries))


def test_smoothing_spreads_a_share_over_all_classes() -> None:
    bare, queries = model_with(mbpa.NeighborVote(k=1))
    smooth, _ = model_with(mbpa.NeighborVote(k=1, smoothing=0.2))
    assert bare(queries).isinf().any()
    expected = 0.8 * bare(queries).exp() + 0.2 / CLASSES
    assert (smooth(queries).exp() - expected).abs().max() < 1e-12


def test_a_mixture_is_the_weighted_sum_of_probabilities() -> None:
    parts = (
        mbpa.Parametric(),
        mbpa.Adapted(mbpa.Gradient(0.5, 3), k=5),
        mbpa.NeighborVote(mbpa.exp_dot(0.2), k=20),
    )
    weights = (0.5, 0.2, 0.3)
    model, queries = model_with(mbpa.Mixture(*parts, weights=weights))
    alone = [model_with(part)[0](queries).exp() for part in parts]
    expected = sum(w * p for w, p in zip(weights, alone, strict=True))
    assert (model(queries).exp() - expected).abs().max() < 1e-12


def test_a_mixture_reads_the_memory_once() -> None:
    predictor = mbpa.Mixture(
        mbpa.Adapted(mbpa.Gradient(0.5), k=5), mbpa.NeighborVote(k=20), weights=(0.5, 0.5)
    )
    model, queries = model_with(predictor)
    asked = []
    read = model.memory.read
    model.memory.read = lambda *a, **kw: asked.append((a[1], kw)) or read(*a, **kw)
    model(queries)
    assert asked == [(20, {"keys_for": 5})]


def test_a_part_of_weight_zero_does_not_count() -> None:
    predictor = mbpa.Mixture(mbpa.Parametric(), mbpa.NeighborVote(k=1), weights=(1.0, 0.0))
    model, queries = model_with(predictor)
    plain, _ = model_with(mbpa.Parametric())
    assert (model(queries) - plain(queries)).abs().max() < 1e-12


def test_mixtures_nest() -> None:
    inner = mbpa.Mixture(mbpa.Parametric(), mbpa.NeighborVote(k=3), weights=(0.5, 0.5))
    outer = mbpa.Mixture(inner, mbpa.NeighborVote(k=9), weights=(0.5, 0.5))
    flat = mbpa.Mixture(
        mbpa.Parametric(),
        mbpa.NeighborVote(k=3),
        mbpa.NeighborVote(k=9),
        weights=(0.25, 0.25, 0.5),
    )
    nested, queries = model_with(outer)
    assert (nested(queries).exp() - model_with(flat)[0](queries).exp()).abs().max() < 1e-12
    assert [part.share for part in nested.explain(queries).parts] == [0.25, 0.25, 0.5]


def test_regression_votes_are_weighted_means_and_mixtures_weighted_sums() -> None:
    vote, queries = model_with(mbpa.NeighborVote(mbpa.uniform(), k=4), targets=True)
    found = vote.memory.read(queries, 4)
    assert (vote(queries) - found.values.mean(1)).abs().max() < 1e-12
    parts = mbpa.Parametric(), mbpa.NeighborVote(mbpa.uniform(), k=4)
    mixed, _ = model_with(mbpa.Mixture(*parts, weights=(0.3, 0.7)), targets=True)
    expected = 0.3 * mixed.head(queries) + 0.7 * found.values.mean(1)
    assert (mixed(queries) - expected).abs().max() < 1e-12


def test_probabilities_sum_to_one() -> None:
    for predictor in (
        mbpa.NeighborVote(k=5),
        mbpa.NeighborVote(k=5, smoothing=0.1),
        mbpa.Adapted(mbpa.Adam(0.1, 3), k=5),
        mbpa.Mixture(mbpa.Parametric(), mbpa.NeighborVote(k=5), weights=(0.1, 0.9)),
    ):
        model, queries = model_with(predictor)
        assert model(queries).exp().sum(1).tolist() == pytest.approx([1.0] * len(queries))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mbpa.Adapted(mbpa.Gradient(0.1), k=0), "k must be at least 1, got 0"),
        (lambda: mbpa.NeighborVote(k=-3), "k must be at least 1, got -3"),
        (lambda: mbpa.NeighborVote(smoothing=1.5), "smoothing must be between 0 and 1, got 1.5"),
        (lambda: mbpa.Adapted(mbpa.Gradient(0.1), loss="hinge"), "loss must be one of"),
        (lambda: mbpa.Adapted(mbpa.Gradient(0.1), params=()), "at least one parameter"),
        (lambda: mbpa.Gradient(0.1, steps=0), "steps must be at least 1, got 0"),
        (lambda: mbpa.Gradient(-0.1), "lr must be a finite number, not negative, got -0.1"),
        (lambda: mbpa.Gradient(math.nan), "lr must be a finite number, not negative, got nan"),
        (lambda: mbpa.Gradient(0.1, decay=-1), r"decay must be .* got -1"),
        (lambda: mbpa.RMSprop(0.1, smoothing=1.5), "smoothing must be at most 1, got 1.5"),
        (
            lambda: mbpa.Adapted(mbpa.Gradient(0.1), kernel=mbpa.uniform),
            "kernel must be a function or an instance",
        ),
        (lambda: mbpa.NeighborVote(k=2.5), "k must be a whole number, got 2.5"),
        (lambda: mbpa.exp_dot(math.nan), "theta must be a finite number"),
        (lambda: mbpa.exp_dot("1"), "theta must be a finite number, got '1'"),
        (lambda: mbpa.gaussian(True), "bandwidth must be a finite number, got True"),
        (lambda: mbpa.gaussian(torch.ones(2)), "bandwidth must be a finite number, got tensor"),
        (lambda: mbpa.inverse_distance(None), "epsilon must be a finite number, got None"),
        (lambda: mbpa.InverseDistance(power="4"), "power must be a finite number, got '4'"),
        (lambda: mbpa.InverseDistance(power=-1), "power must be positive, got -1"),
        (lambda: mbpa.Balanced(mbpa.Uniform(), 1.5), "power must be between 0 and 1, got 1.5"),
        (lambda: mbpa.Balanced(mbpa.Uniform(), "1"), "power must be a finite number, got '1'"),
        (lambda: mbpa.Balanced(mbpa.Uniform), "kernel must be a function or an instance"),
        (lambda: mbpa.Balanced(mbpa.Balanced(mbpa.Uniform())), "must not be balanced already"),
        (lambda: mbpa.NeighborVote(smoothing="a"), "smoothing must be a finite number, got 'a'"),
        (lambda: mbpa.NeighborVote(k=True), "k must be a whole number, got True"),
        (lambda: mbpa.Mixture(mbpa.Parametric(), weights=("1",)), "weights must be a finite"),
        (
            lambda: mbpa.Mixture(mbpa.Gradient(0.1), weights=(1.0,)),
            "a mixture must consist of predictors, got Gradient",
        ),
        (lambda: mbpa.RMSprop(0.1, smoothing=-0.5), "smoothing must be .* got -0.5"),
        (lambda: mbpa.Adam(0.1, beta1=1.0), "below 1, got 1.0, 0.999"),
        (lambda: mbpa.Mixture(mbpa.Parametric(), weights=(0.5, 0.5)), "1 predictors and 2 weights"),
        (lambda: mbpa.Mixture(mbpa.Parametric(), weights=(0.9,)), "sum to 1, got .* sum 0.9"),
        (
            lambda: mbpa.Mixture(mbpa.Parametric(), mbpa.Parametric(), weights=(1.5, -0.5)),
            "must not be negative",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_impossible_settings_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_predictor_that_does_not_fit_head_or_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"among the head's parameters \['weight', 'bias'\]"):
        model_with(mbpa.Adapted(mbpa.Gradient(0.1), params=("gain",)))
    with pytest.raises(ValueError, match="needs labels, the memory holds targets"):
        model_with(mbpa.Adapted(mbpa.Gradient(0.1), loss="cross_entropy"), targets=True)
    with pytest.raises(ValueError, match="needs targets, the memory holds labels"):
        model_with(mbpa.Adapted(mbpa.Gradient(0.1), loss="squared_error"))
    with pytest.raises(ValueError, match="smoothing is for labels"):
        model_with(mbpa.NeighborVote(smoothing=0.1), targets=True)
    balanced = mbpa.Balanced(mbpa.InverseDistance())
    for predictor in (mbpa.NeighborVote(balanced), mbpa.Adapted(kernel=balanced)):
        with pytest.raises(ValueError, match=r"Balanced\(.*is for labels, the memory holds regr"):
            model_with(predictor, targets=True)
