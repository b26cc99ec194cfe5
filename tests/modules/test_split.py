"""split and grow against oracles that know nothing of them: a deep copy of the user's model in eval
mode, run in full, and a forward pre-hook on it that sees what the layer receives."""

import copy
import functools
import pickle
import threading
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
)

from mbpa.modules.split import Trunk, grow, split

VOCABULARY = 23
PAD = 0


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(self.norm(self.conv(x)).relu().mean((-1, -2))))


class LanguageModel(nn.Module):
    """The word language model of the PyTorch examples, tied, with and without its last lines."""

    def __init__(self, normalised: bool = False) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.encoder = nn.Embedding(VOCABULARY, 8)
        self.rnn = nn.LSTM(8, 8, 2, dropout=0.3)
        self.decoder = nn.Linear(8, VOCABULARY)
        self.decoder.weight = self.encoder.weight
        self.normalised = normalised

    def forward(self, tokens: Tensor, hidden: Any = None) -> tuple[Tensor, Any]:
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        decoded = self.decoder(self.drop(output))
        if self.normalised:
            decoded = decoded.view(-1, VOCABULARY).log_softmax(-1)
        return decoded, hidden


def bert() -> nn.Module:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=16,
            num_labels=3,
        )
    )


def gpt2_config() -> GPT2Config:
    return GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=8,
        n_layer=2,
        n_head=2,
        num_labels=3,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=1,
    )


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def padded_tokens(seed: int = 0) -> dict[str, Tensor]:
    ids = tokens(3, 6, seed=seed)
    ids[0, 4:] = PAD
    ids[1, 2:] = PAD
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def images(seed: int = 0) -> Tensor:
    return torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(seed))


@dataclass
class Case:
    name: str
    build: Callable[[], nn.Module]
    at: str
    inputs: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    output: Callable[[Any], Tensor]  # of what the model returns, that which the head computes
    finish: Callable[[Tensor], Tensor] = lambda out: out  # what the model does to it
    hidden: Callable[[Tensor, dict[str, Any]], Tensor] = lambda h, kwargs: h
    options: dict[str, Any] = field(default_factory=dict)

    def made(self) -> nn.Module:
        torch.manual_seed(1)
        model = self.build()
        for parameter in model.parameters():  # zeros (biases) would hide mistakes
            parameter.data += 0.1 * torch.randn_like(parameter)
        for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
        return model.train()

    def split(self, model: nn.Module) -> tuple[Trunk, nn.Module]:
        return split(model, self.at, **self.options)

    def expected(self, model: nn.Module, seed: int = 0) -> tuple[Tensor, Tensor]:
        """The embedding and the model's output, by a hook on a deep copy in eval mode."""
        model, seen = copy.deepcopy(model).eval(), []
        model.get_submodule(self.at).register_forward_pre_hook(lambda m, args: seen.append(args[0]))
        args, kwargs = self.inputs(seed)
        with torch.no_grad():
            output = self.output(model(*args, **kwargs))
        (hidden,) = seen
        return self.hidden(hidden, kwargs), output

    def got(self, embed: nn.Module, head: nn.Module, seed: int = 0) -> tuple[Tensor, Tensor]:
        args, kwargs = self.inputs(seed)
        with torch.no_grad():
            hidden = embed(*args, **kwargs)
            return hidden, self.finish(head(hidden))

    def check(self, model: nn.Module, embed: nn.Module, head: nn.Module, seed: int = 0) -> None:
        torch.testing.assert_close(self.got(embed, head, seed), self.expected(model, seed))


