"""From labelled texts or pictures to a run: embed, train a head, fit a learner, write.

The learner is fitted by rehearsal: heads are trained without a third of the labels, which are then
taught with a few examples each (`mbpa.teaching`). The rehearsals also set the threshold: the
confidence above which answers are more often right than wrong. Held-out examples measure the
accuracy.

With too few labels or examples for that, the head adapts to the nearest examples instead. Settings
are then rehearsed if possible (`selection`), and the held-out examples set the threshold.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from tqdm import tqdm

import mbpa
from mbpa.encoders.base import Encoder, embed_items
from mbpa.memory import MemoryKind
from mbpa.modules.new_rows import NewRows, even_scale, label_sums, require_unit_norm
from mbpa.predictors import in_short
from mbpa.serve.journal import Journal
from mbpa.serve.labelled_images import LabelledImages
from mbpa.serve.labelled_texts import LabelledTexts
from mbpa.serve.run_directory import replace_directory, reporting_errors
from mbpa.serve.run_info import JOURNAL_FILE, Model, RunInfo, encode_key, write_run
from mbpa.serve.selection import EXAMPLES_PER_NEW_LABEL, Choice, rehearse
from mbpa.serve.taught_model import TaughtModel
from mbpa.serve.training import Training, choose_held_out, train_head
from mbpa.teaching import Learner, fit_learner
from mbpa.teaching.combination import MAX_LOST_POINTS, find_break_even
from mbpa.teaching.learner import MIN_LABELS, REHEARSALS

MIN_THRESHOLD_EXAMPLES = 20  # held-out examples needed to choose a threshold
# The predictor if nothing can be rehearsed.
DEFAULT_PREDICTOR = mbpa.Adapted(mbpa.Gradient(steps=20), k=20, kernel=mbpa.InverseDistance())


@dataclass(frozen=True)
class NewRun:
    """The result of `teach`."""

    info: RunInfo
    model: Model
    keys: Float[Tensor, "N D"]
    lesson_keys: Float[Tensor, "L D"] | None = None
    """Keys of the lessons of the data, if it has any."""


@dataclass(frozen=True)
class Fitted:
    """A head and settings that were chosen for keys and their labels."""

    labels: tuple[str, ...]
    """Labels in the order of the head's rows."""
    model: Model
    threshold: float
    summary: dict[str, Any]


def fit(
    keys: Float[Tensor, "N D"],
    named: Sequence[str],
    *,
    training: Training | None = None,
    max_lost_points: float | None = MAX_LOST_POINTS,
    max_answered_out_of_scope: float | None = None,
    progress: bool = False,
) -> Fitted:
    """Train a head, and fit a learner or choose how the head adapts.

    Args:
        keys: one key of unit norm per example.
        named: the label of each example.
        training: how to train the head.
        max_lost_points: see `TaughtClassifier`; used to measure the accuracy.
        max_answered_out_of_scope: share of the queries that belong to no label which may be
            answered; by default answers must be more often right than wrong.
        progress: show progress bars on stderr.

    Raises:
        ValueError: a key does not have unit norm, or there are too few labels or examples to find
            out what share is answered.
    """
    training = training or Training()
    require_unit_norm(keys)
    names = tuple(dict.fromkeys(named))  # not sorted: names must not matter for what is drawn
    places = {name: place for place, name in enumerate(names)}
    labels = torch.tensor([places[label] for label in named])
    generator = torch.Generator().manual_seed(training.seed)
    held = choose_held_out(labels, generator)
    head = train_head(keys[~held], labels[~held], len(names), training, (keys[held], labels[held]))
    split = _Split(keys, labels, held)
    learner = _fit_learner(head, split, training, progress)
    if learner is None:
        if max_answered_out_of_scope is not None:
            raise ValueError(
                f"to limit what is answered out of scope, there must be at least {MIN_LABELS} "
                "labels with several examples each"
            )
        choice = rehearse(keys, labels, training, generator, progress)
        predictor = DEFAULT_PREDICTOR if choice is None else choice.predictor
        rows = _make_rows(head, keys, labels, choice)
        logs = _adapt_held_out(head, predictor, split)
        threshold = _choose_threshold(logs, labels[held])
        summary = _summarize_accuracy(head, split, logs, threshold) | _summarize_choice(choice)
        return Fitted(names, Model(head, predictor, rows), threshold, summary)
    logs = _ask_learner(learner, names, split, max_lost_points)
    threshold = float(learner.combination.break_even)
    if max_answered_out_of_scope is not None:
        threshold = learner.combination.find_threshold(max_answered_out_of_scope)
    summary = _summarize_accuracy(head, split, logs, threshold)
    summary |= _summarize_rehearsals(learner, is_limited=max_lost_points is not None)
    return Fitted(names, Model(head, learner), threshold, summary)


