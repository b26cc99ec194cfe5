"""Closed-form classifiers over frozen keys from continual learning, as baselines.

Both follow the published methods in what decides, with one covariance or Gram matrix over all
examples, and are computed anew whenever something is taught.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from experiments.intents.methods import Classifier, ClassifierSettings, Start
from experiments.intents.task import Sentences


@dataclass(frozen=True)
class RandomProjection(ClassifierSettings):
    """RanPAC (McDonnell et al., NeurIPS 2023): ridge regression on ReLUs of a random projection."""

    features: int = 2000
    """Number of random features; the paper has 10,000."""
    ridge: float = 1.0
    """Penalty on the weights, relative to a sum over sentences."""
    sharpness: float = 10.0
    """Factor that turns the regression's outputs into logits."""

    def __post_init__(self) -> None:
        if self.features < 1 or min(self.ridge, self.sharpness) <= 0:
            raise ValueError(f"features, ridge and sharpness must be positive, got {self}")

    def classifier(self, start: Start) -> ProjectedRegression:
        return ProjectedRegression(start, self)


class ProjectedRegression(Classifier):
    """The Gram matrix of the features and their sums per intent, which new sentences add to."""

    def __init__(self, start: Start, settings: RandomProjection) -> None:
        self._settings = settings
        keys = start.known.keys
        draws = torch.Generator().manual_seed(start.seed)
        projection = torch.randn(keys.shape[1], settings.features, generator=draws)
        self._projection = projection.to(keys.device)
        self._gram = settings.ridge * torch.eye(settings.features, device=keys.device)
        self._sums = keys.new_zeros(start.intents, settings.features)
        self.learn(start.known)

    def learn(self, new: Sentences) -> None:
        features = self._compute_features(new.keys)
        self._gram = self._gram + features.mT @ features
        self._sums = self._sums.index_add(0, new.labels, features)
        factor = torch.linalg.cholesky(self._gram)
        self._weights = torch.cholesky_solve(self._sums.mT, factor)

    def log_probs(self, queries: Sentences) -> Float[Tensor, "Q C"]:
        outputs = self._settings.sharpness * self._compute_features(queries.keys) @ self._weights
        is_known = self._sums.any(1)
        return outputs.masked_fill(~is_known, -torch.inf).log_softmax(1)

    def _compute_features(self, keys: Float[Tensor, "N D"]) -> Float[Tensor, "N F"]:
        return functional.relu(keys @ self._projection)


@dataclass(frozen=True)
class MahalanobisMeans(ClassifierSettings):
    """FeCAM (Goswami et al., NeurIPS 2023) with a common covariance, as it is for few examples:
    the nearest mean by Mahalanobis distance, the covariance within intents being shrunk.
    """

    shrinkage: float = 3.0
    """Amount added to the diagonal, in units of its mean."""
    sharpness: float = 0.1
    """Factor that turns squared distances into logits."""

    def __post_init__(self) -> None:
        if min(self.shrinkage, self.sharpness) <= 0:
            raise ValueError(f"shrinkage and sharpness must be positive, got {self}")

    def classifier(self, start: Start) -> CommonCovariance:
        return CommonCovariance(start, self)


class CommonCovariance(Classifier):
    """Means of all intents, and one covariance within them."""

    def __init__(self, start: Start, settings: MahalanobisMeans) -> None:
        self._settings, self._intents = settings, start.intents
        self._given = start.known.select(torch.arange(0))
        self.learn(start.known)

    def learn(self, new: Sentences) -> None:
        self._given = self._given + new
        keys, labels = self._given.keys, self._given.labels
        counts = torch.bincount(labels, minlength=self._intents)
        sums = keys.new_zeros(self._intents, keys.shape[1]).index_add_(0, labels, keys)
        means = sums / counts.clamp_min(1)[:, None]
        away = keys - means[labels]
        covariance = away.mT @ away / len(keys)
        ridge = self._settings.shrinkage * covariance.diagonal().mean()
        covariance = covariance + ridge * torch.eye(len(covariance), device=keys.device)
        self._whitening = torch.linalg.inv(torch.linalg.cholesky(covariance)).mT
        self._means, self._is_known = means @ self._whitening, counts > 0

    def log_probs(self, queries: Sentences) -> Float[Tensor, "Q C"]:
        distances = torch.cdist(queries.keys @ self._whitening, self._means).square()
        outputs = -self._settings.sharpness * distances
        return outputs.masked_fill(~self._is_known, -torch.inf).log_softmax(1)