def last_position(hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
    return hidden[torch.arange(len(hidden)), kwargs["attention_mask"].sum(-1) - 1]


def state_of_lstm() -> tuple[Tensor, Tensor]:
    return torch.full((2, 4, 8), 0.3), torch.full((2, 4, 8), -0.2)


CASES = [
    Case("cnn", Cnn, "fc", lambda seed: ((images(seed),), {}), lambda out: out),
    Case(
        "lstm",
        LanguageModel,
        "decoder",
        lambda seed: ((tokens(7, 4, seed=seed), state_of_lstm()), {}),
        lambda out: out[0],
    ),
    Case(
        "lstm-log-softmax",
        lambda: LanguageModel(normalised=True),
        "decoder",
        lambda seed: ((tokens(7, 4, seed=seed),), {}),
        lambda out: out[0],
        finish=lambda out: out.view(-1, VOCABULARY).log_softmax(-1),
    ),
    Case("bert", bert, "classifier", lambda s: ((), padded_tokens(s)), lambda out: out.logits),
    Case(
        "gpt2-lm",
        lambda: GPT2LMHeadModel(gpt2_config()),
        "lm_head",
        lambda s: ((), padded_tokens(s)),
        lambda out: out.logits,
    ),
    Case(
        "gpt2-classifier",
        lambda: GPT2ForSequenceClassification(gpt2_config()),
        "score",
        lambda s: ((), padded_tokens(s)),
        lambda out: out.logits,
        hidden=last_position,
        options={"pooled": True},
    ),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All of the model that could have been changed: every attribute by identity, the tensors by
    value, the dicts by what they hold."""
    attributes = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            attributes[path, name] = value if isinstance(value, bool) else id(value)
            if isinstance(value, dict):
                attributes[path, name, "items"] = [(k, id(v)) for k, v in value.items()]
            if isinstance(value, list):
                attributes[path, name, "items"] = [id(v) for v in value]
    values = {k: v.clone() for k, v in model.state_dict().items()}
    grads = {k: (p.requires_grad, p.grad) for k, p in model.named_parameters()}
    return {"attributes": attributes, "values": values, "grads": grads}


def assert_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(model)
    assert after["attributes"] == before["attributes"]
    assert after["grads"] == before["grads"]
    assert after["values"].keys() == before["values"].keys()
    assert all(torch.equal(after["values"][k], v) for k, v in before["values"].items())


# What split returns


@each_case
def test_head_of_embed_is_the_model_in_eval_mode(case: Case) -> None:
    model = case.made()
    embed, head = case.split(model)
    for seed in range(3):  # the first call checks, the later ones stop at the layer
        case.check(model, embed, head, seed)
    assert type(head) is type(model.get_submodule(case.at))
    assert head is not model.get_submodule(case.at)
    assert head.in_features == (4 if case.name == "cnn" else 8)


@each_case
def test_the_users_module_stays_as_it_was(case: Case) -> None:
    model = case.made()
    before, random_state = snapshot(model), torch.get_rng_state()
    embed, head = case.split(model)
    for seed in range(2):
        case.got(embed, head, seed)
    assert_unchanged(model, before)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random_state), "random numbers were drawn"


@each_case
def test_an_optimiser_step_on_the_model_shows_in_both_parts(case: Case) -> None:
    model = case.made()
    embed, head = case.split(model)
    before = case.got(embed, head)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
    args, kwargs = case.inputs(0)
    case.output(model(*args, **kwargs)).square().sum().backward()
    optimiser.step()
    assert not torch.allclose(case.got(embed, head)[0], before[0])
    case.check(model, embed, head)


@each_case
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_loaded_into_the_model_shows_in_both_parts(case: Case, assign: bool) -> None:
    model = case.made()
    embed, head = case.split(model)
    before = case.got(embed, head)
    state = {
        k: v + 0.1 * torch.rand_like(v) if v.is_floating_point() else v
        for k, v in model.state_dict().items()
    }
    model.load_state_dict(state, assign=assign)
    assert not torch.allclose(case.got(embed, head)[0], before[0])
    case.check(model, embed, head)


@each_case
@pytest.mark.parametrize("converted_first", [False, True])
def test_parameters_assigned_anew_show_in_both_parts(case: Case, converted_first: bool) -> None:
    model = case.made()
    embed, head = case.split(model)
    before = case.got(embed, head)
    if converted_first:  # gives an LSTM a new list of its weights
        model.float()
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(old.detach() + 0.1 * torch.randn_like(old)))
    assert not torch.allclose(case.got(embed, head)[0], before[0])
    case.check(model, embed, head)


@each_case
def test_conversion_of_the_model_converts_both_parts(case: Case) -> None:
    model = case.made()
    embed, head = case.split(model)
    before = case.got(embed, head)
    model.double()
    assert {p.dtype for p in [*embed.parameters(), *head.parameters()]} == {torch.float64}
    args, kwargs = case.inputs(0)
    if case.name == "cnn":
        args = (args[0].double(),)
    if case.name == "lstm":
        args = (args[0], tuple(state.double() for state in args[1]))
    hidden = embed(*args, **kwargs)
    assert hidden.dtype == torch.float64
    torch.testing.assert_close(case.finish(head(hidden)).float(), before[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_a_move_that_replaces_the_parameters_takes_both_parts_along(case: Case) -> None:
    model = case.made()
    embed, head = case.split(model)
    case.got(embed, head)
    model.to("meta")  # cannot be done in place, other than a move to a GPU
    for part in (embed.model, head):
        owner = model if part is embed.model else model.get_submodule(case.at)
        assert [id(t) for t in part.parameters()] == [id(t) for t in owner.parameters()]
        assert [id(t) for t in part.buffers()] == [id(t) for t in owner.buffers()]
    inputs = case.inputs(0)[0][0].to("meta")
    assert head(embed(inputs)).device.type == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@each_case
def test_a_move_to_a_gpu_takes_both_parts_along(case: Case) -> None:
    model = case.made()
    embed, head = case.split(model)
    before = case.got(embed, head)
    model.cuda()
    args, kwargs = case.inputs(0)
    args = tuple(tuple(t.cuda() for t in a) if isinstance(a, tuple) else a.cuda() for a in args)
    kwargs = {k: v.cuda() for k, v in kwargs.items()}
    for _ in range(2):
        hidden = embed(*args, **kwargs)
        got = case.finish(head(hidden))
        assert got.is_cuda
        torch.testing.assert_close(got.cpu(), before[1], rtol=1e-3, atol=1e-3)


@each_case
def test_modes_are_independent(case: Case) -> None:
    model = case.made()
    embed, head = case.split(model)
    model.eval()
    model.train()
    embed.train()
    assert not any(module.training for module in embed.modules())
    assert not any(module.training for module in head.modules())
    before = {k: v.clone() for k, v in model.named_buffers()}
    case.check(model, embed, head)
    first, second = case.got(embed, head), case.got(embed, head)
    assert torch.equal(first[0], second[0]), "dropout is active"
    assert all(torch.equal(v, before[k]) for k, v in model.named_buffers())
    assert all(module.training for module in model.modules())
    head.train()
    assert not any(module.training for module in embed.modules())


@each_case
def test_threads_get_their_own_embeddings(case: Case) -> None:
    model = case.made()
    embed, head = case.split(model)
    expected = [case.expected(model, seed)[0] for seed in range(4)]
    wrong: list[Any] = []
    barrier = threading.Barrier(4)

    def work(seed: int) -> None:
        barrier.wait()
        for _ in range(10):
            try:
                torch.testing.assert_close(case.got(embed, head, seed)[0], expected[seed])
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@each_case
def test_parts_survive_pickling_and_deep_copies(case: Case) -> None:
    model = case.made()
    embed, head = case.split(model)
    expected = case.got(embed, head)
    for other in (pickle.loads(pickle.dumps((embed, head))), copy.deepcopy((embed, head))):
        torch.testing.assert_close(case.got(*other), expected)
        assert other[0].at == case.at


def test_gradients_flow_through_embed_to_the_users_parameters() -> None:
    model = CASES[0].made().eval()
    embed, head = split(model, "fc")
    for _ in range(2):
        head(embed(images())).square().sum().backward()
        got = {k: p.grad.clone() for k, p in model.named_parameters()}
        model.zero_grad()
        model(images()).square().sum().backward()
        torch.testing.assert_close(got, {k: p.grad for k, p in model.named_parameters()})
        model.zero_grad()


def test_the_rest_of_the_forward_does_not_run_after_the_check() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.finished = nn.Linear(4, 3), []

        def forward(self, x: Tensor) -> Tensor:
            out = self.fc(x)
            self.finished.append(1)
            return out

    model = Counting()
    embed, _ = split(model, "fc")
    for _ in range(3):
        embed(torch.ones(2, 4))
    assert len(model.finished) == 1


def test_a_mapping_is_unpacked_into_keyword_arguments() -> None:
    case = CASES[3]
    embed, _ = case.split(case.made())
    expected = embed(**padded_tokens())
    assert torch.equal(embed(padded_tokens()), expected)
    assert torch.equal(embed(BatchEncoding(padded_tokens())), expected)
    ids = {"input_ids": padded_tokens()["input_ids"]}
    mask = padded_tokens()["attention_mask"]
    assert torch.equal(embed(ids, attention_mask=mask), expected)


def test_hidden_states_asked_of_transformers_put_no_hooks_on_the_users_model() -> None:
    case = CASES[3]
    model = case.made()
    before = snapshot(model)
    embed, _ = case.split(model)
    for _ in range(2):
        embed(**padded_tokens(), output_hidden_states=True)
    assert any(module._forward_hooks for module in embed.modules()), "no longer tests anything"
    assert_unchanged(model, before)


# Modules that are not reached through registered submodules alone


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.fc = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)
        layers = namedtuple("Layers", "body tail")
        self.layers = {"all": layers([self.norm, self.drop], (self.fc,))}

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.layers["all"].body, *self.layers["all"].tail]:
            x = layer(x)
        return x


class BoundMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.fc = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)
        self.body = self._body

    def _body(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x))


class ByHook(nn.Module):
    """Takes the features from a hook that writes to self, the way of many feature extractors."""

    def __init__(self, closure: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.fc = nn.Linear(4, 3)
        self.features = torch.zeros(5, 4)

        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            self.features = output

        self.body[1].register_forward_hook(keep if closure else self._keep)

    def _keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.features = output

    def forward(self, x: Tensor) -> Tensor:
        self.body(x)
        return self.fc(self.features)


def with_partial_forward() -> nn.Module:
    """As accelerate's add_hook_to_module leaves a module."""

    def new_forward(module: nn.Module, *args: Any) -> Any:
        return module._old_forward(*args)

    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    for module in (model, *model):
        module._old_forward = module.forward
        module.forward = functools.partial(new_forward, module)
    return model


def with_decorated_forward() -> nn.Module:
    def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: forward(*args)

    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    for module in (model, *model):
        module.forward = decorated(module.forward)
    return model


def with_default_argument() -> nn.Module:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    model.forward = lambda x, first=model[0], *, rest=model[1:]: rest(first(x))
    return model


def with_compiled_method() -> nn.Module:
    model = BoundMethod()
    model.body = torch.compile(model._body, backend="eager")
    return model


def with_cycle() -> nn.Module:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    model[0].parent = [model]
    model[0].parent.append(model[0].parent)
    model[1].add_module("leads_back", model[0])
    return model


UNUSUAL = {
    "modules in containers": (Listed, "fc"),
    "bound method": (BoundMethod, "fc"),
    "bound hook": (lambda: ByHook(closure=False), "fc"),
    "closure hook": (lambda: ByHook(closure=True), "fc"),
    "partial forward": (with_partial_forward, "2"),
    "decorated forward": (with_decorated_forward, "2"),
    "default argument": (with_default_argument, "2"),
    "compiled method": (with_compiled_method, "fc"),
    "cycle": (with_cycle, "2"),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_copies_never_lead_back_to_the_users_modules(name: str) -> None:
    build, at = UNUSUAL[name]
    torch.manual_seed(0)
    model = build().train()
    x = torch.randn(5, 4)
    norm = next(m for m in model.modules() if isinstance(m, nn.BatchNorm1d))
    norm.running_mean.fill_(0.5)
    before = snapshot(model)
    embed, head = split(model, at)
    for _ in range(2):
        got = head(embed(x))
    assert_unchanged(model, before)
    # By hand, as a deep copy would itself follow the closures back.
    fc = model.get_submodule(at)
    expected = (x - norm.running_mean) / (
        norm.running_var + norm.eps
    ).sqrt() @ fc.weight.T + fc.bias
    torch.testing.assert_close(got, expected)


def test_shared_submodules_stay_shared() -> None:
    body = nn.Linear(4, 4)
    embed, _ = split(nn.Sequential(body, nn.ReLU(), body, nn.Linear(4, 3)), "3")
    assert embed.model[0] is embed.model[2]
    assert embed.model[0] is not body


def test_hooks_of_the_user_run_in_the_parts_and_on_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    calls: list[str] = []
    model[0].register_forward_hook(lambda m, args, out: calls.append("body") or out * 2)
    model[1].register_forward_pre_hook(lambda m, args: calls.append("head") or (args[0] + 1,))
    x = torch.randn(5, 4)
    expected = model(x)
    assert calls == ["body", "head"]
    embed, head = split(model, "1")
    embed(x)
    calls.clear()
    torch.testing.assert_close(head(embed(x)), expected)
    assert calls == ["body", "head"]
    torch.testing.assert_close(embed(x), model[0](x))


def test_weight_norm_of_either_kind_shows_training() -> None:
    for norm in (parametrizations.weight_norm, old_weight_norm):
        torch.manual_seed(0)
        model = nn.Sequential(norm(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 3))
        embed, head = split(model, "2")
        x = torch.randn(5, 4)
        before = head(embed(x))
        for parameter in model.parameters():
            parameter.data.mul_(1.5)
        assert not torch.allclose(head(embed(x)), before)
        torch.testing.assert_close(head(embed(x)), model(x))


def old_weight_norm(module: nn.Module, name: str = "weight") -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(module, name)


def test_a_hook_that_sets_the_weights_of_an_lstm_sets_those_of_the_copy() -> None:
    case = CASES[1]
    model = case.made()
    old_weight_norm(model.rnn, "weight_hh_l0")
    before = snapshot(model)
    embed, head = case.split(model)
    for _ in range(2):
        got = case.got(embed, head)
    assert_unchanged(model, before)
    torch.testing.assert_close(got[1], model.eval()(*case.inputs(0)[0])[0])


def test_a_layer_whose_forward_is_called_directly_is_reached() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc.forward(x)

    embed, _ = split(Direct(), "fc")
    x = torch.randn(2, 4)
    for _ in range(2):
        assert torch.equal(embed(x), x)


def test_a_model_that_catches_exceptions_is_stopped_all_the_same() -> None:
    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.fc(x)
            except Exception:
                return self.fc(x * 0)

    embed, _ = split(Catching(), "fc")
    x = torch.randn(2, 4)
    for _ in range(2):
        assert torch.equal(embed(x), x)


def test_compiled_models_are_unwrapped() -> None:
    model = CASES[0].made()
    expected = CASES[0].expected(model)
    compiled = torch.compile(model, backend="eager")
    for at in ("fc", "_orig_mod.fc"):
        torch.testing.assert_close(CASES[0].got(*split(compiled, at)), expected)
    with pytest.raises(ValueError, match="got '_orig_mod': pass the model"):
        split(compiled, "_orig_mod")
    model.fc = torch.compile(model.fc, backend="eager")
    embed, head = split(model, "fc")
    assert type(head) is nn.Linear
    torch.testing.assert_close(CASES[0].got(embed, head), expected)
    model.compile(backend="eager")  # in place: calls go to the original's compiled forward
    torch.testing.assert_close(CASES[0].got(*split(model, "fc")), expected)


def test_copies_of_compiled_parts_are_not_compiled_again() -> None:
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model, whole = BoundMethod(), BoundMethod()
    model.body = torch.compile(model._body, backend=backend)
    whole.compile(backend=backend)
    for part in (model, whole):
        embed, head = split(part, "fc")
        for _ in range(2):
            head(embed(torch.randn(5, 4)))
    assert not compiled
    model(torch.randn(5, 4))
    assert compiled


def test_data_parallel_models_are_unwrapped() -> None:
    model = CASES[0].made()
    for at in ("fc", "module.fc"):
        embed, head = split(nn.DataParallel(model), at)
        model.cpu()  # it is moved to a GPU if there is one; the copies share its weights
        assert not any(isinstance(module, nn.DataParallel) for module in embed.modules())
        CASES[0].check(model, embed, head)


# What is refused


def test_names_not_found_are_refused_with_those_close_to_them() -> None:
    with pytest.raises(ValueError, match=r"submodule of Cnn, got 'fcc'; close to it: \['fc'\]"):
        split(Cnn(), "fcc")
    with pytest.raises(ValueError, match=r"got 'zzz'; the last ones: .*'drop', 'fc'\]"):
        split(Cnn(), "zzz")
    with pytest.raises(ValueError, match=r"got 'fc.weight'"):
        split(Cnn(), "fc.weight")


@pytest.mark.usefixtures("unchecked_annotations")
def test_what_is_no_name_or_no_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"at must be the name of a submodule, .* the name '1'$"):
        split(model, 1)  # type: ignore[arg-type]
    for at in (None, model[1], True, 1.0):
        with pytest.raises(ValueError, match=r"at must be the name of a submodule, .* got"):
            split(model, at)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module, got 'model'"):
        split("model", "1")  # type: ignore[arg-type]


def test_the_whole_model_is_no_submodule() -> None:
    with pytest.raises(ValueError, match="pass the model itself as the head"):
        split(Cnn(), "")


def test_what_cannot_be_copied_is_refused() -> None:
    with pytest.warns(DeprecationWarning, match="jit"):
        traced = torch.jit.trace(nn.Sequential(nn.Linear(4, 3)), torch.ones(1, 4))
    with pytest.raises(ValueError, match="got a ScriptModule"):
        split(traced, "0")
    with pytest.raises(ValueError, match="got a ScriptModule"):
        split(nn.Sequential(traced, nn.Linear(3, 2)), "1")
    with pytest.raises(ValueError, match="got a lazy LazyLinear: run a batch first"):
        split(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3)), "1")


