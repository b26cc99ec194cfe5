"""Memory-based Parameter Adaptation: an episodic memory that adapts a network for each query."""

from mbpa import testing
from mbpa.adaptation import Engine
from mbpa.errors import CheckpointError, MissingExtraError
from mbpa.evaluation import leave_one_out
from mbpa.explanation import Explanation
from mbpa.kernels import Balanced, ExpDot, Gaussian, InverseDistance, Uniform

# Earlier names of the kernels, which still work.
from mbpa.kernels import exp_dot as exp_dot
from mbpa.kernels import gaussian as gaussian
from mbpa.kernels import inverse_distance as inverse_distance
from mbpa.kernels import uniform as uniform
from mbpa.memory import ExactMemory, GraphMemory, Memory, Neighbors, ShardedMemory
from mbpa.model import MbPA
from mbpa.modules.split import split
from mbpa.predictors import Adapted, Mixture, NeighborVote, Parametric, Predictor
from mbpa.rules import MAP, Adam, Gradient, RMSprop, Rule
from mbpa.stream import score_stream
from mbpa.tune import AdaptationGrid, Tuning, tune

__version__ = "0.2.0"

__all__ = [
    "MAP",
    "Adam",
    "AdaptationGrid",
    "Adapted",
    "Balanced",
    "CheckpointError",
    "Engine",
    "ExactMemory",
    "ExpDot",
    "Explanation",
    "Gaussian",
    "Gradient",
    "GraphMemory",
    "InverseDistance",
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
    "ShardedMemory",
    "Tuning",
    "Uniform",
    "leave_one_out",
    "score_stream",
    "split",
    "testing",
    "tune",
]