def teach(
    data: LabelledTexts | LabelledImages,
    encoder: Encoder[Any],
    *,
    cache: Path | None = None,
    training: Training | None = None,
    max_lost_points: float | None = MAX_LOST_POINTS,
    max_answered_out_of_scope: float | None = None,
    memory: MemoryKind = "exact",
    progress: bool = False,
) -> NewRun:
    """Embed the data, train a head and fit the rest.

    Args:
        data: labelled texts or pictures, from `mbpa.serve.labelled_texts.read_labelled_texts` or
            `mbpa.serve.labelled_images.read_labelled_images`.
        encoder: turns them into keys with norm 1.
        cache: a folder for embeddings, from which an interrupted run can continue.
        training: how to train the head.
        max_lost_points: how many points of accuracy on trained labels new labels may cost; `None`
            sets no limit.
        max_answered_out_of_scope: see `fit`.
        memory: kind of memory with which the run is served, if it adapts its head.
        progress: show progress bars on stderr.

    Raises:
        ValueError: the encoder takes another kind of items, or returns keys without unit norm.
    """
    if encoder.takes != data.takes:
        raise ValueError(f"the encoder {encoder.name} takes {encoder.takes}, not {data.takes}")
    with tqdm(
        total=len(data.items), desc="embedding", file=sys.stderr, disable=not progress
    ) as bar:
        keys = embed_items(encoder, data.items, cache, bar.update)
    lesson_items: list[Any] = [item for item, _ in data.lessons]
    lesson_keys = embed_items(encoder, lesson_items, cache) if lesson_items else None
    found = fit(
        keys,
        data.labels,
        training=training,
        max_lost_points=max_lost_points,
        max_answered_out_of_scope=max_answered_out_of_scope,
        progress=progress,
    )
    counts = {"rows": data.rows, "duplicates": data.duplicates, "labels": len(found.labels)}
    info = RunInfo(
        key_dim=encoder.key_dim,
        labels=found.labels,
        trained_examples=len(keys),
        threshold=found.threshold,
        encoder=encoder.name,
        fingerprint=encoder.fingerprint,
        summary=found.summary | counts,
        takes=encoder.takes,
        max_lost_points=max_lost_points,
        max_answered_out_of_scope=max_answered_out_of_scope,
        memory=memory,
    )
    return NewRun(info, found.model, keys, lesson_keys)


def write_new_run(
    taught: NewRun, data: LabelledTexts | LabelledImages, out: Path, *, replace: bool = False
) -> None:
    """Write a run directory atomically: it appears as a whole or not at all."""
    items: Sequence[str | bytes] = data.items
    model = taught.model
    with reporting_errors(out), replace_directory(out, replace=replace) as directory:
        examples = zip(data.labels, items, strict=True)
        write_run(
            directory, taught.info, model.head, model.method, examples, taught.keys, model.rows
        )
        if taught.lesson_keys is not None:
            given: Sequence[tuple[str | bytes, str]] = data.lessons
            lessons = zip(given, taught.lesson_keys, strict=True)
            with Journal(directory / JOURNAL_FILE) as journal:
                journal.learn([(label, item, encode_key(key)) for (item, label), key in lessons])


class _Split(NamedTuple):
    """Examples, some of which are held out."""

    keys: Float[Tensor, "N D"]
    labels: Int[Tensor, "N"]
    held: Bool[Tensor, "N"]


def _fit_learner(
    head: nn.Linear, split: _Split, training: Training, progress: bool
) -> Learner | None:
    def train(keys: Tensor, labels: Tensor, classes: int) -> nn.Linear:
        held = choose_held_out(labels, torch.Generator().manual_seed(training.seed))
        return train_head(keys[~held], labels[~held], classes, training, (keys[held], labels[held]))

    keys, labels = split.keys[~split.held], split.labels[~split.held]
    with tqdm(
        total=REHEARSALS + 1, desc="fitting the learner", file=sys.stderr, disable=not progress
    ) as bar:
        return fit_learner(keys, labels, head, train, seed=training.seed, tick=bar.update)


def _ask_learner(
    learner: Learner, names: Sequence[str], split: _Split, max_lost_points: float | None
) -> Float[Tensor, "H C"]:
    """Return the answers to the held-out examples from all others."""
    model = TaughtModel(learner, names, max_lost_points, "cpu")
    known = (~split.held).nonzero()[:, 0].tolist()
    named = [(names[label], None) for label in split.labels[known].tolist()]
    model.add(known, named, split.keys[known], known)
    return model(split.keys[split.held]).logs


def _adapt_held_out(
    head: nn.Linear, predictor: mbpa.Predictor, split: _Split
) -> Float[Tensor, "H C"]:
    """Return the answers to the held-out examples, with a memory of all others."""
    keys, labels, held = split
    memory = mbpa.ExactMemory(int((~held).sum()), keys.shape[1])
    model = mbpa.MbPA(head=head, memory=memory, predictor=predictor)
    model.write(keys=keys[~held], values=labels[~held])
    return model(keys=keys[held])


