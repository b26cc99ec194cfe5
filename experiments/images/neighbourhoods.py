"""Queries that only MbPA gets right: their neighbours, and the predictions before and after.

After figure 5, right, of the paper. A rule selects the queries to show: among those that the
adaptation gets right and every other method gets wrong, it takes the ones with the largest gain in
log-probability of the true class, one per class. Records name images by class and number and hold
no pixels, which belong to the data set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

import mbpa
from experiments import data
from experiments.experiment import BySeed, Context, run_each_seed
from experiments.images.config import ImagesConfig
from experiments.images.incremental import (
    Moment,
    describe_situation,
    draw_scored_rows,
    follow_stream,
    predict_in_slices,
    select_scored,
)
from experiments.images.methods import METHODS
from experiments.images.presets import PRESETS as IMAGES
from experiments.images.presets import copy_fields
from experiments.images.task import ImageTask, make_image_task, split_images
from experiments.measures import percent
from experiments.results import Record

TOP_CLASSES = 3  # classes per prediction


@dataclass(frozen=True)
class NeighbourhoodsConfig(ImagesConfig):
    """The settings of the comparison itself; the state after the last of the points is shown."""

    adapting: str = "MbPA (RMSprop)"
    """Name of the method whose successes are shown."""
    queries: int = 8
    """Maximum number of queries to show."""
    shown: int = 8
    """Number of nearest neighbours to show per query."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = [name for name, each in METHODS.items() if each.settings in ("rmsprop", "gradient")]
        if self.adapting not in known:
            raise ValueError(f"adapting must be one of {known}, got {self.adapting!r}")
        if min(self.queries, self.shown) < 1:
            raise ValueError(
                f"queries and shown must be at least 1, got {self.queries} and {self.shown}"
            )


PRESETS = {
    name: NeighbourhoodsConfig(**copy_fields(preset) | {"seeds": (1,), "points": (1.0,)})
    for name, preset in IMAGES.items()
}


def run(config: NeighbourhoodsConfig, context: Context) -> BySeed:
    """Run one split after the other, skipping those already completed."""

    def run_seed(seed: int) -> list[Record]:
        task = make_image_task(config, context, seed)
        *_, moment = follow_stream(task, config, seed)
        return Gallery(task, config, seed, moment, class_names(config, context)).records()

    return run_each_seed(config.seeds, context, run_seed)


def class_names(config: ImagesConfig, context: Context) -> tuple[str, ...]:
    """Return the names of all classes of the data set; for an ImageNet folder, their wnids."""
    if config.dataset == "imagenet":
        return data.imagenet(context.data_dir).wnids
    return data.tiny_imagenet(context.data_dir, size=config.size, classes=()).names


