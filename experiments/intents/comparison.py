"""The methods compared, how each is drawn, and what the search tries for it.

A method is an entry of `METHODS`, or of `PEERS` if it comes from another library, together with the
field of the config that holds its settings. Runs, search and figures follow from that.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.intents.methods import Parametric, Settings, Untold
from experiments.intents.peers import AdaptiveClassifier, SemanticRouter
from experiments.search import Grid


@dataclass(frozen=True)
class Method:
    """One line of every comparison."""

    settings: str | Settings
    """Field of the config that holds the settings; or the settings themselves if nothing varies."""
    color: str
    stages: tuple[Grid, ...] = ()
    """Grids that the search tries in turn, with all other settings at the best values so far."""
    keeps_old: bool = False
    """Whether the search judges the method by its accuracy on new intents, as long as the old ones
    do not suffer; otherwise by accuracy over all intents.
    """
    style: str = "-"
    """Style of its line."""
    embeds: bool = False
    """Whether the method receives sentences, so that its times include embedding them."""


NEIGHBOURS: Grid = {"k": (10, 20, 50), "bandwidth": (0.0, 0.2, 0.4)}
WEIGHTS: Grid = {"weight": tuple(place / 10 for place in range(1, 10))}
STEPS: Grid = {"lr": (3.0, 10.0, 30.0), "steps": (5, 20)}
FEW_STEPS: Grid = {"lr": (0.01, 0.02, 0.03, 0.05), "epochs": (20, 40)}
RATES: Grid = {"lr": (0.01, 0.03, 0.1, 0.3)}
SHARPNESSES: Grid = {"sharpness": (10.0, 20.0, 30.0, 50.0)}
OFFSETS = tuple(place / 2 for place in range(-6, 7))
ROWS: Grid = {"scale": (10.0, 15.0, 20.0, 30.0), "offset": OFFSETS}
ROW_STEPS: Grid = {"lr": (1.0, 3.0), "steps": (5, 10), "offset": (0.0, 1.0, 2.0, 3.0)}
ADAPTED_ROWS: Grid = {"scale": (15.0, 20.0, 25.0), "offset": OFFSETS[6:]}

METHODS: dict[str, Method] = {
    "parametric": Method(Parametric(), "#8c8c8c"),
    "fine-tuned head": Method("finetuned", "#b8a1cf", (FEW_STEPS,)),
    "retrained head": Method("retrained", "#1b7837", (RATES,)),
    "logistic regression": Method("logistic", "#000000", style=":"),
    "logistic regression (balanced)": Method("balanced", "#000000", style="--"),
    "nearest class mean": Method("means", "#35978f", (SHARPNESSES,)),
    "kernel vote": Method("vote", "#e08214", (NEIGHBOURS,)),
    "mixture": Method("mixture", "#b2182b", (NEIGHBOURS, WEIGHTS)),
    "MbPA": Method("local", "#2166ac", (STEPS, NEIGHBOURS)),
    "MbPA (auto)": Method(Untold(), "#67a9cf"),
    "MbPA (auto step)": Method("auto_step", "#67a9cf", (NEIGHBOURS,), style="--"),
    "MbPA (MAP)": Method("optimum", "#92c5de", ({"prior": (1e-4, 1e-3)},)),
    "MbPA on the retrained head": Method("on_retrained", "#7fbf7b", (STEPS, NEIGHBOURS)),
    "rows alone": Method("rows", "#c51b7d", (ROWS,), keeps_old=True, style="--"),
    "MbPA (rows)": Method(
        "local_rows", "#762a83", (ROW_STEPS, NEIGHBOURS, ADAPTED_ROWS), keeps_old=True
    ),
}
"""Methods by their names in records."""

PEERS: dict[str, Method] = {
    "adaptive-classifier": Method(AdaptiveClassifier(), "#8c510a", style="-.", embeds=True),
    "semantic-router": Method(SemanticRouter(), "#bf812d", style="-."),
    "SetFit": Method("setfit", "#01665e", style="-.", embeds=True),
}
"""Methods of other libraries, likewise; they take part if a config names them."""
