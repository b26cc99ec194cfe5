"""Alternatives that people use: classifiers of other libraries, in the same comparison.

Each is used through its own interface, at its documented defaults, with the same sentence encoder;
limits that two cores require are settings. adaptive-classifier and SetFit receive sentences and
embed them, so that their times include embedding; the router receives the keys. Needs the extra
`peers`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy
import torch
from jaxtyping import Float, Int
from torch import Tensor

from experiments.intents.methods import Classifier, ClassifierSettings, Start
from experiments.intents.task import Sentences
from mbpa.encoders import text
from mbpa.errors import MissingExtraError


class Peer(ClassifierSettings):
    """Settings of another library's classifier."""

    module: ClassVar[str]
    """Name of the library's module."""
    starts_over: ClassVar[bool] = False
    """Whether each number of examples is taught to a new classifier, all examples at once."""

    def library(self) -> Any:
        """Import and return the library.

        Raises:
            MissingExtraError: it is not installed.
        """
        self.require()
        return importlib.import_module(self.module)

    def require(self) -> None:
        """Check that the library is installed, without spending seconds on importing it."""
        if importlib.util.find_spec(self.module) is None:
            raise MissingExtraError(self.module, extra="peers")


# adaptive-classifier: one prototype per class, and a small network trained on the stored examples


@dataclass(frozen=True)
class AdaptiveClassifier(Peer):
    """adaptive-classifier, run with PyTorch, since its ONNX export needs an older transformers.

    It answers better when all examples come in one call: with three of each new intent of CLINC150,
    6 points better than with one and then two.
    """

    module = "adaptive_classifier"
    starts_over = True

    def classifier(self, start: Start) -> Prototypes:
        return Prototypes(start, self.library())


class Prototypes(Classifier):
    """An `AdaptiveClassifier` that receives all known sentences at once, and new ones as they are
    taught.
    """

    def __init__(self, start: Start, library: Any) -> None:
        self._intents = start.intents
        self._device = start.known.keys.device
        numpy.random.seed(start.seed)  # it draws old examples with numpy's global generator
        self._model = library.AdaptiveClassifier(
            str(text.find_directory(start.encoder)),
            device=self._device.type,
            seed=start.seed,
            use_onnx=False,
        )
        self.learn(start.known)

    def learn(self, new: Sentences) -> None:
        self._model.add_examples(list(new.texts), [str(label) for label in new.labels.tolist()])

    def log_probs(self, queries: Sentences) -> Float[Tensor, "Q C"]:
        found = self._model.predict_batch(list(queries.texts), k=self._intents)
        return _log_shares(found, self._intents).to(self._device)


# semantic-router: the route with the nearest sentences


@dataclass(frozen=True)
class SemanticRouter(Peer):
    """semantic-router: one route per intent, scored by the mean cosine of its sentences among the
    nearest 5.

    A route's confidence is taken as the router reports it, although the routes need not sum to 1.
    There is no threshold: the area under the ROC curve covers all of them.
    """

    module = "semantic_router"

    def classifier(self, start: Start) -> Router:
        return Router(start, self.library())


class Router(Classifier):
    """An `IndexedRouter` whose encoder looks up keys."""

    def __init__(self, start: Start, library: Any) -> None:
        self._intents, self._device = start.intents, start.known.keys.device
        self._keys: dict[str, list[float]] = {}
        self._route = library.Route
        self._router = library.IndexedRouter(self._encoder())
        self.learn(start.known)

    def learn(self, new: Sentences) -> None:
        self._note(new)
        of: dict[int, list[str]] = {}
        for sentence, label in zip(new.texts, new.labels.tolist(), strict=True):
            of.setdefault(label, []).append(sentence)
        self._router.add(
            [self._route(name=str(label), utterances=texts) for label, texts in of.items()]
        )

    def log_probs(self, queries: Sentences) -> Float[Tensor, "Q C"]:
        self._note(queries)
        found = [
            [(route.name, route.confidence) for route in self._router(sentence, limit=None)]
            for sentence in queries.texts
        ]
        return _log_shares(found, self._intents).to(self._device)

    def _note(self, sentences: Sentences) -> None:
        self._keys |= zip(sentences.texts, sentences.keys.tolist(), strict=True)

    def _encoder(self) -> Any:
        def look_up(_: object, sentences: Sequence[str]) -> list[list[float]]:
            return [self._keys[sentence] for sentence in sentences]

        base = importlib.import_module("semantic_router.encoders").DenseEncoder
        return type("KeysAtHand", (base,), {"__call__": look_up})(name="keys at hand")