@pytest.mark.parametrize(
    ("index", "at"),
    [
        (0, "conv"),
        (0, "drop"),
        (1, "drop"),
        (1, "encoder"),
        (2, "encoder"),
        (3, "bert.pooler"),
        (3, "bert.encoder.layer.1.output.dense"),
        (4, "transformer.ln_f"),
        (5, "transformer.ln_f"),
    ],
)
def test_a_middle_layer_is_refused_at_the_first_call(index: int, at: str) -> None:
    case = CASES[index]
    embed, _ = split(case.made(), at)
    args, kwargs = case.inputs(0)
    for _ in range(2):  # and at every one after it
        with pytest.raises(ValueError, match=r"goes on after it|must run once|called with one"):
            embed(*args, **kwargs)


def test_a_middle_layer_is_refused_though_its_output_is_among_the_hidden_states() -> None:
    model = CASES[3].made()
    embed, _ = split(model, "bert.encoder.layer.1.output.LayerNorm")
    inner = model.eval()(**padded_tokens(), output_hidden_states=True).hidden_states[-1]
    with pytest.raises(ValueError, match=r"'bert.*LayerNorm': the model goes on after it"):
        embed(**padded_tokens(), output_hidden_states=True)
    assert inner.shape == (3, 6, 8)


def test_where_a_model_returns_logits_nothing_else_passes_for_them() -> None:
    class Seq2Seq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.middle, self.fc = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            hidden = self.middle(x)
            return {"encoder_last_hidden_state": hidden, "logits": self.fc(hidden)}

    with pytest.raises(ValueError, match="goes on after it"):
        split(Seq2Seq(), "middle")[0](torch.randn(5, 4))
    assert split(Seq2Seq(), "fc")[0](torch.randn(5, 4)).shape == (5, 4)


