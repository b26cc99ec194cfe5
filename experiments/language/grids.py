"""The values that the search for settings of language modelling tries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from experiments.language.config import SoftmaxAdaptation


@dataclass(frozen=True)
class Grids:
    """Grids of the cache, of MbPA and of dynamic evaluation."""

    windows: tuple[int, ...] = (500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
    """Numbers of most recent tokens, for the cache and for MbPA."""
    cache_scales: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5)

    # The paper's grid for MbPA (appendix). Mixture weights are solved for instead.
    paper_windows: tuple[int, ...] = (500, 1000, 5000)
    paper_counts: tuple[int, ...] = (256, 512)
    paper_rates: tuple[float, ...] = (0.01, 0.1, 0.15, 0.2, 0.5, 1.0)
    paper_steps: tuple[int, ...] = (5, 10)
    """Numbers of steps besides one."""

    # Beyond the paper's grid.
    start: SoftmaxAdaptation = field(
        default_factory=lambda: SoftmaxAdaptation(lr=1.0, steps=20, k=128)
    )
    """The adaptation with which rates and steps are first compared."""
    one_step_rates: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
    rates: tuple[float, ...] = (0.04, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
    steps: tuple[int, ...] = (5, 10, 20, 40)
    counts: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    """Numbers of neighbours."""
    bandwidths: tuple[float, ...] = (0.35, 0.5, 0.7, 1.0, 1.5)
    """Bandwidths of the Gaussian kernel, relative to the mean distance of the nearest neighbour."""
    dot_factors: tuple[float, ...] = (0.05, 0.2)
    """Factors of the dot product in the kernel `exp_dot`."""
    rate_factors: tuple[float, ...] = (0.7, 1.0, 1.4)
    step_factors: tuple[float, ...] = (0.5, 1.0, 1.5, 2.5)
    """Factors of the best rate and of its steps, tried in all combinations."""
    decays: tuple[float, ...] = (0.01, 0.03, 0.1)
    optimum_count: int = 32
    """Number of neighbours when solving for the optimum."""
    priors: tuple[float, ...] = (0.03, 0.1, 0.3)

    rounds: int = 4
    """Maximum number of rounds in which all variations are tried; it ends with one without gain."""
    gate_pool: int = 16
    """Number of adaptations among which those of the gated mixture are chosen."""

    dynamic_rates: Mapping[float, tuple[float, ...]] = field(
        default_factory=lambda: {
            2e-6: (3e-6, 1e-5, 3e-5),
            2e-5: (1e-5, 3e-5, 6e-5, 1e-4),
            2e-4: (2e-5, 6e-5, 2e-4),
            2e-3: (2.5e-4, 5e-4, 1e-3),
        }
    )
    """Rates of dynamic evaluation, by the ε they are combined with."""
    dynamic_start_decay: float = 0.002
    """The pull back with which these rates are first compared."""
    dynamic_decays: tuple[float, ...] = (0.0, 0.0005, 0.001, 0.004, 0.01, 0.03)
    dynamic_rate_factors: tuple[float, ...] = (0.5, 0.7, 1.0, 1.4, 2.0)
    """Factors of the best rate, combined with those of the pull, of ε and with segment lengths."""
    dynamic_decay_factors: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0)
    dynamic_epsilon_factors: tuple[float, ...] = (0.3, 3.0)
    dynamic_segments: tuple[int, ...] = (2, 10, 20)
    adam_rates: tuple[float, ...] = (3e-6, 1e-5, 3e-5, 1e-4, 3e-4)