# SetFit: the encoder itself is fine-tuned with pairs of sentences, under a logistic regression


@dataclass(frozen=True)
class SetFit(Peer):
    """SetFit, fine-tuned from the same encoder whenever something is taught."""

    module = "setfit"

    examples: int = 8
    """Sentences of each known intent that are used, besides all new ones.
    The default is the number in SetFit's own introduction.
    """
    steps: int = 100
    """Training steps of 16 pairs; without a limit SetFit uses every pair, which takes hours."""
    balanced: bool = True
    """Whether every intent has the same weight in the logistic regression.
    Otherwise it prefers intents with more sentences, and three of a new intent are never enough.
    """

    def __post_init__(self) -> None:
        if min(self.examples, self.steps) < 1:
            raise ValueError(f"examples and steps must be at least 1, got {self}")

    def classifier(self, start: Start) -> FineTuned:
        return FineTuned(start, self, self.library())


class FineTuned(Classifier):
    """A `SetFitModel` that is fitted at the first query after learning."""

    def __init__(self, start: Start, settings: SetFit, library: Any) -> None:
        self._start, self._settings, self._library = start, settings, library
        labels = start.known.labels
        rows = [(labels == each).nonzero()[: settings.examples, 0] for each in range(start.old)]
        self._given = start.known.select(torch.cat(rows))
        self._model: Any = None

    def learn(self, new: Sentences) -> None:
        self._given += new
        self._model = None

    def log_probs(self, queries: Sentences) -> Float[Tensor, "Q C"]:
        with _quietly():
            if self._model is None:
                self._model = self._fit()
            shares = self._model.predict_proba(list(queries.texts), show_progress_bar=False)
        device = self._start.known.keys.device
        found = torch.full((len(queries), self._start.intents), -torch.inf, device=device)
        labels = torch.from_numpy(self._model.model_head.classes_)
        found[:, labels.to(device)] = shares.to(device, found.dtype).log()
        return found

    def _fit(self) -> Any:
        library, given = self._library, self._given
        of_transformers = importlib.import_module("transformers")
        device = given.keys.device.type
        model = library.SetFitModel.from_pretrained(
            str(text.find_directory(self._start.encoder)),
            device=device,
            head_params={"class_weight": "balanced" if self._settings.balanced else None},
        )
        texts, labels = list(given.texts), given.labels.tolist()
        dataset = importlib.import_module("datasets").Dataset
        with tempfile.TemporaryDirectory() as folder:
            arguments = library.TrainingArguments(
                output_dir=folder,
                max_steps=self._settings.steps,
                seed=self._start.seed,
                show_progress_bar=False,
                save_strategy="no",
                logging_strategy="no",
                logging_first_step=False,
                report_to="none",
            )
            trainer = library.Trainer(
                model=model,
                args=arguments,
                train_dataset=dataset.from_dict({"text": texts, "label": labels}),
            )
            trainer.remove_callback(of_transformers.ProgressCallback)
            trainer.train()
        return model


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress progress bars and warnings between libraries that nobody here can act on."""
    datasets = importlib.import_module("datasets")
    importlib.import_module("setfit").logging.set_verbosity_error()
    was_shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if was_shown:
            datasets.enable_progress_bars()


def _log_shares(found: list[list[tuple[str, float]]], intents: int) -> Float[Tensor, "Q C"]:
    """Convert pairs of label and share, in any order, to logarithms; other labels have share 0."""
    shares = torch.zeros(len(found), intents)
    for row, named in zip(shares, found, strict=True):
        labels: Int[Tensor, "N"] = torch.tensor([int(name) for name, _ in named], dtype=torch.int64)
        row[labels] = torch.tensor([share for _, share in named])
    return shares.clamp(min=0).log()
