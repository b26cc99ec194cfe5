"""Protocol of the experiment on the few-shot learner, with its presets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from experiments.config_checks import check_rising, check_seeds
from experiments.intents.comparison import METHODS
from experiments.intents.task import Size
from experiments.teaching.situations import SITUATIONS

COMPARED = (
    "parametric",
    "logistic regression (balanced)",
    "nearest class mean",
    "RanPAC",
    "FeCAM",
    "MbPA (rows)",
    "MbPA (taught)",
    "MbPA (taught, free)",
)


@dataclass(frozen=True)
class TeachingConfig:
    """Every method keeps the settings of the experiment on new intents."""

    seeds: tuple[int, ...] = (31, 32, 33, 34)
    """Random seeds, one random choice of the labels' roles and of the examples each.
    None of them was used while methods were developed.
    """
    situations: tuple[str, ...] = tuple(SITUATIONS)
    """Situations to run; those with `wordllama` in their names need the extra `peers`."""
    methods: tuple[str, ...] = COMPARED
    """Methods to compare, by their names in the experiment on new intents."""
    shots: tuple[int, ...] = (1, 3, 5, 10)
    """Numbers of examples per new label after which all methods are tested."""
    lessons: tuple[int, ...] = (1, 10, 20, 30, 40, 50)
    """Numbers of labels after which all methods are tested, if labels come one after another."""
    lesson_examples: int = 3
    """Examples of each of these labels."""
    size: Size = field(default_factory=Size)

    def __post_init__(self) -> None:
        check_seeds(self.seeds)
        check_rising("shots", self.shots)
        check_rising("lessons", self.lessons)
        if self.lesson_examples < 1:
            raise ValueError(f"lesson_examples must be at least 1, got {self.lesson_examples}")
        for name, values, known in (
            ("situations", self.situations, SITUATIONS),
            ("methods", self.methods, METHODS),
        ):
            if not values or not set(values) <= set(known) or len(set(values)) < len(values):
                raise ValueError(
                    f"{name} must be among {tuple(known)}, without duplicates, got {values}"
                )


SMOKE = TeachingConfig(
    seeds=(31,),
    situations=("clinc150", "clinc150-domains"),
    methods=("parametric", "nearest class mean", "MbPA (taught)"),
    shots=(1, 3),
    lessons=(1, 3),
    size=Size(intents=30, sentences=12, scored=3),
)
SENTENCES = TeachingConfig(
    seeds=(31, 32),
    situations=(
        "clinc150",
        "banking77",
        "clinc150-domains",
        "banking77-to-clinc150",
        "clinc150-noisy",
        "banking77-noisy",
    ),
    size=Size(sentences=40, scored=10),
)
QUICK = replace(SENTENCES, seeds=(31,), shots=(1, 3), lessons=(1, 25, 50))
PAPER = TeachingConfig()
PRESETS = {"smoke": SMOKE, "quick": QUICK, "sentences": SENTENCES, "paper": PAPER}
