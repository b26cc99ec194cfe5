"""Classifiers that learn new labels from a few examples, in closed form, and forget them exactly.

`fit_learner` prepares a `Learner` from the labels that are known at the start. A
`TaughtClassifier` then adds, forgets and relabels examples. Nothing is trained after the start.
"""

from mbpa.teaching.classifier import (
    Prediction,
    SimilarExample,
    TaughtClassifier,
    TaughtExplanation,
)
from mbpa.teaching.learner import Learner, fit_learner

__all__ = [
    "Learner",
    "Prediction",
    "SimilarExample",
    "TaughtClassifier",
    "TaughtExplanation",
    "fit_learner",
]