class Gallery:
    """The queries to show, with all their records."""

    def __init__(
        self,
        task: ImageTask,
        config: NeighbourhoodsConfig,
        seed: int,
        moment: Moment,
        names: tuple[str, ...],
    ) -> None:
        self.task, self.config, self.moment, self.names = task, config, moment, names
        self.queries, self.answers = select_scored(task, config)
        self.rows = draw_scored_rows(config, getattr(task, f"{config.part}_labels"))
        parts = "train", config.part
        self.numbers = {part: number_images(task, part) for part in parts}
        self.shared: Record = {"split": seed, "part": config.part, "epochs": moment.epochs}
        models = config.models(describe_situation(moment, task, config))
        model = models[config.adapting]
        assert isinstance(model, mbpa.MbPA), "else the config refuses it"
        self.model = model
        others = [name for name, model in models.items() if not model.predictor.keys_for]
        self.compared = [*others, config.adapting]
        wanted = {name: models[name] for name in self.compared}
        said = [found for _, found in predict_in_slices(wanted, self.queries)]
        self.log_probs = {name: torch.cat([part[name] for part in said]) for name in wanted}

    def records(self) -> list[Record]:
        """Return how often only the adaptation is right or wrong, and the records of the chosen
        queries.
        """
        mine, others = self.config.adapting, self.compared[:-1]
        right = {name: said.argmax(1) == self.answers for name, said in self.log_probs.items()}
        none = torch.stack([~right[name] for name in others]).all(0)
        every = torch.stack([right[name] for name in others]).all(0)
        alone, lost = right[mine] & none, ~right[mine] & every
        found: list[Record] = [
            {"method": mine, **self.shared, "name": name, "value": percent(which)}
            for name, which in (("right_alone", alone), ("wrong_alone", lost))
        ]
        truth = self.answers[:, None]
        before, after = (self.log_probs[name].gather(1, truth) for name in ("parametric", mine))
        gains = (after - before)[:, 0]
        for place, query in enumerate(
            choose_queries(gains, self.answers, alone, self.config.queries)
        ):
            shared: Record = {"method": mine, **self.shared, "query": place}
            picture = self._picture(self.config.part, int(self.rows[query]))
            found.append({**shared, **picture, "name": "gain", "value": float(gains[query])})
            found += self._probabilities(query, place)
            found += self._neighbours(query, shared)
        return found

    def _probabilities(self, query: int, place: int) -> Iterator[Record]:
        """Yield each method's probability of the true class and of the top classes before and
        after.
        """
        said = {name: log_probs[query] for name, log_probs in self.log_probs.items()}
        firsts = [
            said[name].topk(TOP_CLASSES).indices for name in ("parametric", self.config.adapting)
        ]
        labels = dict.fromkeys([int(self.answers[query]), *torch.cat(firsts).tolist()])
        for name, log_probs in said.items():
            for label in labels:
                told = self._class(label)
                value = float(log_probs[label].exp())
                shared: Record = {"method": name, **self.shared, "query": place}
                yield {**shared, **told, "name": "probability", "value": value}

    def _neighbours(self, query: int, shared: Record) -> Iterator[Record]:
        """Yield the number of classes among all neighbours, and the nearest neighbours with their
        weights.
        """
        explanation = self.model.explain(keys=self.queries[query : query + 1])
        neighbors, weights = explanation.neighbors, explanation.weights
        assert neighbors is not None
        assert weights is not None
        rows = self.moment.rows_of(neighbors.ids[0])
        classes = len(self.task.train_labels[rows].unique())
        yield {**shared, "neighbours": len(rows), "name": "classes_near", "value": classes}
        for place, row in enumerate(rows[: self.config.shown].tolist()):
            picture = self._picture("train", row)
            weight = float(weights[0, place])
            yield {**shared, "neighbour": place, **picture, "name": "weight", "value": weight}

    def _picture(self, part: str, row: int) -> Record:
        """Return how records name an image: its class, and its number within the class in the data
        set.
        """
        label = int(getattr(self.task, f"{part}_labels")[row])
        return {**self._class(label), "image": int(self.numbers[part][row])}

    def _class(self, label: int) -> Record:
        number = int(self.task.classes[label])
        is_new = int(label >= self.task.old)
        return {"class": number, "label": self.names[number].split(",")[0], "is_new": is_new}


def choose_queries(
    gains: Float[Tensor, "Q"], answers: Int[Tensor, "Q"], eligible: Bool[Tensor, "Q"], count: int
) -> list[int]:
    """Return the eligible queries with the largest gains, one per class."""
    found: dict[int, int] = {}
    gained, labels = gains.argsort(descending=True, stable=True), answers.tolist()
    for query in gained[eligible[gained]].tolist():
        found.setdefault(labels[query], query)
    return list(found.values())[:count]


def number_images(task: ImageTask, part: str) -> Int[Tensor, "N"]:
    """Return the number of each image of a part within its class, as the data set counts."""
    classes, order = task.classes.cpu().sort()
    parts = ("train", "validation", "rehearsal") if part in ("train", "validation") else ("test",)
    found = [getattr(task, f"{name}_labels") for name in parts]
    labelled = torch.cat([each for each in found if each is not None]).cpu()
    counts = labelled.bincount(minlength=len(classes))[order]
    labels = classes.repeat_interleave(counts)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    within = torch.arange(len(labels)) - first
    if part == "test":
        return within
    spared = len(task.validation_labels) // len(classes)  # per class
    aside = 0 if task.rehearsal_labels is None else len(task.rehearsal_labels) // task.old
    kept, held, _ = split_images(labels, task.classes[: task.old].cpu(), spared, aside)
    return within[kept if part == "train" else held]
