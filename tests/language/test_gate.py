"""Predictors that decide per query how far to trust the memory."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from oracle import adapt_one
from torch import Tensor, nn

import mbpa
from mbpa.kernels import Kernel
from mbpa.language.gate import (
    Gate,
    Gated,
    count_features,
    fit_gate,
    make_predictor,
    measure_features,
)
from mbpa.language.scaled_predictors import (
    BASE_RATE,
    NEIGHBORHOOD_FEATURES,
    Neighborhood,
    Reach,
    ScaledAdapted,
    ScaledVote,
)
from mbpa.predictors import Context, Predictor

CLASSES, SIZE = 40, 8


def make_model(predictor: Predictor, entries: int = 200, scale: float = 1.0) -> mbpa.MbPA:
    draws = torch.Generator().manual_seed(0)
    head = nn.Linear(SIZE, CLASSES, bias=False).eval().requires_grad_(False)
    head.weight.copy_(torch.randn(CLASSES, SIZE, generator=draws) / scale)
    memory = mbpa.ExactMemory(max(1, entries), SIZE)
    if entries:
        keys = scale * torch.randn(entries, SIZE, generator=draws)
        memory.write(keys, torch.randint(CLASSES, (entries,), generator=draws))
    return mbpa.MbPA(head=head, memory=memory, predictor=predictor)


def make_queries(count: int = 12, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(count, SIZE, generator=torch.Generator().manual_seed(1))


def make_context(model: mbpa.MbPA, queries: Tensor, k: int = 64) -> Context:
    return model.build_context(queries, model.memory.read(queries, k))


def make_gate(*constants: float) -> Gate:
    """Return a gate with the same weights for every query."""
    rest = (0.0,) * (count_features(len(constants) - 1) - 1)
    return Gate(tuple((constant, *rest) for constant in constants))


def test_the_default_reach_is_the_paper_kernel_with_a_constant_step() -> None:
    model = make_model(ScaledAdapted(Reach(width=(-1e3, *(0.0,) * 6)), steps=5, k=16))
    queries = make_queries()
    found = model.memory.read(queries, 16)
    context = model.build_context(queries, found)
    around = Neighborhood.measure(context)
    weights = Reach(width=(-1e3, *(0.0,) * 6)).weigh(around)
    scale = found.keys.square().sum(-1).mean(1)
    torch.testing.assert_close(weights.sum(1), BASE_RATE / scale)
    inverse = 1 / (found.distances / scale[:, None] + 1e-4)
    expected = inverse / inverse.sum(1, keepdim=True)
    assert (weights / weights.sum(1, keepdim=True) - expected).abs().max() < 0.02  # e⁻⁴ of width


def test_scaled_adaptation_takes_the_steps_of_its_weights() -> None:
    reach = Reach(step=(0.3, 0.1, 0.0, -0.2, 0.0, 0.0, 0.0), plausibility=0.2, support=-0.3)
    model = make_model(ScaledAdapted(reach, steps=7, k=16))
    queries = make_queries()
    context = make_context(model, queries, 16)
    weights = reach.weigh(Neighborhood.measure(context))
    head = copy.deepcopy(model.head).requires_grad_(True)
    for row in range(len(queries)):
        adapted = adapt_one(
            head,
            mbpa.Gradient(1.0, 7),
            "cross_entropy",
            None,
            context.found.keys[row],
            context.found.values[row],
            weights[row],
        )
        expected = adapted(queries[row]).detach()
        got = model(keys=queries[row : row + 1])[0]
        torch.testing.assert_close(got, expected.log_softmax(-1), atol=1e-4, rtol=1e-4)


def test_nothing_changes_with_the_unit_of_keys() -> None:
    """A gate fitted with one memory is of use with another only if features have no unit."""
    predictor = make_predictor()
    small, large = make_model(predictor), make_model(predictor, scale=50.0)
    torch.testing.assert_close(
        small(keys=make_queries()), large(keys=make_queries(scale=50.0)), atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize("kernel", [mbpa.InverseDistance(), mbpa.Balanced(mbpa.InverseDistance())])
def test_a_gated_mixture_is_the_mixture_with_its_weights(kernel: Kernel) -> None:
    parts = ScaledAdapted(k=16, steps=3), mbpa.NeighborVote(kernel, k=32)
    logs = [math.log(share) for share in (0.5, 0.3, 0.2)]
    gated = make_model(Gated(*parts, gate=make_gate(*logs)))
    fixed = make_model(mbpa.Mixture(mbpa.Parametric(), *parts, weights=(0.5, 0.3, 0.2)))
    torch.testing.assert_close(gated(keys=make_queries()), fixed(keys=make_queries()))
    shares = [part.share for part in gated.explain(keys=make_queries()).parts]
    assert shares == pytest.approx([0.5, 0.3, 0.2])


@pytest.mark.parametrize("entries", [1, 5, 200])
def test_predictions_are_distributions_with_few_neighbours_too(entries: int) -> None:
    prediction = make_model(make_predictor(), entries)(keys=make_queries())
    assert prediction.isfinite().all()
    torch.testing.assert_close(prediction.exp().sum(1), torch.ones(12))


def test_without_entries_the_model_is_unchanged_to_the_bit() -> None:
    empty = make_model(make_predictor(), entries=0)
    parametric = make_model(mbpa.Parametric(), entries=0)
    assert torch.equal(empty(keys=make_queries()), parametric(keys=make_queries()))


def test_an_exact_match_is_measured_as_near() -> None:
    model = make_model(mbpa.Parametric())
    entry = model.memory.entries().keys[:1]
    near = Neighborhood.measure(make_context(model, entry)).features
    far = Neighborhood.measure(make_context(model, entry + 3)).features
    column = NEIGHBORHOOD_FEATURES.index("log relative distance of the nearest")
    assert near[0, column] == pytest.approx(math.log(1e-4), abs=0.1)
    assert far[0, column] > -1


def test_padding_does_not_change_features() -> None:
    model = make_model(mbpa.Parametric(), entries=10)
    padded, exact = (make_context(model, make_queries(), k) for k in (64, 10))
    torch.testing.assert_close(
        Neighborhood.measure(padded).features, Neighborhood.measure(exact).features
    )
    weights = Reach().weigh(Neighborhood.measure(padded))
    assert (weights[:, 10:] == 0).all()


def test_a_vote_adds_up_to_one() -> None:
    prediction = make_model(ScaledVote(k=16))(keys=make_queries())
    torch.testing.assert_close(prediction.exp().sum(1), torch.ones(12))


def fit_made_up_gate() -> tuple[Gate, Tensor, Tensor]:
    """Fit a gate where the second prediction is right if the nearest entry is near."""
    draws = torch.Generator().manual_seed(2)
    features = torch.randn(4000, count_features(1), generator=draws)
    features[:, 0] = 1
    is_near = features[:, 1] < 0
    good, bad = math.log(0.9), math.log(0.05)
    scores = torch.stack([torch.where(is_near, bad, good), torch.where(is_near, good, bad)], 1)
    return fit_gate(features, scores), features, scores


def test_a_fitted_gate_finds_what_tells_good_from_bad_predictions() -> None:
    gate, features, scores = fit_made_up_gate()
    gated = (gate.weigh(features) + scores).logsumexp(1).mean()
    constant = (scores + math.log(0.5)).logsumexp(1).mean()
    assert gated > constant + 0.4
    assert gate.coefficients[1][1] < -1


def test_fitting_a_gate_is_deterministic() -> None:
    assert fit_made_up_gate()[0] == fit_made_up_gate()[0]


def test_a_gate_is_made_of_plain_numbers() -> None:
    gate, _, _ = fit_made_up_gate()
    assert all(type(number) is float for row in gate.coefficients for number in row)
    predictor = Gated(ScaledAdapted(), gate=gate)
    assert predictor == Gated(ScaledAdapted(), gate=Gate(gate.coefficients))
    assert hash(predictor) == hash(Gated(ScaledAdapted(), gate=gate))


def test_features_of_a_vote_are_finite() -> None:
    model = make_model(mbpa.Parametric())
    context = make_context(model, make_queries())
    vote = mbpa.NeighborVote(k=4)(context.nearest(4))
    features = measure_features(context, [vote])
    assert features.shape == (12, count_features(1))
    assert features.isfinite().all()


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="sharpness must have 7 numbers"):
        Reach(sharpness=(1.0,))
    with pytest.raises(ValueError, match="coefficients must have 12 numbers"):
        Gate(((0.0,), (0.0,)))
    with pytest.raises(ValueError, match="the gate must weigh the model and 2 predictors"):
        Gated(ScaledAdapted(), ScaledVote(), gate=make_gate(0.0, 0.0))
    with pytest.raises(ValueError, match="features must have 12 columns"):
        fit_gate(torch.ones(3, 4), torch.zeros(3, 2))
    with pytest.raises(ValueError, match="the memory must hold labels"):
        mbpa.MbPA(
            head=nn.Linear(SIZE, 1).eval(),
            memory=mbpa.ExactMemory(4, SIZE, value_shape=(1,), value_dtype=torch.float32),
            predictor=make_predictor(),
        )


def test_a_mask_of_unused_rows_leaves_other_rows_alone() -> None:
    model = make_model(make_predictor())
    context = make_context(model, make_queries())
    mask = context.found.mask.clone()
    mask[3] = False
    partial = replace(context, neighbors=replace(context.found, mask=mask))
    whole, some = make_predictor()(context), make_predictor()(partial)
    assert torch.equal(some[3], context.parametric[3])
    torch.testing.assert_close(some[4:], whole[4:])


@pytest.mark.parametrize(("entries", "share"), [(200, 0.5), (64, 0.5), (32, 1 / 9), (0, 0.0)])
def test_a_memory_with_few_entries_is_trusted_less(entries: int, share: float) -> None:
    vote = mbpa.NeighborVote(k=16, smoothing=0.1)
    model = make_model(Gated(vote, gate=make_gate(0.0, 0.0)), entries)
    queries = make_queries()
    if not entries:
        torch.testing.assert_close(model(keys=queries).exp(), model.head(queries).softmax(1))
        return
    context = make_context(model, queries)
    mixed = (1 - share) * context.parametric.exp() + share * vote(context.nearest(16)).exp()
    torch.testing.assert_close(model(keys=queries).exp(), mixed)
