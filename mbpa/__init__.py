"""Memory-based Parameter Adaptation: an episodic memory that adapts a network for each query."""

from mbpa import testing
from mbpa.adaptation import Engine
from mbpa.errors import CheckpointError, MissingExtraError
from mbpa.explanation import Explanation
from mbpa.kernels import exp_dot, gaussian, inverse_distance, uniform
from mbpa.memory import ExactMemory, Memory, Neighbors
from mbpa.model import MbPA
from mbpa.modules.split import split
from mbpa.predictors import Adapted, Mixture, NeighborVote, Parametric, Predictor
from mbpa.rules import MAP, Adam, Gradient, RMSprop, Rule
from mbpa.stream import score_stream
from mbpa.tune import Tuning, leave_one_out, tune

__version__ = "0.1.0"

__all__ = [
    "MAP",
    "Adam",
    "Adapted",
    "CheckpointError",
    "Engine",
    "ExactMemory",
    "Explanation",
    "Gradient",
    "MbPA",
    "Memory",
    "MissingExtraError",
    "Mixture",
    "NeighborVote",
    "Neighbors",
    "Parametric",
    "Predictor",
    "RMSprop",
    "Rule",
    "Tuning",
    "exp_dot",
    "gaussian",
    "inverse_distance",
    "leave_one_out",
    "score_stream",
    "split",
    "testing",
    "tune",
    "uniform",
]
