"""The methods compared, how each is drawn, and what the search tries for it.

A method is an entry of `METHODS`, or of `PEERS` if it comes from another library, together with the
field of the config that holds its settings. Runs, search and figures follow from that.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.intents.closed_form import MahalanobisMeans, RandomProjection
from experiments.intents.methods import DefaultAdaptation, DeployedHead, IntentMethodSettings
from experiments.intents.peers import AdaptiveClassifier, SemanticRouter
from experiments.intents.taught import Teaching
from experiments.methods import VOTE_WEIGHTS, ComparedMethod
from experiments.search import Grid


@dataclass(frozen=True)
class IntentMethod(ComparedMethod):
    """A method; `settings` is empty if nothing varies."""

    fixed: IntentMethodSettings | None = None
    """The settings themselves, of a method that has none in the config."""
    style: str = "-"
    """Style of its line in figures."""
    embeds: bool = False
    """Whether the method receives sentences, so that its times include embedding them."""


NEIGHBOURS: Grid = {"k": (10, 20, 50), "bandwidth": (0.0, 0.2, 0.4)}
STEPS: Grid = {"lr": (3.0, 10.0, 30.0), "steps": (5, 20)}
FEW_STEPS: Grid = {"lr": (0.01, 0.02, 0.03, 0.05), "epochs": (20, 40)}
RATES: Grid = {"lr": (0.01, 0.03, 0.1, 0.3)}
SHARPNESSES: Grid = {"sharpness": (10.0, 20.0, 30.0, 50.0)}
ROW_OFFSETS = tuple(place / 2 for place in range(-6, 7))
ROWS: Grid = {"scale": (10.0, 15.0, 20.0, 30.0), "offset": ROW_OFFSETS}
ROW_STEPS: Grid = {"lr": (1.0, 3.0), "steps": (5, 10), "offset": (0.0, 1.0, 2.0, 3.0)}
ADAPTED_ROWS: Grid = {"scale": (15.0, 20.0, 25.0), "offset": ROW_OFFSETS[6:]}

METHODS: dict[str, IntentMethod] = {
    "parametric": IntentMethod("#8c8c8c", fixed=DeployedHead()),
    "fine-tuned head": IntentMethod("#b8a1cf", "finetuned", (FEW_STEPS,)),
    "retrained head": IntentMethod("#1b7837", "retrained", (RATES,)),
    "logistic regression": IntentMethod("#000000", "logistic", style=":"),
    "logistic regression (balanced)": IntentMethod("#000000", "balanced", style="--"),
    "nearest class mean": IntentMethod("#35978f", "means", (SHARPNESSES,)),
    "RanPAC": IntentMethod("#80cdc1", fixed=RandomProjection(), style="--"),
    "FeCAM": IntentMethod("#80cdc1", fixed=MahalanobisMeans(), style=":"),
    "kernel vote": IntentMethod("#e08214", "vote", (NEIGHBOURS,)),
    "mixture": IntentMethod("#b2182b", "mixture", (NEIGHBOURS, VOTE_WEIGHTS)),
    "MbPA": IntentMethod("#2166ac", "local", (STEPS, NEIGHBOURS)),
    "MbPA (auto)": IntentMethod("#67a9cf", fixed=DefaultAdaptation()),
    "MbPA (auto step)": IntentMethod("#67a9cf", "auto_step", (NEIGHBOURS,), style="--"),
    "MbPA (MAP)": IntentMethod("#92c5de", "optimum", ({"prior": (1e-4, 1e-3)},)),
    "MbPA on the retrained head": IntentMethod("#7fbf7b", "on_retrained", (STEPS, NEIGHBOURS)),
    "rows alone": IntentMethod("#c51b7d", "rows", (ROWS,), keeps_old=True, style="--"),
    "MbPA (rows)": IntentMethod(
        "#762a83", "local_rows", (ROW_STEPS, NEIGHBOURS, ADAPTED_ROWS), keeps_old=True
    ),
    "MbPA (taught)": IntentMethod("#d6604d", fixed=Teaching()),
    "MbPA (taught, free)": IntentMethod("#d6604d", fixed=Teaching(None), style="--"),
}
"""Methods by their names in records."""

PEERS: dict[str, IntentMethod] = {
    "adaptive-classifier": IntentMethod(
        "#8c510a", fixed=AdaptiveClassifier(), style="-.", embeds=True
    ),
    "semantic-router": IntentMethod("#bf812d", fixed=SemanticRouter(), style="-."),
    "SetFit": IntentMethod("#01665e", "setfit", style="-.", embeds=True),
}
"""Methods of other libraries, likewise; they take part if a config names them."""
