"""Conversion of predictors, kernels and rules to JSON, for a checkpoint's manifest, and back.

Only the library's own classes can be described. A user's own parts are recorded as custom, so that
loading can ask for them.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from mbpa.kernels import Balanced, ExpDot, Gaussian, InverseDistance, Uniform
from mbpa.predictors import Adapted, Mixture, NeighborVote, Parametric, Predictor
from mbpa.rules import MAP, Adam, Gradient, RMSprop

_CLASSES: dict[str, type] = {
    **{cls.__name__: cls for cls in (Parametric, Adapted, NeighborVote, Mixture)},
    **{cls.__name__: cls for cls in (Gradient, RMSprop, Adam, MAP)},
    "inverse_distance": InverseDistance,  # the names that checkpoints have always used
    "gaussian": Gaussian,
    "exp_dot": ExpDot,
    "uniform": Uniform,
    "balanced": Balanced,
}
_NAMES = {cls: name for name, cls in _CLASSES.items()}


def register(*classes: type) -> None:
    """Make further dataclasses of the library known; the modules that define them call this."""
    for cls in classes:
        _CLASSES[cls.__name__], _NAMES[cls] = cls, cls.__name__


def describe(thing: Any) -> Any:
    """Return a JSON value from which `build` restores `thing`, unless it has custom parts."""
    if thing is None or isinstance(thing, bool | int | float | str):
        return thing
    if isinstance(thing, tuple):
        return [describe(item) for item in thing]
    if type(thing) in _NAMES and is_dataclass(thing):
        values = {field.name: describe(getattr(thing, field.name)) for field in fields(thing)}
        return {"type": _NAMES[type(thing)], **values}
    return {"custom": getattr(thing, "__qualname__", type(thing).__qualname__)}


def custom_parts(description: Any) -> list[str]:
    """Return the names of the custom parts in a description."""
    if isinstance(description, list):
        return [name for item in description for name in custom_parts(item)]
    if not isinstance(description, dict):
        return []
    if "custom" in description:
        return [description["custom"]]
    return [name for value in description.values() for name in custom_parts(value)]


def build(description: Any) -> Any:
    """Restore what `describe` described; raise `ValueError` for an unknown type or field."""
    if isinstance(description, list):
        return tuple(build(item) for item in description)
    if not isinstance(description, dict):
        return description
    values = {name: build(value) for name, value in description.items() if name != "type"}
    cls = _CLASSES.get(description.get("type", ""))
    if cls is None:
        raise ValueError(f"unknown part {description.get('type')!r}")
    try:
        return cls(*values.pop("mixed", ()), **values)  # mixtures take their parts by position
    except (TypeError, KeyError) as error:
        raise ValueError(f"{cls.__name__} does not take {sorted(values)}") from error


def restore_predictor(description: Any) -> Predictor:
    """Restore a predictor; raise `ValueError` if it has parts that only the user can supply."""
    if custom := custom_parts(description):
        raise ValueError(
            f"the saved predictor has parts of your own, {', '.join(custom)}: pass predictor="
        )
    predictor = build(description)
    if not isinstance(predictor, Predictor):
        raise TypeError(f"not a predictor: {description}")
    return predictor
