"""The presets: what is run. Their settings are first guesses until a search has been run."""

from __future__ import annotations

from mbpa.experiments.images.config import ImagesConfig
from mbpa.experiments.pretraining import Pretraining

SMOKE = ImagesConfig(
    seeds=(1,),
    size=40,
    classes=6,
    held_out=100,
    scored=120,
    pretraining=Pretraining(width=4, epochs=1, batch=100),
    points=(0.1, 1.0),
)
QUICK = ImagesConfig(
    seeds=(1,),
    classes=20,
    scored=1_000,
    pretraining=Pretraining(width=16, epochs=12, batch=128),
    points=(0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0),
)
PRESETS = {"smoke": SMOKE, "quick": QUICK, "paper": ImagesConfig()}
