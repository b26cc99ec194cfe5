"""Protocol and settings of the experiment on new intents, with its presets.

The settings of `PAPER` were chosen by `experiments tune new-intents --preset paper --adopt`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from experiments.config_checks import check_rising, check_seeds
from experiments.intents.comparison import METHODS, PEERS
from experiments.intents.methods import (
    AdaptationOnRetrained,
    AdaptedMeanRows,
    AutoStepAdaptation,
    ClassMeans,
    GradientAdaptation,
    HeadTraining,
    IntentMethodSettings,
    LogisticRegression,
    MeanRows,
    OptimalAdaptation,
)
from experiments.intents.peers import Peer, SetFit
from experiments.intents.task import CORPORA, Size
from experiments.methods import Vote, VoteMixture
from experiments.tuned_settings import apply_tuned_settings
from mbpa.encoders import text


@dataclass(frozen=True)
class IntentsConfig:
    """Two thirds of the intents are known; the others are taught with a few examples each."""

    seeds: tuple[int, ...] = (1, 2, 3, 4)
    """Random seeds, one random choice of known intents and of examples each.
    Seed 0 is reserved for choosing settings.
    """
    part: Literal["test", "validation"] = "test"
    """Sentences to score: the published test sentences, or those for choosing settings."""
    corpora: tuple[str, ...] = tuple(CORPORA)
    """Corpora to run on: clinc150, banking77."""
    shots: tuple[int, ...] = (1, 3, 5, 10)
    """Numbers of examples per new intent after which all methods are tested."""
    encoder: str = text.DEFAULT_ENCODER
    """Encoder from sentences to keys; see `mbpa.encoders.text`."""
    size: Size = field(default_factory=Size)
    head_epochs: int = 20
    """Epochs of Adam on the known intents, before anything new."""
    head_lr: float = 0.03
    """Learning rate of this training."""
    finetuned: HeadTraining = field(default_factory=lambda: HeadTraining("new"))
    retrained: HeadTraining = field(default_factory=HeadTraining)
    logistic: LogisticRegression = field(default_factory=lambda: LogisticRegression(penalty=0.01))
    """Logistic regression on all examples, fit to the optimum whenever something is taught.
    The penalty was chosen from 1, 0.1 and 0.01: 0.01 was best and, with balancing, 1.
    They were compared on CLINC150 with three examples, on the split and sentences of the search.
    """
    balanced: LogisticRegression = field(default_factory=lambda: LogisticRegression(balanced=True))
    means: ClassMeans = field(default_factory=ClassMeans)
    vote: Vote = field(default_factory=Vote)
    mixture: VoteMixture = field(default_factory=VoteMixture)
    local: GradientAdaptation = field(default_factory=GradientAdaptation)
    auto_step: AutoStepAdaptation = field(default_factory=AutoStepAdaptation)
    optimum: OptimalAdaptation = field(default_factory=OptimalAdaptation)
    on_retrained: AdaptationOnRetrained = field(default_factory=AdaptationOnRetrained)
    rows: MeanRows = field(default_factory=MeanRows)
    local_rows: AdaptedMeanRows = field(default_factory=AdaptedMeanRows)
    peers: tuple[str, ...] = ()
    """Methods of other libraries to include: adaptive-classifier, semantic-router, SetFit.
    They need the extra `peers`.
    """
    setfit: SetFit = field(default_factory=SetFit)

    def __post_init__(self) -> None:
        check_seeds(self.seeds)
        if not self.corpora or not set(self.corpora) <= set(CORPORA):
            raise ValueError(f"corpora must be among {tuple(CORPORA)}, got {self.corpora}")
        check_rising("shots", self.shots)
        if not set(self.peers) <= set(PEERS) or len(set(self.peers)) < len(self.peers):
            raise ValueError(
                f"peers must be among {tuple(PEERS)}, without duplicates, got {self.peers}"
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

    def settings(self, method: str) -> IntentMethodSettings:
        """Return the settings of a method."""
        listed = {**METHODS, **PEERS}[method]
        if listed.fixed is not None:
            return listed.fixed
        found: IntentMethodSettings = getattr(self, listed.settings)
        return found


SMOKE = IntentsConfig(
    seeds=(1,), shots=(1, 3), size=Size(intents=9, sentences=12, scored=5), head_epochs=40
)
PAPER = apply_tuned_settings(IntentsConfig(), "new-intents", "paper")
QUICK = replace(PAPER, seeds=(1,), shots=(1, 3), size=Size(sentences=40, scored=10))
WITH_PEERS = replace(PAPER, seeds=(41, 42, 43, 44), peers=tuple(PEERS))
PRESETS = {"smoke": SMOKE, "quick": QUICK, "peers": WITH_PEERS, "paper": PAPER}
