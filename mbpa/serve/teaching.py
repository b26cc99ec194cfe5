"""From labelled texts or pictures to a run: embed, train a head, fill the memory, tune, write.

The settings for adaptation and for rows of new labels are chosen by rehearsal: a head is trained
without a third of the labels, which are then taught with three examples each (`selection`).
Held-out examples of all labels then measure the accuracy, and set the threshold: the confidence
above which answers are more often right than wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from tqdm import tqdm

import mbpa
from mbpa.encoders.base import Encoder, embed_items
from mbpa.modules.new_rows import NewRows, even_scale, label_sums, require_unit_norm
from mbpa.predictors import in_short
from mbpa.serve.journal import Journal
from mbpa.serve.labelled_images import LabelledImages
from mbpa.serve.labelled_texts import LabelledTexts
from mbpa.serve.run_directory import replace_directory, reporting_errors
from mbpa.serve.run_info import JOURNAL_FILE, RunInfo, encode_key, write_run
from mbpa.serve.selection import EXAMPLES_PER_NEW_LABEL, Choice, rehearse
from mbpa.serve.training import Training, choose_held_out, train_head

MIN_THRESHOLD_EXAMPLES = 20  # held-out examples needed to choose a threshold
DEFAULT_PREDICTOR = mbpa.Adapted(mbpa.Gradient(steps=20), k=20)  # if nothing can be rehearsed


@dataclass(frozen=True)
class NewRun:
    """The result of `teach`."""

    info: RunInfo
    head: nn.Linear
    predictor: mbpa.Predictor
    keys: Float[Tensor, "N D"]
    rows: NewRows | None = None
    """How to make rows of the head for new labels; `None`: they start from zero."""
    lesson_keys: Float[Tensor, "L D"] | None = None
    """Keys of the lessons of the data, if it has any."""


@dataclass(frozen=True)
class Fitted:
    """A head and settings that were chosen for keys and their labels."""

    labels: tuple[str, ...]
    """Labels in the order of the head's rows."""
    head: nn.Linear
    predictor: mbpa.Predictor
    rows: NewRows | None
    threshold: float
    summary: dict[str, Any]


def fit(
    keys: Float[Tensor, "N D"],
    named: Sequence[str],
    *,
    training: Training | None = None,
    progress: bool = False,
) -> Fitted:
    """Train a head and choose the settings.

    Args:
        keys: one key of unit norm per example.
        named: the label of each example.
        training: how to train the head.
        progress: show progress bars on stderr.

    Raises:
        ValueError: a key does not have unit norm.
    """
    training = training or Training()
    require_unit_norm(keys)
    names = tuple(sorted(set(named)))
    places = {name: place for place, name in enumerate(names)}
    labels = torch.tensor([places[label] for label in named])
    generator = torch.Generator().manual_seed(training.seed)
    held = choose_held_out(labels, generator)
    choice = rehearse(keys, labels, training, generator, progress)
    predictor = DEFAULT_PREDICTOR if choice is None else choice.predictor
    head = train_head(keys[~held], labels[~held], len(names), training, (keys[held], labels[held]))
    summary, threshold = _measure_accuracy(head, predictor, keys, labels, held)
    summary |= _summarize_rehearsal(choice)
    rows = _fit_new_rows(head, keys, labels, choice)
    return Fitted(names, head, predictor, rows, threshold, summary)


def teach(
    data: LabelledTexts | LabelledImages,
    encoder: Encoder[Any],
    *,
    cache: Path | None = None,
    training: Training | None = None,
    progress: bool = False,
) -> NewRun:
    """Embed the data, train a head and choose the settings.

    Args:
        cache: a folder for embeddings, from which an interrupted run can continue.
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
    found = fit(keys, data.labels, training=training, progress=progress)
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
    )
    return NewRun(info, found.head, found.predictor, keys, found.rows, lesson_keys)


def write_new_run(
    taught: NewRun, data: LabelledTexts | LabelledImages, out: Path, *, replace: bool = False
) -> None:
    """Write a run directory atomically: it appears as a whole or not at all."""
    items: Sequence[str | bytes] = data.items
    parts = taught.info, taught.head, taught.predictor
    with reporting_errors(out), replace_directory(out, replace=replace) as directory:
        examples = zip(data.labels, items, strict=True)
        write_run(directory, *parts, examples, taught.keys, taught.rows)
        if taught.lesson_keys is not None:
            given: Sequence[tuple[str | bytes, str]] = data.lessons
            lessons = zip(given, taught.lesson_keys, strict=True)
            with Journal(directory / JOURNAL_FILE) as journal:
                journal.learn([(label, item, encode_key(key)) for (item, label), key in lessons])


def _fit_new_rows(
    head: nn.Linear, keys: Float[Tensor, "N D"], labels: Int[Tensor, "N"], choice: Choice | None
) -> NewRows | None:
    if choice is None:
        return None
    sums = label_sums(keys, labels, head.out_features)
    scale = choice.reach * even_scale(head.weight, sums)
    return NewRows.around(head.weight, head.bias, sums, scale=scale, offset=choice.offset)


def _summarize_rehearsal(choice: Choice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    return {"rehearsed_new": choice.score.new, "rehearsed_old": choice.score.old}


def _measure_accuracy(
    head: nn.Linear,
    predictor: mbpa.Predictor,
    keys: Float[Tensor, "N D"],
    labels: Int[Tensor, "N"],
    held: Bool[Tensor, "N"],
) -> tuple[dict[str, Any], float]:
    """Return a summary of the accuracy on held-out examples, and the threshold based on it."""
    count = int(held.sum())
    summary: dict[str, Any] = {"examples": len(keys), "held_out": count}
    if not count:
        return summary, 0.0
    memory = mbpa.ExactMemory(len(keys) - count, keys.shape[1])
    model = mbpa.MbPA(head=head, memory=memory, predictor=predictor)
    model.write(keys=keys[~held], values=labels[~held])
    logs = model(keys=keys[held])
    right = logs.argmax(1) == labels[held]
    alone = head(keys[held]).argmax(1) == labels[held]
    confidence = logs.exp().amax(1)
    threshold = find_break_even(confidence, right) if count >= MIN_THRESHOLD_EXAMPLES else 0.0
    answered = confidence >= threshold
    summary |= {
        "accuracy": float(right.double().mean()),
        "accuracy_of_the_head_alone": float(alone.double().mean()),
        "answered": float(answered.double().mean()),
        "accuracy_of_answers": float(right[answered].double().mean()) if answered.any() else None,
    }
    return summary, threshold


def find_break_even(confidence: Float[Tensor, "H"], right: Bool[Tensor, "H"]) -> float:
    """Return the lowest threshold that maximises the number of right minus wrong answers.

    Returns 0 if it is best to answer everything.
    """
    levels, group = confidence.unique(return_inverse=True)  # rising; ties share a group
    gains = torch.zeros(len(levels), dtype=torch.int64).scatter_add_(0, group, 2 * right.long() - 1)
    lowest = int(gains.flip(0).cumsum(0).flip(0).argmax())
    return float(levels[lowest]) if lowest else 0.0


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
    summary, rule = taught.info.summary or {}, taught.predictor
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
    if isinstance(rule, mbpa.Adapted):
        lines += [("adapts by", in_short(rule.rule)), ("", f"k={rule.k}, {in_short(rule.kernel)}")]
    if taught.rows is not None:
        scale, offset = taught.rows.scale, taught.rows.offset
        lines.append(("new rows", f"scale {scale:.1f}, offset {offset:.1f}"))
    return "\n".join(f"{name:10} {value}" for name, value in lines if value)