def test_outputs_of_one_column_are_compared_before_any_softmax() -> None:
    class Mask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.middle, self.fc = nn.Linear(4, 1), nn.Linear(1, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"out": self.fc(self.middle(x)), "mask": torch.ones(len(x))}

    embed, _ = split(Mask(), "middle")
    with pytest.raises(ValueError, match="goes on after it"):
        embed(torch.randn(5, 4))


def test_small_outputs_are_not_all_equal() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    for parameter in model.parameters():
        parameter.data.mul_(1e-6)
    embed, _ = split(model, "0")
    with pytest.raises(ValueError, match="goes on after it"):
        embed(torch.randn(5, 4))


def test_a_layer_that_never_runs_is_refused() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) if x.sum() > 0 else nn.functional.linear(x, self.other.weight)

    with pytest.raises(ValueError, match="'other' must run in the model's forward, but was never"):
        split(Unused(), "other")[0](torch.ones(2, 4))
    embed, _ = split(Unused(), "fc")
    embed(torch.ones(2, 4))
    with pytest.raises(ValueError, match="'fc' must run"):  # after the check, too
        embed(-torch.ones(2, 4))


def test_a_layer_that_runs_twice_is_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.fc(x), self.fc(-x)

    with pytest.raises(ValueError, match="'fc' must run once per forward, ran 2 times"):
        split(Twice(), "fc")[0](torch.ones(2, 4))