def _make_rows(
    head: nn.Linear, keys: Float[Tensor, "N D"], labels: Int[Tensor, "N"], choice: Choice | None
) -> NewRows | None:
    if choice is None:
        return None
    sums = label_sums(keys, labels, head.out_features)
    scale = choice.reach * even_scale(head.weight, sums)
    return NewRows.around(head.weight, head.bias, sums, scale=scale, offset=choice.offset)


def _summarize_choice(choice: Choice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    return {"rehearsed_new": choice.score.new, "rehearsed_old": choice.score.old}


def _summarize_rehearsals(learner: Learner, *, is_limited: bool) -> dict[str, Any]:
    combination = learner.combination
    column = combination.margin_counts.tolist().index(EXAMPLES_PER_NEW_LABEL)
    new, old = combination.rehearsed[0 if is_limited else 1, column].tolist()
    return {"rehearsed_new": new, "rehearsed_old": old}


def _choose_threshold(logs: Float[Tensor, "H C"], labels: Int[Tensor, "H"]) -> float:
    if len(labels) < MIN_THRESHOLD_EXAMPLES:
        return 0.0
    return find_break_even(logs.exp().amax(1), logs.argmax(1) == labels)


def _summarize_accuracy(
    head: nn.Linear, split: _Split, logs: Float[Tensor, "H C"], threshold: float
) -> dict[str, Any]:
    """Return the accuracy on held-out examples, given log-probabilities of their labels."""
    keys, labels = split.keys[split.held], split.labels[split.held]
    summary: dict[str, Any] = {"examples": len(split.keys), "held_out": len(keys)}
    if not len(keys):
        return summary
    right = logs.argmax(1) == labels
    answered = logs.exp().amax(1) >= threshold
    return summary | {
        "accuracy": float(right.double().mean()),
        "accuracy_of_the_head_alone": float((head(keys).argmax(1) == labels).double().mean()),
        "answered": float(answered.double().mean()),
        "accuracy_of_answers": float(right[answered].double().mean()) if answered.any() else None,
    }


def _describe_left_out(data: LabelledTexts | LabelledImages) -> list[tuple[str, str]]:
    """Return report lines on data that was left out, and on contradictions in the rest."""
    row, item = ("picture", "picture") if isinstance(data, LabelledImages) else ("row", "text")
    strays = data.strays if isinstance(data, LabelledImages) else 0
    counts = [
        (data.duplicates, f"duplicate {row}", f"duplicate {row}s"),
        (strays, "file that is not a picture of a label", "files that are not pictures of a label"),
    ]
    described = [_format_count(*each) for each in counts if each[0]]
    lines = list(zip(["left out", ""], described, strict=False))
    if data.contradictions:
        forms = f"{item} has several labels", f"{item}s have several labels"
        lines.append(("note", _format_count(data.contradictions, *forms)))
    return lines


def _format_count(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"


def report(taught: NewRun, data: LabelledTexts | LabelledImages) -> str:
    """Return a summary of the result in a few lines."""
    summary, method, rows = taught.info.summary or {}, taught.model.method, taught.model.rows
    lines = [
        ("examples", f"{len(data.items)} of {summary['labels']} labels"),
        *_describe_left_out(data),
    ]
    if data.lessons:
        lines.append(("taught", f"{len(data.lessons)} more, as the exported run was"))
    if "accuracy" in summary:
        alone, answers = summary["accuracy_of_the_head_alone"], summary["accuracy_of_answers"]
        lines += [
            ("held out", f"{summary['held_out']} examples"),
            ("accuracy", f"{summary['accuracy']:.1%} (the head alone {alone:.1%})"),
            ("threshold", f"{taught.info.threshold:.2f}: {summary['answered']:.1%} are answered"),
            ("", f"of these, {answers:.1%} are right" if answers is not None else ""),
            ("", "it never abstains, which is best for the held-out examples")
            if not taught.info.threshold
            else ("", ""),
        ]
    else:
        lines.append(("held out", "none: there are too few examples, so it never abstains"))
    if "rehearsed_new" in summary:
        new, old = summary["rehearsed_new"], summary["rehearsed_old"]
        lines.append(
            (
                "new labels",
                f"{new:.1%} right from {EXAMPLES_PER_NEW_LABEL} examples each, others {old:.1%}",
            )
        )
    if isinstance(method, Learner):
        limit = taught.info.max_lost_points
        points = "point" if limit == 1 else "points"
        cost = "any number of points" if limit is None else f"about {limit:g} {points}"
        lines.append(("", f"which may cost the others {cost}: --max-lost-points"))
    if isinstance(method, mbpa.Adapted):
        lines += [
            ("adapts by", in_short(method.rule)),
            ("", f"k={method.k}, {in_short(method.kernel)}"),
        ]
    if rows is not None:
        lines.append(("new rows", f"scale {rows.scale:.1f}, offset {rows.offset:.1f}"))
    return "\n".join(f"{name:10} {value}" for name, value in lines if value)
