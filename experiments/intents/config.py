"""Protocol and settings of the experiment on new intents, with its presets.

The settings of `PAPER` were chosen by `experiments tune new-intents --preset paper --adopt`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from experiments.intents.comparison import METHODS, PEERS
from experiments.intents.methods import (
    AutoStep,
    Local,
    LocalOnRetrained,
    LocalRows,
    Logistic,
    Means,
    Mixed,
    Optimum,
    Rows,
    Settings,
    Trained,
    Vote,
)
from experiments.intents.peers import Peer, SetFit
from experiments.intents.task import CORPORA, Size
from experiments.tuned_settings import tuned
from mbpa.encoders import text


@dataclass(frozen=True)
class IntentsConfig:
    """Two thirds of the intents are known; the others are taught with a few examples each."""

    seeds: tuple[int, ...] = (1, 2, 3, 4)
    """Random seeds, one random choice of known intents and of examples each; 0 is reserved for
    choosing settings.
    """
    part: Literal["test", "validation"] = "test"
    """Sentences to score."""
    corpora: tuple[str, ...] = tuple(CORPORA)
    shots: tuple[int, ...] = (1, 3, 5, 10)
    """Numbers of examples per new intent after which all methods are tested."""
    encoder: str = text.DEFAULT_ENCODER
    """Encoder from sentences to keys; see `mbpa.encoders.text`."""
    size: Size = field(default_factory=Size)
    head_epochs: int = 20
    """Epochs of Adam on the known intents, before anything new."""
    head_lr: float = 0.03
    finetuned: Trained = field(default_factory=lambda: Trained("new"))
    retrained: Trained = field(default_factory=Trained)
    logistic: Logistic = field(default_factory=lambda: Logistic(penalty=0.01))
    """Logistic regression. Of the penalties 1, 0.1 and 0.01, the best was 0.01 and, with balancing,
    1, at three examples of CLINC150 with the split and the sentences of the search; a full search
    would take longer than everything else.
    """
    balanced: Logistic = field(default_factory=lambda: Logistic(balanced=True))
    means: Means = field(default_factory=Means)
    vote: Vote = field(default_factory=Vote)
    mixture: Mixed = field(default_factory=Mixed)
    local: Local = field(default_factory=Local)
    auto_step: AutoStep = field(default_factory=AutoStep)
    optimum: Optimum = field(default_factory=Optimum)
    on_retrained: LocalOnRetrained = field(default_factory=LocalOnRetrained)
    rows: Rows = field(default_factory=Rows)
    local_rows: LocalRows = field(default_factory=LocalRows)
    peers: tuple[str, ...] = ()
    """Methods of other libraries to include: adaptive-classifier, semantic-router, SetFit. They
    need the extra `peers`.
    """
    setfit: SetFit = field(default_factory=SetFit)

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must name at least one, none of them twice, got {self.seeds}")
        if not self.corpora or not set(self.corpora) <= set(CORPORA):
            raise ValueError(f"corpora must be among {tuple(CORPORA)}, got {self.corpora}")
        rising = list(self.shots) == sorted(set(self.shots))
        if not self.shots or not rising or self.shots[0] < 1:
            raise ValueError(f"shots must be positive and rising, got {self.shots}")
        if not set(self.peers) <= set(PEERS) or len(set(self.peers)) < len(self.peers):
            raise ValueError(
                f"peers must be among {tuple(PEERS)}, none of them twice, got {self.peers}"
            )

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of all methods that take part."""
        return (*METHODS, *self.peers)

    def require(self) -> None:
        """Check that the libraries of the peers are installed, before anything else runs.

        Raises:
            MissingExtraError: one is not installed.
        """
        for method in self.peers:
            settings = self.settings(method)
            assert isinstance(settings, Peer)
            settings.require()

    def settings(self, method: str) -> Settings:
        """Return the settings of a method."""
        held = {**METHODS, **PEERS}[method].settings
        found: Settings = getattr(self, held) if isinstance(held, str) else held
        return found


SMOKE = IntentsConfig(
    seeds=(1,), shots=(1, 3), size=Size(intents=6, sentences=12, scored=5), head_epochs=40
)
PAPER = tuned(IntentsConfig(), "new-intents", "paper")
QUICK = replace(PAPER, seeds=(1,), shots=(1, 3), size=Size(sentences=40, scored=10))
WITH_PEERS = replace(PAPER, shots=(3,), peers=tuple(PEERS))
PRESETS = {"smoke": SMOKE, "quick": QUICK, "peers": WITH_PEERS, "paper": PAPER}