def test_a_layer_with_several_inputs_is_refused_and_one_with_options_is_not() -> None:
    class Calls(nn.Module):
        def __init__(self, call: Callable[[nn.Module, Tensor], Any]) -> None:
            super().__init__()
            self.call, self.fc = call, Several()

        def forward(self, x: Tensor) -> Any:
            return self.call(self.fc, x)

    class Several(nn.Module):
        def forward(self, x: Tensor, y: Any = None, scale: float = 2.0) -> Tensor:
            return x * scale

    x = torch.ones(2, 4)
    for call, got in [
        (lambda fc, x: fc(x, x), r"got \(Tensor, Tensor\)"),
        (lambda fc, x: fc(x, y=x), r"got \(Tensor, y=\.\.\.\)"),
        (lambda fc, x: fc(x, [x]), r"got \(Tensor, list\)"),
        (lambda fc, x: fc(x=x), r"got \(x=\.\.\.\)"),
    ]:
        with pytest.raises(ValueError, match=r"'fc' must be called with one tensor.*" + got):
            split(Calls(call), "fc")[0](x)
    embed, head = split(Calls(lambda fc, x: fc(x, None, scale=2.0)), "fc")
    assert torch.equal(head(embed(x)), 2 * x)
    with pytest.raises(ValueError, match="goes on after it"):  # a head that needs its options
        split(Calls(lambda fc, x: fc(x, scale=3.0)), "fc")[0](x)


