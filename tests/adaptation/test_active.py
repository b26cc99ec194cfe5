"""The active vocabulary: its errors stay below its bound, and it forgets, streams and saves."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import oracle
import pytest
import torch
from torch import Tensor, nn

import mbpa
from mbpa import Engine
from mbpa.adaptation import Problem
from mbpa.adaptation.active import pack_summary, solve_active, unpack_summary
from mbpa.adaptation.active_bound import ErrorBound
from mbpa.adaptation.span import is_span_fused
from mbpa.explanation import Explanation

CLASSES, SIZE = 300, 12


def draw_problem(seed: int) -> tuple[Problem, int]:
    """A difficult problem in float64, and a number of active classes per neighbour.

    Steps may be far too long, distributions flat or peaked, keys equal or opposite, and labels are
    mostly classes that the head finds improbable.
    """
    torch.manual_seed(seed)
    batch, k = 3, int(torch.randint(1, 24, ()))

    def scale(least: float, most: float) -> float:
        return math.exp(float(torch.empty(()).uniform_(math.log(least), math.log(most))))

    head = nn.Linear(SIZE, CLASSES, bias=seed % 4 != 0, dtype=torch.float64)
    with torch.no_grad():
        head.weight.normal_().mul_(scale(0.01, 2))
        if head.bias is not None:
            head.bias.normal_().mul_(scale(0.1, 3))
    centre = torch.randn(batch, 1, SIZE, dtype=torch.float64) * scale(0.1, 3)
    keys = centre + torch.randn(batch, k, SIZE, dtype=torch.float64) * scale(0.01, 3)
    keys[:, k // 2 :] *= (1, 1, -1)[seed % 3]  # inner products of both signs
    keys[:, : k // 3] = keys[:, :1]
    queries = centre[:, 0] + torch.randn(batch, SIZE, dtype=torch.float64) * scale(0.01, 3)
    weights = (torch.randn(batch, k, dtype=torch.float64) * scale(0.1, 5)).softmax(1)
    weights[0, k // 2] = 0  # like padding
    values = torch.randint(CLASSES, (batch, k))
    if seed % 5 == 0:  # probable labels
        values = head(keys).topk(3).indices[..., 2]
    rate = scale(1e-3, 4) / float(keys.square().sum(-1).mean() + 1)
    decay = 0.0 if seed % 2 else min(1.0, scale(1e-3, 1.2))
    adapting = (("weight", "bias"), ("weight",), ("bias",))[seed % 7 % 3] if seed % 4 else None
    problem = Problem(
        head=head,
        rule=mbpa.Gradient(rate, int(torch.randint(1, 25, ())), decay),
        loss="cross_entropy",
        adapting=adapting or ("weight",),
        queries=queries,
        outputs=head(queries).detach(),
        keys=keys,
        values=values,
        weights=weights,
    )
    return problem, int(torch.randint(1, 40, ()))


def summarize(problem: Problem, width: int):
    assert problem.linear is not None
    outputs = problem.linear(problem.keys)
    packed = pack_summary(outputs.flatten(0, 1), (width,)).view(*outputs.shape[:2], -1)
    return unpack_summary(packed, (width,), width, problem.dtype)


@cache  # the oracle is slow
def adapt_slowly(seed: int) -> Tensor:
    problem, parts = draw_problem(seed)[0], []
    for b, query in enumerate(problem.queries):
        adapted = oracle.adapt_one(
            problem.head,
            problem.rule,
            "cross_entropy",
            problem.adapting,
            problem.keys[b],
            problem.values[b],
            problem.weights[b],
        )
        parts.append(adapted(query).detach())
    return torch.stack(parts)


def find_violations(seeds: range) -> tuple[int, list[float]]:
    """The number of errors that exceed their bound, and the ratios of error to bound.

    Ratios are those of queries whose bound is below 1.
    """
    violations, ratios = 0, []
    for seed in seeds:
        problem, width = draw_problem(seed)
        outputs, _, report = solve_active(problem, summarize(problem, width), False, True)
        assert report is not None
        error = (outputs.log_softmax(1) - adapt_slowly(seed).log_softmax(1)).abs()
        is_active = outputs != problem.outputs
        for errors, bound in (
            (error.where(is_active, 0).amax(1), report.active_bound),
            (error.amax(1), report.bound),
        ):
            # Where steps diverge, both are infinite or not a number.
            violations += int((errors > bound * (1 + 1e-9) + 1e-10).sum())
        ratios += (errors / bound)[(bound < 1) & (errors > 1e-9)].tolist()
    return violations, ratios


@pytest.mark.heavy
def test_errors_stay_below_the_bounds() -> None:
    violations, ratios = find_violations(range(48))
    assert violations == 0
    assert len(ratios) > 48  # of 144 queries, so the bound says something
    assert sorted(ratios)[len(ratios) // 2] > 0.05  # and is not far from the error


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 10_000, 1000))
def test_errors_stay_below_the_bounds_in_many_problems(start: int) -> None:
    assert find_violations(range(start, start + 1000))[0] == 0


@pytest.mark.heavy
@pytest.mark.parametrize("planted", ["no rise", "no distance", "less pull", "smaller squares"])
def test_a_mistake_in_the_bound_is_noticed(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    move, advance = ErrorBound._move_rest, ErrorBound.advance

    def move_less(self):
        fall, rise, lost, gained = move(self)
        if planted == "no rise":
            return fall, 0 * rise, lost, 0 * gained
        return fall, rise, (0.2 * lost if planted == "smaller squares" else lost), gained

    def advance_less(self, *figures):
        advance(self, *figures)
        if planted == "no distance":
            self._distance = 0 * self._distance
        if planted == "less pull":
            self._pull = 0.7 * self._pull

    monkeypatch.setattr(ErrorBound, "_move_rest", move_less)
    monkeypatch.setattr(ErrorBound, "advance", advance_less)
    assert find_violations(range(48))[0] > 0


@pytest.mark.heavy
def test_with_all_classes_the_result_is_exact() -> None:
    for seed in range(20):
        problem, _ = draw_problem(seed)
        summary = summarize(problem, CLASSES)
        outputs, _, report = solve_active(problem, summary, True, True)
        exact = adapt_slowly(seed)
        assert report is not None
        assert report.sizes.tolist() == [CLASSES] * 3
        if exact.isfinite().all() and exact.abs().max() < 1e6:
            torch.testing.assert_close(outputs.log_softmax(1), exact.log_softmax(1))


# Through the engine

ENTRIES = 60


def make_model(engine: Engine, dtype: torch.dtype = torch.float32, **options) -> mbpa.MbPA:
    torch.manual_seed(2)
    head = nn.Linear(SIZE, CLASSES, dtype=dtype)
    with torch.no_grad():
        head.weight.mul_(8)
    rule = options.pop("rule", mbpa.Gradient(0.05, 8))
    return mbpa.MbPA(
        head=head,
        memory=mbpa.ExactMemory(options.pop("capacity", ENTRIES), SIZE, dtype=dtype),
        predictor=mbpa.Adapted(rule, k=9),
        engine=engine,
    )


def draw_examples(count: int = ENTRIES, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(count, SIZE, generator=generator)
    return keys, torch.randint(CLASSES, (count,), generator=generator)


QUERIES = draw_examples(10, seed=1)[0]


def fill(model: mbpa.MbPA) -> mbpa.MbPA:
    keys, labels = draw_examples()
    model.write(keys=keys.to(model.memory.dtype), values=labels)
    return model


def make_active(tolerance: float = math.inf, **options) -> mbpa.MbPA:
    return fill(make_model(Engine(tolerance=tolerance, path="active"), **options))


@pytest.mark.parametrize("tolerance", [1e-6, 0.003, 0.05, 1.0])
def test_no_error_exceeds_the_tolerance(tolerance: float) -> None:
    exact, model = fill(make_model(Engine())), make_active(tolerance)
    error = (model(keys=QUERIES) - exact(keys=QUERIES)).abs().amax(1)
    assert error.max() <= tolerance + 1e-5  # and rounding
    adaptation = model.explain(keys=QUERIES).parts[0].adaptation
    assert adaptation is not None
    assert adaptation.report is not None
    assert (error <= adaptation.report.bound + 1e-5).all()
    assert (adaptation.report.bound <= tolerance).all()


def test_more_classes_are_tried_before_all_of_them() -> None:
    sizes = set()
    for tolerance in (1e-6, 0.01, 0.03, 0.1, 1.0):
        adaptation = make_active(tolerance).explain(keys=QUERIES).parts[0].adaptation
        assert adaptation is not None
        assert adaptation.report is not None
        sizes |= set(adaptation.report.sizes.tolist())
    assert CLASSES in sizes
    assert len(sizes - {CLASSES}) > 2


def test_a_tolerance_of_zero_is_exact_to_the_bit() -> None:
    plain, zero = fill(make_model(Engine())), fill(make_model(Engine(tolerance=0)))
    assert torch.equal(plain(keys=QUERIES), zero(keys=QUERIES))


def test_the_path_is_taken_only_where_it_pays() -> None:
    keys, labels = draw_examples()
    small, large = (
        mbpa.MbPA(
            head=nn.Linear(SIZE, classes),
            memory=mbpa.ExactMemory(ENTRIES, SIZE),
            predictor=mbpa.Adapted(mbpa.Gradient(0.05, 8), k=9),
            engine=Engine(tolerance=math.inf),
        )
        for classes in (20, 30_000)  # between them, it depends on what the machine is doing
    )
    small.write(keys, labels % 20)
    assert small.explain(keys=QUERIES).path != "active"
    large.write(keys, labels)
    text = str(large.explain(keys=QUERIES)[0])
    assert "path: active" in text
    assert "of 30,000 classes" in text
    assert "of the exact ones" in text


@pytest.mark.parametrize(
    "rule",
    [mbpa.Gradient(0.05, 8, momentum=0.5), mbpa.RMSprop(0.01, 3), mbpa.MAP(0.1)],
    ids=["momentum", "rmsprop", "map"],
)
def test_other_rules_are_computed_exactly(rule: mbpa.Rule) -> None:
    exact = fill(make_model(Engine(), rule=rule))
    model = fill(make_model(Engine(tolerance=math.inf), rule=rule))
    assert torch.equal(model(keys=QUERIES), exact(keys=QUERIES))


def test_step_sizes_are_derived_from_the_neighbours() -> None:
    rule = mbpa.Gradient(steps=5)
    exact, model = fill(make_model(Engine(), rule=rule)), make_active(1e-3, rule=rule)
    torch.testing.assert_close(model(keys=QUERIES), exact(keys=QUERIES), atol=2e-3, rtol=0)


def test_the_norm_of_the_change_is_close() -> None:
    exact, model = fill(make_model(Engine())), make_active(1e-2)
    change, expected = model.explain(keys=QUERIES).change, exact.explain(keys=QUERIES).change
    assert change is not None
    assert expected is not None
    torch.testing.assert_close(change, expected, rtol=0.05, atol=0)


def test_a_deleted_entry_leaves_no_trace() -> None:
    keys, labels = draw_examples()
    model, other = make_active(), make_model(Engine(tolerance=math.inf, path="active"))
    model(keys=QUERIES)  # what is known about entries is kept from now on
    model.memory.delete(torch.arange(20))
    other.write(keys=keys[20:], values=labels[20:])
    assert torch.equal(model(keys=QUERIES), other(keys=QUERIES))


def test_the_order_of_examples_does_not_matter() -> None:
    keys, labels = draw_examples()
    order = torch.randperm(ENTRIES, generator=torch.Generator().manual_seed(4))
    model, other = make_active(), make_model(Engine(tolerance=math.inf, path="active"))
    other.write(keys=keys[order], values=labels[order])
    other(keys=QUERIES[:3])
    assert torch.equal(model(keys=QUERIES), other(keys=QUERIES))


def test_overwritten_entries_are_not_taken_for_others() -> None:
    keys, labels = draw_examples(3 * ENTRIES)
    model, other = (make_model(Engine(tolerance=math.inf, path="active")) for _ in range(2))
    for part in range(0, 3 * ENTRIES, 10):
        model.write(keys=keys[part : part + 10], values=labels[part : part + 10])
        model(keys=QUERIES)
    other.write(keys=keys[-ENTRIES:], values=labels[-ENTRIES:])
    assert torch.equal(model(keys=QUERIES), other(keys=QUERIES))


def test_a_head_that_changed_is_noticed() -> None:
    model, other = make_active(), make_active()
    model(keys=QUERIES)
    for each in (model, other):
        head = each.head
        assert isinstance(head, nn.Linear)
        head.weight.data[7] *= -2  # leaves no trace but the values
    assert torch.equal(model(keys=QUERIES), other(keys=QUERIES))


def test_a_trusted_head_is_compared_once() -> None:
    engine = Engine(tolerance=math.inf, path="active")
    model, other = fill(make_model(engine)), make_active()
    before = model(keys=QUERIES)
    head, changed = model.head, other.head
    assert isinstance(head, nn.Linear)
    assert isinstance(changed, nn.Linear)
    with engine.trust_head():
        assert torch.equal(model(keys=QUERIES), before)
        head.weight.data[7] *= -2
        stale = model(keys=QUERIES)
    changed.weight.data[7] *= -2
    expected = other(keys=QUERIES)
    assert not torch.equal(stale, expected)
    assert torch.equal(model(keys=QUERIES), expected)
    with engine.trust_head():  # it compares in the next context, too
        head.weight.data[7] *= 3
        changed.weight.data[7] *= 3
        assert torch.equal(model(keys=QUERIES), other(keys=QUERIES))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [20, 128])
def test_kept_summaries_equal_those_of_the_first_read(dtype: torch.dtype, width: int) -> None:
    keys, labels = draw_examples()
    results = []
    for saved in (False, True):
        torch.manual_seed(2)
        engine = Engine(tolerance=math.inf, path="active", width=width)
        memory = mbpa.ExactMemory(ENTRIES, SIZE, dtype=dtype)
        head = nn.Linear(SIZE, CLASSES)
        predictor = mbpa.Adapted(mbpa.Gradient(0.05, 8), k=9)
        model = mbpa.MbPA(head=head, memory=memory, predictor=predictor, engine=engine)
        ids = model.write(keys=keys.to(dtype), values=labels)
        if saved:
            rows = engine.summarize(head, memory, keys)
            assert rows is not None
            engine.keep_summaries(head, memory, ids, rows.clone())
        results.append(model(keys=QUERIES))
        if saved:
            engine.keep_summaries(head, memory, ids, torch.zeros_like(rows))
            assert not torch.equal(model(keys=QUERIES), results[1])  # they are used
    assert torch.equal(*results)


def test_summaries_are_for_active_vocabularies() -> None:
    keys, _ = draw_examples()
    model = make_model(Engine())
    assert model.memory.capacity == ENTRIES
    assert Engine().summarize(model.head, model.memory, keys) is None
    with pytest.raises(ValueError, match="width must be"):
        Engine(tolerance=math.inf, width=0)


@pytest.mark.heavy
def test_a_stream_scores_as_one_by_one() -> None:
    keys, labels = draw_examples()
    model, other = (make_model(Engine(tolerance=math.inf, path="active")) for _ in range(2))
    scores = model.score_then_write(keys, labels)
    expected = torch.cat(
        [other.score_then_write(keys[i : i + 1], labels[i : i + 1]) for i in range(ENTRIES)]
    )
    torch.testing.assert_close(scores, expected)


def test_outputs_at_hand_save_a_run_of_the_head() -> None:
    keys, labels = draw_examples()
    given = make_model(Engine(tolerance=math.inf, path="active"), capacity=ENTRIES - 5)
    computed = make_model(Engine(tolerance=math.inf, path="active"), capacity=ENTRIES - 5)
    given.write(keys=keys, values=labels, outputs=given.head(keys))
    computed.write(keys=keys, values=labels)
    torch.testing.assert_close(given(keys=QUERIES), computed(keys=QUERIES))
    wrong = make_model(Engine(tolerance=math.inf, path="active"))
    wrong.write(keys=keys, values=labels, outputs=-given.head(keys))
    assert not torch.allclose(wrong(keys=QUERIES), computed(keys=QUERIES))
    with pytest.raises(ValueError, match="outputs must have shape"):
        given.write(keys=keys, values=labels, outputs=torch.zeros(3, CLASSES))


def test_outputs_at_hand_do_no_harm_where_nothing_is_kept() -> None:
    keys, labels = draw_examples()
    model = make_model(Engine())
    model.write(keys=keys, values=labels, outputs=model.head(keys))
    assert torch.equal(model(keys=QUERIES), fill(make_model(Engine()))(keys=QUERIES))


@pytest.mark.filterwarnings("ignore:.*bf16:UserWarning")  # of processors that emulate it
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_precisions(dtype: torch.dtype) -> None:
    exact, model = fill(make_model(Engine(), dtype)), make_active(1e-2, dtype=dtype)
    queries = QUERIES.to(dtype)
    error = (model(keys=queries) - exact(keys=queries)).abs().max()
    assert error <= 1e-2 + 1e-5


def test_small_chunks_give_the_same() -> None:
    model = fill(make_model(Engine(1, tolerance=math.inf, path="active")))
    torch.testing.assert_close(model(keys=QUERIES), make_active()(keys=QUERIES))


def test_without_room_for_what_is_kept_the_result_is_exact() -> None:
    model = fill(make_model(Engine(store_bytes=1000, tolerance=math.inf)))
    exact = fill(make_model(Engine(store_bytes=1000)))
    assert torch.equal(model(keys=QUERIES), exact(keys=QUERIES))


def test_tolerances_are_checked() -> None:
    for wrong in (-1.0, math.nan):
        with pytest.raises(ValueError, match="tolerance must be a number from 0"):
            Engine(tolerance=wrong)
    with pytest.raises(ValueError, match="path must be None or one of"):
        Engine(path="active")


def test_wide_summaries_contain_narrow_ones() -> None:
    outputs = torch.randn(5, 50, dtype=torch.float64)
    narrow = unpack_summary(pack_summary(outputs.clone(), (4,))[None], (4,), 4, torch.float64)
    both = pack_summary(outputs.clone(), (4, 20))[None]
    again = unpack_summary(both, (4, 20), 4, torch.float64)
    for name, value in vars(narrow).items():
        torch.testing.assert_close(getattr(again, name), value)
    wide = unpack_summary(both, (4, 20), 20, torch.float64)
    shares = outputs.softmax(1).sort(1, descending=True).values
    torch.testing.assert_close(wide.largest[0], shares[:, 20])
    torch.testing.assert_close(wide.squares[0], shares[:, 20:].square().sum(1))


def test_problems_are_left_as_they_were() -> None:
    problem, width = draw_problem(3)
    before = replace(problem, queries=problem.queries.clone(), outputs=problem.outputs.clone())
    solve_active(problem, summarize(problem, width), True, True)
    assert torch.equal(before.queries, problem.queries)
    assert torch.equal(before.outputs, problem.outputs)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("k", "decay", "bias"),
    [
        (16, 0.1, False),
        (64, 0.0, True),
        pytest.param(5, 0.0, True, marks=pytest.mark.slow),
        pytest.param(130, 0.0, True, marks=pytest.mark.slow),
    ],
)
def test_kernels_give_the_same(
    k: int, decay: float, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        pytest.importorskip("triton")
    torch.manual_seed(k)
    head = nn.Linear(SIZE, CLASSES, bias=bias).to(device)
    keys, queries = torch.randn(2, k, SIZE, device=device), torch.randn(2, SIZE, device=device)
    problem = Problem(
        head=head,
        rule=mbpa.Gradient(0.2, 3, decay),
        loss="cross_entropy",
        adapting=tuple(name for name, _ in head.named_parameters()),
        queries=queries,
        outputs=head(queries).detach(),
        keys=keys,
        values=torch.randint(CLASSES, (2, k), device=device),
        weights=torch.rand(2, k, device=device).softmax(1),
    )
    results = {}
    for kernels in ("0", "1"):
        monkeypatch.setenv("MBPA_TRITON", kernels)
        assert is_span_fused(problem) == (kernels == "1")
        summary = summarize(problem, 6 if k < 100 else 1)
        outputs, _, _ = solve_active(problem, summary, False, False)
        again, _, report = solve_active(problem, summary, False, True)
        _, change, _ = solve_active(problem, summary, True, True)
        torch.testing.assert_close(again, outputs)
        assert report is not None
        results[kernels] = outputs, change, *vars(report).values()
    for given, expected in zip(results["1"], results["0"], strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("gap", "dtype"), [(25.0, torch.float32), (40.0, torch.float64)])
def test_a_confident_head_that_is_proved_wrong(gap: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    head = nn.Linear(SIZE, 2000, dtype=torch.float64)
    with torch.no_grad():
        head.weight.mul_(0.1)
        head.bias.zero_()
        head.bias[0] = gap  # all else has a probability far below rounding errors of 1
    keys = 0.01 * torch.randn(20, SIZE, dtype=torch.float64) + 1
    labels, query = torch.arange(1, 21) * 90, torch.ones(1, SIZE, dtype=torch.float64)
    rule = mbpa.Gradient(0.4, 10)

    def predict(dtype: torch.dtype, engine: Engine) -> Explanation:
        model = mbpa.MbPA(
            head=nn.Linear(SIZE, 2000, dtype=dtype),
            memory=mbpa.ExactMemory(20, SIZE, dtype=dtype),
            predictor=mbpa.Adapted(rule, k=20),
            engine=engine,
        )
        model.head.load_state_dict(head.state_dict())
        model.write(keys=keys.to(dtype), values=labels)
        return model.explain(keys=query.to(dtype))

    exact = predict(torch.float64, Engine()).after
    assert exact[0, 0] < -1  # the confident class has fallen
    found = predict(dtype, Engine(tolerance=0.05, path="active"))
    adaptation = found.parts[0].adaptation
    assert adaptation is not None
    assert adaptation.report is not None
    assert int(adaptation.report.sizes[0]) < 2000
    error = (found.after.double() - exact).abs().max()
    assert 1e-6 < error <= adaptation.report.bound[0] + 1e-4


def test_outputs_that_are_not_accurate_enough_are_not_kept() -> None:
    keys, labels = draw_examples()
    for memory, given in (
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float16, torch.float32),
    ):
        models = [make_model(Engine(tolerance=math.inf, path="active")) for _ in range(2)]
        for model in models:
            model._memory = mbpa.ExactMemory(ENTRIES, SIZE, dtype=memory)
        outputs = models[0].head(keys).to(given)
        models[0].write(keys=keys, values=labels, outputs=outputs)
        models[1].write(keys=keys, values=labels)
        assert torch.equal(models[0](keys=QUERIES), models[1](keys=QUERIES))


def test_inference_mode_makes_no_difference() -> None:
    keys, labels = draw_examples()
    model = make_model(Engine(tolerance=math.inf, path="active"))
    with torch.inference_mode():
        model.write(keys=keys[:30], values=labels[:30], outputs=model.head(keys[:30]))
        model(keys=QUERIES)
    model.write(keys=keys[30:], values=labels[30:], outputs=model.head(keys[30:]))
    torch.testing.assert_close(model(keys=QUERIES), make_active()(keys=QUERIES))


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_outputs_at_hand_are_checked_before_anything_is_written(wrong: float) -> None:
    model, (keys, labels) = make_model(Engine(tolerance=math.inf)), draw_examples()
    outputs = model.head(keys).detach()
    outputs[3, 3] = wrong
    with pytest.raises(ValueError, match="outputs must be finite"):
        model.write(keys=keys, values=labels, outputs=outputs)
    assert len(model.memory) == 0


@pytest.mark.parametrize("classes", [2000, 6000, 20_000])
def test_what_is_explained_is_what_was_predicted(classes: int) -> None:
    torch.manual_seed(0)
    model = mbpa.MbPA(
        head=nn.Linear(SIZE, classes),
        memory=mbpa.ExactMemory(ENTRIES, SIZE),
        predictor=mbpa.Adapted(mbpa.Gradient(0.05, 10), k=8),
        engine=Engine(tolerance=math.inf),
    )
    keys, labels = draw_examples()
    model.write(keys=keys, values=labels)
    explanation = model.explain(keys=QUERIES)
    torch.testing.assert_close(explanation.parts[0].prediction, explanation.after)


def test_padding_leaves_no_trace_of_a_deleted_entry() -> None:
    keys, labels = draw_examples(6)
    models = [make_model(Engine(tolerance=0.5, path="active"), capacity=10) for _ in range(2)]
    models[0].write(keys=1e15 * torch.ones(1, SIZE), values=[1])
    models[0](keys=QUERIES)  # the outputs of the entry are kept now
    models[0].memory.delete(torch.tensor([0]))
    for model in models:
        model.write(keys=keys[:2], values=labels[:2])
    first, second = (model.score_then_write(keys[2:], labels[2:]) for model in models)
    assert torch.equal(first, second)
