"""Splitting a network at a named layer: ``head(embed(x))`` is ``model(x)`` in eval mode.

Both parts are copies of the module tree that share its weights (see ``sharing``). In one of them
the named layer is replaced so that it stops the forward pass. No hook is installed, and the user's
model is not changed.
"""

import copy
import dataclasses
import difflib
import operator
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from mbpa.modules.sharing import share, unwrap

__all__ = ["Trunk", "grow", "split"]

# Differences allowed between head(embed(x)) and model(x), relative to the largest output. They only
# need to tell rounding (TF32, another batch shape) from a model that computes something else.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_LOW_PRECISION_TOLERANCE = 3e-2

# Inputs that a tap has received in the current forward pass of this thread. Modules are shared
# between threads, so the state of a call must not be stored on them.
_received: ContextVar[list[Tensor]] = ContextVar("_received")


def split(model: nn.Module, at: str, *, pooled: bool | None = None) -> tuple["Trunk", nn.Module]:
    """Split ``model`` at the layer ``at`` into ``(embed, head)``, which share its weights.

    ``embed(x)`` returns the tensor that ``at`` receives when ``model(x)`` runs, and ``head`` is
    ``at``. Both are in eval mode, whatever mode ``model`` is in. Both see the effect of training
    ``model``, loading a state, moving it or assigning parameters. Plain attributes, hooks and
    submodules are those at the time of the split. Modules held by objects other than containers
    and methods are not copied and remain the model's own.

    The first call of ``embed`` also runs the whole model once, to check that ``head(embed(x))`` is
    among its outputs, directly or through a softmax or log-softmax. Pass inputs, not labels.

    Args:
        model: the network to split; it is not changed.
        at: a name in ``model.named_modules()``: the last layer, or a module that contains all the
            last layers.
        pooled: ``True`` for a model that runs ``at`` on every position and then picks or averages
            positions; the embedding is then the result of pooling the inputs of ``at``. ``False``
            to get the inputs at every position of such a model.

    Raises:
        ValueError: ``at`` is not a submodule, or the model cannot be split there. Errors that only
            a forward pass can reveal are raised by the first call of ``embed``.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> embed, head = split(model, at="3")
        >>> embed(torch.ones(5, 2, 2)).shape, head
        (torch.Size([5, 3]), Linear(in_features=3, out_features=2, bias=True))
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {model!r}")
    if not isinstance(at, str):
        raise ValueError(
            f"at must be the name of a submodule, as in model.named_modules(), got {at!r}"
            + (f": the one of index {at} has the name {str(at)!r}" if type(at) is int else "")
        )
    memo: dict[int, Any] = {}
    tree = share(model, memo)
    owner, target = _find(model, at)
    if memo[id(target)] is tree:  # or the module inside a wrapper
        raise ValueError(f"at must name a submodule, got {at!r}: pass the model itself as the head")
    if pooled is None and at.rsplit(".", 1)[-1] == "score" and _pools_in_transformers(owner):
        raise ValueError(
            f"{type(owner).__name__} runs {at!r} on every position and then picks one: pass "
            "pooled=True to embed the picked position, or pooled=False to get every position"
        )
    head = share(target, {})
    return Trunk(tree, head, memo[id(target)], at=at, pooled=pooled), head


def grow(head: nn.Module, classes: int, *, bias: float = 0.0) -> nn.Module:
    """Return a copy of ``head`` with ``classes`` outputs, of which the old ones are unchanged.

    The copy shares nothing with ``head``. The layer that grows is the last ``nn.Linear``, in the
    order of registration. New rows have zero weights and the bias ``bias``. The copy is in eval
    mode and can be trained like any module; dtype, device and ``requires_grad`` are those of
    ``head``.

    Raises:
        ValueError: there is no plain ``nn.Linear`` to grow, ``classes`` is less than the current
            number, or a bias is given for a layer without one.
    """
    # deepcopy refuses a computed weight (weight norm by hooks), since it is not a leaf.
    computed = (t for m in head.modules() for t in vars(m).values() if isinstance(t, Tensor))
    grown = copy.deepcopy(head, {id(t): t.detach().clone() for t in computed if not t.is_leaf})
    linears = [m for m in grown.modules() if isinstance(m, nn.Linear)]
    if not linears:
        raise ValueError(f"head must contain an nn.Linear to grow, got {type(head).__name__}")
    last = linears[-1]
    if type(last) is not nn.Linear or set(last._parameters) != {"weight", "bias"}:
        raise ValueError(
            f"the last linear layer must be a plain nn.Linear, got {type(last).__name__} with "
            f"parameters {sorted(last._parameters)}: its weights are not rows to add to"
        )
    if isinstance(classes, bool) or not hasattr(classes, "__index__"):
        raise ValueError(f"classes must be a whole number, got {classes!r}")
    classes = operator.index(classes)
    if classes < last.out_features:
        raise ValueError(f"classes must be at least {last.out_features}, got {classes}")
    if last._parameters["bias"] is None and bias != 0:
        raise ValueError(f"bias must be 0 for a head without bias, got {bias}")
    for name, fill in (("weight", 0.0), ("bias", bias)):
        rows = last._parameters[name]
        if rows is not None:
            new = rows.detach().new_full((classes - len(rows), *rows.shape[1:]), fill)
            whole = torch.cat([rows.detach(), new])
            last._parameters[name] = nn.Parameter(whole, requires_grad=rows.requires_grad)
    last.out_features = classes
    return grown.eval()


class Trunk(nn.Module):
    """The part of a model before a layer, sharing the model's weights; ``split`` returns it.

    Call it like the model, or with one mapping of its keyword arguments (a Hugging Face
    ``BatchEncoding``). It is always in eval mode. Several threads may call it at once.
    """

    def __init__(
        self, model: nn.Module, head: nn.Module, tap: nn.Module, *, at: str, pooled: bool | None
    ) -> None:
        super().__init__()
        self.model = model
        self.at = at
        self.pooled = pooled
        self.checked: bool = False
        # In a tuple, so that neither is registered as a submodule.
        self._ends = (_insert_tap(tap, _pass if pooled else _stop, at), head)
        self.eval()

    @property
    def split_layer(self) -> nn.Module:
        """The layer at which the model was split; its weights are no part of the embedding."""
        return self._ends[0]

    def train(self, mode: bool = True) -> "Trunk":
        """Stay in eval mode: embeddings must not depend on the mode of an enclosing module."""
        return super().train(False)

    def extra_repr(self) -> str:
        return f"at={self.at!r}"

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) == 1 and isinstance(args[0], Mapping):
            return self.forward(**args[0], **kwargs)
        return self._run(args, kwargs) if self.checked else self._first(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        token = _received.set([])
        try:
            output = self.model(*args, **kwargs)
            received = _received.get()
        except _Reached as reached:
            return reached.hidden
        finally:
            _received.reset(token)
        if not received:
            raise self._never_reached()
        tensors = _tensors(output)
        want = received[0].shape
        if not tensors or tensors[0].shape[-1:] != want[-1:] or tensors[0].ndim >= len(want):
            got = tuple(tensors[0].shape) if tensors else type(output).__name__
            raise ValueError(
                f"with pooled=True the model must pool the output of {self.at!r} and return as "
                f"many columns as {tuple(want)} has, in fewer dimensions, got {got}"
            )
        return tensors[0]

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Run the first call: one pass through the whole model gives the embedding and checks it.

        Two passes, of the trunk and of the model, would be wrong: the first may change its inputs.
        """
        tap, head = self._ends
        memo: dict[int, Any] = {}
        whole, head = share(self.model, memo), share(head, {})
        calls: list[tuple[Tensor, Any]] = []

        def record(at: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden = _only_tensor(at, args, kwargs).clone()
            calls.append((hidden, head(*args, **kwargs)))
            return calls[-1][1]

        memo[id(tap)]._on_call = record
        output = whole(*args, **kwargs)
        if not calls:
            raise self._never_reached()
        if len(calls) > 1:
            raise ValueError(
                f"{self.at!r} must run once per forward, ran {len(calls)} times: which of its "
                "inputs is the embedding? Wrap the tail in a module of its own and name that"
            )
        hidden, result = calls[0]
        if self.pooled:
            hidden = self._run(args, kwargs)
        self._check(head, hidden, result, output)
        self.checked = hidden.numel() > 0  # an empty batch proves nothing
        return hidden

    @torch.no_grad()
    def _check(self, head: nn.Module, hidden: Tensor, result: Any, output: Any) -> None:
        dtypes = [p.dtype for p in head.parameters() if p.is_floating_point()]
        if dtypes and hidden.is_floating_point() and hidden.dtype not in dtypes:
            hidden = hidden.to(dtypes[0])  # the model opened an autocast of its own
        logits = head(hidden)
        if not isinstance(logits, Tensor) or not isinstance(result, Tensor):
            raise ValueError(
                f"{self.at!r} must return one tensor, got {type(result).__name__}: choose the "
                "last layer of the model"
            )
        forms = [logits]
        if logits.ndim and logits.shape[-1] > 1:  # of one column a softmax is always 1
            forms += [logits.log_softmax(-1), logits.softmax(-1)]
        for out in _tensors(output):
            dtypes = [logits.dtype, result.dtype, out.dtype]
            tolerance = max(_TOLERANCE.get(d, _LOW_PRECISION_TOLERANCE) for d in dtypes)
            agrees = _equal_or_picked if self.pooled is False else _equal
            if any(agrees(out, form, tolerance) for form in forms):
                return
        raise ValueError(
            f"head(embed(x)) must be an output of the model, but no output equals that of "
            f"{self.at!r}: the model goes on after it (or draws random numbers in eval mode). "
            "Choose the last layer, or wrap the tail in a module of its own and name that; if "
            f"the model only pools the positions of {self.at!r} afterwards, pass pooled=True"
        )

    def _never_reached(self) -> ValueError:
        return ValueError(
            f"{self.at!r} must run in the model's forward, but was never called: the model may use "
            "its weights, or its parts, directly. Name a module that the forward calls"
        )


# Tapping


class _Reached(BaseException):  # not an Exception: models may catch those
    """Raised by the tap to end a forward pass; carries the tensor that the tap received."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Tap(nn.Module):
    """A mix-in for the class of a layer that changes nothing but what a call does."""

    _on_call: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
    _at: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # hooks are left to the head
        return self._on_call(self._at, args, kwargs)

    forward = __call__

    def __reduce_ex__(self, protocol: Any) -> Any:  # pickle cannot find a class created at run time
        state = self.__getstate__()  # type: ignore[no-untyped-call]  # the library has no types
        return _new_tap, (type(self).__bases__[1],), state


def _insert_tap(layer: nn.Module, on_call: Callable[..., Any], at: str) -> nn.Module:
    layer.__class__ = _tap_class(type(layer))
    vars(layer).pop("forward", None)
    vars(layer).update(_on_call=on_call, _at=at)
    return layer


def _tap_class(base: type[nn.Module]) -> type[nn.Module]:
    return type(base.__name__, (_Tap, base), {"__module__": base.__module__})


def _new_tap(base: type[nn.Module]) -> nn.Module:
    return object.__new__(_tap_class(base))


def _stop(at: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise _Reached(_only_tensor(at, args, kwargs))


def _pass(at: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    hidden = _only_tensor(at, args, kwargs)
    _received.get().append(hidden)
    return hidden


def _only_tensor(at: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    def count(value: Any) -> int:
        if isinstance(value, Mapping):
            value = list(value.values())
        if isinstance(value, (list, tuple)):
            return sum(map(count, value))
        return int(isinstance(value, Tensor))

    if args and isinstance(args[0], Tensor) and count([*args, kwargs]) == 1:
        return args[0]
    raise ValueError(
        f"{at!r} must be called with one tensor, first, and no other; got "
        f"({', '.join([type(a).__name__ for a in args] + [f'{k}=...' for k in kwargs])}): wrap it "
        "in a module that takes one tensor and name that"
    )


# Finding and comparing


def _find(model: nn.Module, at: str) -> tuple[nn.Module, nn.Module]:
    """Return the owner of ``at``, and ``at``; the name may omit the prefixes of wrappers."""
    owner, target = model, model
    for atom in at.split(".") if at else ():
        owner = target
        while atom not in owner._modules and unwrap(owner) is not owner:
            owner = unwrap(owner)
        child = owner._modules.get(atom)
        if child is None:
            names = [name for name, _ in unwrap(model).named_modules() if name]
            close = difflib.get_close_matches(at, names, n=3)
            hint = f"close to it: {close}" if close else f"the last ones: {names[-5:]}"
            kind = type(model).__name__
            raise ValueError(f"at must name a submodule of {kind}, got {at!r}; {hint}")
        target = child
    return owner, target


def _pools_in_transformers(owner: nn.Module) -> bool:
    return any(
        c.__name__.endswith("ForSequenceClassification")
        and c.__module__.startswith("transformers.")
        for c in type(owner).__mro__
    )


def _tensors(output: Any) -> list[Tensor]:
    """Return the float tensors at the shallowest level of ``output`` that has any, or its logits.

    Deeper levels are ignored: models return hidden states there, and a middle layer would pass.
    """
    level = [output]
    for _ in range(5):
        found = [v for v in level if isinstance(v, Tensor) and v.is_floating_point()]
        if found:
            return found
        level = [inner for value in level for inner in _members(value)]
    return []


def _members(value: Any) -> list[Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
        value = vars(value)
    if isinstance(value, Mapping):
        return [value["logits"]] if value.get("logits") is not None else list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else []


def _equal(out: Tensor, want: Tensor, tolerance: float) -> bool:
    if out.numel() != want.numel():
        return False
    return bool(_close(out.reshape(-1), want.reshape(-1), tolerance).all())


def _equal_or_picked(out: Tensor, want: Tensor, tolerance: float) -> bool:
    """Return whether ``out`` equals ``want``, or one position of it for each example."""
    if out.ndim == 2 and want.ndim > 2 and out.shape == (want.shape[0], want.shape[-1]):
        close = _close(out[:, None], want.reshape(want.shape[0], -1, want.shape[-1]), tolerance)
        return bool(close.all(-1).any(-1).all())
    return _equal(out, want, tolerance)


def _close(out: Tensor, want: Tensor, tolerance: float) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(out.dtype, want.dtype), torch.float32)
    # Broadcast first: in torch 2.11 isclose cannot do so with equal_nan=True.
    out, want = torch.broadcast_tensors(out.to(want.device, dtype), want.to(dtype))
    # Relative to the largest: an absolute floor would pass any two tensors of small numbers.
    scale = want[want.isfinite()].abs().amax().item() if want.isfinite().any() else 0.0
    return torch.isclose(out, want, rtol=0.0, atol=tolerance * scale, equal_nan=True)