def test_a_layer_that_returns_a_tuple_is_refused() -> None:
    class Tail(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(4, 3)

        def forward(self, x: Tensor) -> Any:
            return self.rnn(x)

    with pytest.raises(ValueError, match="'rnn' must return one tensor, got tuple"):
        split(Tail(), "rnn")[0](torch.ones(5, 2, 4))


def test_an_empty_batch_does_not_pass_for_a_check() -> None:
    embed, _ = split(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), "0")
    assert embed(torch.ones(0, 4)).shape == (0, 4)
    with pytest.raises(ValueError, match="goes on after it"):
        embed(torch.randn(2, 4))


@pytest.mark.parametrize("wrapped", ["tuple", "dict", "nested", "dataclass", "softmax", "squeezed"])
def test_the_output_is_found_where_the_model_puts_it(wrapped: str) -> None:
    @dataclass
    class Output:
        loss: Any
        logits: Tensor

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Any:
            out, other = self.fc(x), torch.randn(5, generator=torch.Generator().manual_seed(0))
            return {
                "tuple": (other, out),
                "dict": {"loss": other, "out": out},
                "nested": [{"ids": torch.arange(5)}, {"out": [out]}],
                "dataclass": Output(None, out),
                "softmax": out.softmax(-1),
                "squeezed": out[:, None],
            }[wrapped]

    model = Wrapped()
    embed, head = split(model, "fc")
    x = torch.randn(5, 4)
    assert torch.equal(embed(x), x)
    assert torch.equal(head(embed(x)), model.fc(x))


def test_the_check_allows_for_autocast() -> None:
    model = CASES[0].made()
    for inner in (False, True):
        if inner:  # half precision in the forward only, and float32 outside it

            def forward(x: Tensor, plain: Callable[[Tensor], Tensor] = model.forward) -> Tensor:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return plain(x).float()

            model.forward = forward
        embed, head = split(model, "fc")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inner):
            assert torch.isfinite(head(embed(images()).float())).all()
        assert embed.checked


def test_inputs_changed_in_place_do_not_upset_the_check() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(0.5)
            out = self.fc(x)
            x.zero_()
            return out

    embed, _ = split(InPlace(), "fc")
    for _ in range(2):
        assert torch.equal(embed(torch.ones(2, 4)), torch.full((2, 4), 0.5))


# Pooling


def test_a_decoder_that_classifies_is_refused_unless_pooling_is_chosen() -> None:
    case = CASES[5]
    with pytest.raises(ValueError, match=r"GPT2ForSequenceC.* runs 'score'.*pooled=True"):
        split(case.made(), "score")
    with pytest.raises(ValueError, match=r"GPT2ForSequenceClassification runs 'inner\.score'"):
        split(nn.ModuleDict({"inner": case.made()}), "inner.score")


def test_every_position_of_a_decoder_can_be_asked_for() -> None:
    case = CASES[5]
    model = case.made()
    embed, head = split(model, "score", pooled=False)
    for _ in range(2):
        hidden = embed(**padded_tokens())
    assert hidden.shape == (3, 6, 8)
    picked = last_position(head(hidden), padded_tokens())
    torch.testing.assert_close(picked, case.expected(model)[1])


def test_a_middle_layer_is_refused_when_every_position_is_asked_for() -> None:
    embed, _ = split(CASES[5].made(), "transformer.ln_f", pooled=False)
    with pytest.raises(ValueError, match="goes on after it"):
        embed(**padded_tokens())


def test_positions_picked_and_then_transformed_are_refused() -> None:
    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)[:, -1].relu()  # leaves the positive ones as they were

    torch.manual_seed(0)
    embed, _ = split(Clipped(), "fc", pooled=False)
    with pytest.raises(ValueError, match="goes on after it"):
        embed(torch.randn(8, 5, 4))


class MeanLogits(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 3), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).mean(1) * self.scale


def test_pooling_of_any_model_is_found_out_and_can_be_chosen() -> None:
    x = torch.randn(2, 5, 4)
    with pytest.raises(ValueError, match="pass pooled=True"):
        split(MeanLogits(), "fc")[0](x)
    embed, _ = split(MeanLogits(), "fc", pooled=True)
    for _ in range(2):
        torch.testing.assert_close(embed(x), x.mean(1))
    with pytest.raises(ValueError, match="goes on after it"):
        split(MeanLogits(scale=2.0), "fc", pooled=True)[0](x)


def test_pooling_chosen_where_there_is_none_is_refused() -> None:
    embed, _ = split(Cnn(), "fc", pooled=True)
    with pytest.raises(ValueError, match=r"must pool the output of 'fc'.*got \(5, 4\)"):
        embed(images())


# Growing


def test_a_grown_linear_keeps_its_rows_and_adds_zero_ones() -> None:
    old = nn.Linear(4, 3).double()
    new = grow(old, 5, bias=-1.5)
    assert type(new) is nn.Linear
    assert (new.in_features, new.out_features, new.training) == (4, 5, False)
    assert new.weight.dtype == new.bias.dtype == torch.float64
    assert torch.equal(new.weight, torch.cat([old.weight, torch.zeros(2, 4)]))
    assert torch.equal(new.bias, torch.cat([old.bias, torch.full((2,), -1.5)]))
    assert new.weight.is_leaf
    assert new.weight.requires_grad
    assert not grow(old.requires_grad_(False), 5).weight.requires_grad


def test_a_grown_head_shares_nothing_and_trains() -> None:
    torch.manual_seed(0)
    old = nn.Sequential(
        nn.BatchNorm1d(4), nn.Linear(4, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 3)
    )
    old[1].weight.requires_grad_(False)
    old.train()
    before = snapshot(old)
    new = grow(old, 4)
    x = torch.randn(5, 4)
    torch.testing.assert_close(new(x)[:, :3], copy.deepcopy(old).eval()(x))
    assert torch.equal(new(x)[:, 3], torch.zeros(5))
    assert not new[1].weight.requires_grad
    optimiser = torch.optim.SGD(new.train().parameters(), lr=1.0)
    nn.functional.cross_entropy(new(x), torch.full((5,), 3)).backward()
    optimiser.step()
    assert new[-1].weight[3].any()
    assert_unchanged(old, before)


def test_a_grown_head_can_be_adopted_by_the_model() -> None:
    model = Cnn()
    _, head = split(model, "fc")
    model.fc = grow(head, 7)
    assert model.train()(images()).shape == (5, 7)
    model(images()).sum().backward()
    assert model.fc.weight.grad is not None
    assert model.fc.weight.data_ptr() != head.weight.data_ptr()


def test_growth_by_none_is_a_copy() -> None:
    old = nn.Linear(4, 3)
    new = grow(old, 3)
    assert torch.equal(new.weight, old.weight)
    assert new.weight.data_ptr() != old.weight.data_ptr()
    assert new.bias.data_ptr() != old.bias.data_ptr()


def test_a_head_without_bias_stays_without() -> None:
    assert grow(nn.Linear(4, 3, bias=False), 5).bias is None
    with pytest.raises(ValueError, match=r"bias must be 0 for a head without bias, got 1\.0"):
        grow(nn.Linear(4, 3, bias=False), 5, bias=1.0)


@pytest.mark.usefixtures("unchecked_annotations")
def test_heads_that_cannot_grow_are_refused() -> None:
    class Cosine(nn.Linear):
        pass

    for classes in (3.5, True, "4"):
        with pytest.raises(ValueError, match=f"classes must be a whole number, got {classes!r}"):
            grow(nn.Linear(4, 3), classes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="classes must be at least 3, got 2"):
        grow(nn.Linear(4, 3), 2)
    with pytest.raises(ValueError, match=r"must contain an nn\.Linear to grow, got Conv1d"):
        grow(nn.Conv1d(4, 3, 1), 5)
    for head in (Cosine(4, 3), parametrizations.weight_norm(nn.Linear(4, 3))):
        with pytest.raises(ValueError, match=f"plain nn.Linear, got {type(head).__name__}"):
            grow(nn.Sequential(nn.Linear(4, 4), head), 5)
    with pytest.raises(ValueError, match=r"'weight_g', 'weight_v'"):
        grow(old_weight_norm(nn.Linear(4, 3)), 5)


def test_a_computed_weight_before_the_last_layer_is_copied() -> None:
    old = nn.Sequential(old_weight_norm(nn.Linear(4, 4)), nn.Linear(4, 3))
    x = torch.randn(2, 4)
    torch.testing.assert_close(grow(old, 5)(x)[:, :3], old(x))
