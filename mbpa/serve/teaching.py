"""From labelled texts or pictures to a run: embed, train a head, fill the memory, tune, write.

How to adapt, and how to make rows of the head for new labels, is chosen in a rehearsal of what the
run is for: a third of the labels are kept from a head, and three examples of each are put beside
what it knows (`rehearsal`). Held-out examples of all labels then say how well it does, and from
what confidence on an answer is more often right than wrong.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

import mbpa
from mbpa.embedding import Encoder, embedded
from mbpa.errors import RunError
from mbpa.rows import NewRows, even_scale, label_sums, require_unit_norm
from mbpa.serve.album import Album
from mbpa.serve.database import InUseError, JournalError
from mbpa.serve.journal import Journal
from mbpa.serve.rehearsal import Choice, Rehearsal, choose
from mbpa.serve.run import JOURNAL, MODEL, RUN, RunInfo, write_run
from mbpa.serve.spreadsheet import Spreadsheet

HELD_OUT = 0.1  # share of each label's examples
REHEARSALS = 3
ASKED = 0.25  # share of each old label's examples, in a rehearsal
SHOTS = 3  # examples of a label that is new, in the rehearsal
NEW = 1 / 3  # share of the labels that are new in it
FEW = 20  # held-out examples, too few to say anything from
DEFAULT = mbpa.Adapted(mbpa.Gradient(steps=20), k=20)  # where nothing can be rehearsed


@dataclass(frozen=True)
class Training:
    """How the head is trained; the defaults suit sentence embeddings of unit norm."""

    lr: float = 0.1
    batch: int = 512
    epochs: int = 60
    patience: int = 4
    """Epochs without a better held-out loss, after which it stops."""
    seed: int = 0


@dataclass(frozen=True)
class Taught:
    """What `teach` made of texts or pictures."""

    info: RunInfo
    head: nn.Linear
    predictor: mbpa.Predictor
    keys: Float[Tensor, "N D"]
    rows: NewRows | None = None
    """Of labels to come; `None`: they start from zero."""


def teach(
    data: Spreadsheet | Album,
    encoder: Encoder[Any],
    *,
    cache: Path | None = None,
    training: Training | None = None,
    progress: bool = False,
) -> Taught:
    """Embed, train, tune.

    Args:
        cache: a folder for embeddings, from which an interrupted run goes on.
        progress: show bars on stderr.

    Raises:
        ValueError: the encoder takes something else, or gives keys of another norm than 1.
    """
    if encoder.takes != data.takes:
        raise ValueError(f"the encoder {encoder.name} takes {encoder.takes}, not {data.takes}")
    training = training or Training()
    with tqdm(
        total=len(data.items), desc="embedding", file=sys.stderr, disable=not progress
    ) as bar:
        keys = embedded(encoder, data.items, cache, bar.update)
    require_unit_norm(keys)
    names = tuple(sorted(set(data.labels)))
    places = {name: place for place, name in enumerate(names)}
    labels = torch.tensor([places[label] for label in data.labels])
    generator = torch.Generator().manual_seed(training.seed)
    held = held_out(labels, generator)
    choice = _chosen(keys, labels, training, generator, progress)
    predictor = DEFAULT if choice is None else choice.predictor
    head = trained_head(
        keys[~held], labels[~held], len(names), training, (keys[held], labels[held])
    )
    summary, threshold = _measured(head, predictor, keys, labels, held)
    summary |= _rehearsed(choice)
    summary |= {"rows": data.rows, "duplicates": data.duplicates, "labels": len(names)}
    info = RunInfo(
        key_dim=encoder.key_dim,
        labels=names,
        trained_examples=len(keys),
        threshold=threshold,
        encoder=encoder.name,
        fingerprint=encoder.fingerprint,
        summary=summary,
        takes=encoder.takes,
    )
    return Taught(info, head, predictor, keys, _new_rows(head, keys, labels, choice))


def write_taught(
    taught: Taught, data: Spreadsheet | Album, out: Path, *, replace: bool = False
) -> None:
    """Write a run directory, which is there as a whole or not at all."""
    items: Sequence[str | bytes] = data.items
    parts = taught.info, taught.head, taught.predictor
    with _writable(out), in_its_place(out, replace=replace) as directory:
        examples = zip(data.labels, items, strict=True)
        write_run(directory, *parts, examples, taught.keys, taught.rows)


def require_free(out: Path, *, replace: bool) -> None:
    """Raise `RunError` if nothing can be written there, or if anything would be lost by writing a
    run; with `replace` a run may be, and nothing else."""
    with _writable(out):
        _check_free(out, replace)
        above = next(each for each in Path(os.path.abspath(out)).parents if each.exists())
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def _writable(out: Path) -> Iterator[None]:
    """What the disk says of it, in a line."""
    try:
        yield
    except (OSError, JournalError) as error:
        why = getattr(error, "strerror", None) or error
        raise RunError(f"{out} cannot be written ({why}): name another --out") from error


def _check_free(out: Path, replace: bool) -> None:
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file; --out must name a directory")
    there = {path.name for path in out.iterdir()} if out.is_dir() else set()
    foreign = sorted(n for n in there if n not in (RUN, MODEL) and not n.startswith(JOURNAL))
    if foreign:
        raise RunError(f"{out} holds {foreign[0]}, which is no part of a run: name another --out")
    if there and RUN not in there:
        raise RunError(f"{out} is not empty, and no run: name another --out")
    if there and not replace:
        raise RunError(f"{out} is a run: what was taught there would be lost; --again replaces it")
    with _not_served(out):
        pass


@contextmanager
def _not_served(out: Path) -> Iterator[None]:
    """Keep others from serving a run: they would go on and acknowledge what nobody finds again."""
    with ExitStack() as held:
        if (out / JOURNAL).exists():
            try:
                held.enter_context(Journal(out / JOURNAL))
            except InUseError as error:
                raise RunError(str(error)) from error
            except JournalError:  # what cannot be read cannot be served either
                pass
        yield


@contextmanager
def in_its_place(out: Path, *, replace: bool) -> Iterator[Path]:
    """A new directory that takes the place of `out` if all goes well."""
    out = Path(os.path.abspath(out))
    require_free(out, replace=replace)
    out.parent.mkdir(parents=True, exist_ok=True)
    new = out.with_name(f".{out.name}.{uuid.uuid4().hex}.new")
    try:
        new.mkdir()
        yield new
        if not out.exists():
            new.rename(out)
            return
        old = out.with_name(f".{out.name}.{uuid.uuid4().hex}.old")
        with _not_served(out):
            out.rename(old)
        try:
            new.rename(out)
        except OSError:
            old.rename(out)
            raise
        shutil.rmtree(old)
    finally:
        shutil.rmtree(new, ignore_errors=True)


# Training


def held_out(
    labels: Int[Tensor, "N"], generator: torch.Generator, share: float = HELD_OUT
) -> Bool[Tensor, "N"]:
    """A share of each label's examples; none of labels with fewer than three."""
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        places = (labels == label).nonzero()[:, 0]
        count = max(1, round(share * len(places))) if len(places) >= 3 else 0
        chosen[places[torch.randperm(len(places), generator=generator)[:count]]] = True
    return chosen


def trained_head(
    keys: Float[Tensor, "N D"],
    labels: Int[Tensor, "N"],
    classes: int,
    training: Training,
    held: tuple[Float[Tensor, "H D"], Int[Tensor, "H"]],
) -> nn.Linear:
    """A linear head from zero, by Adam, as it was when the held-out loss was least.

    From zero, the logits of each query sum to zero and stay so: to a row of zeros that is added
    for a new label they are neither above nor below.
    """
    head = nn.Linear(keys.shape[1], classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimizer = torch.optim.Adam(head.parameters(), lr=training.lr)
    generator = torch.Generator().manual_seed(training.seed)
    least, best, waited = float("inf"), head.state_dict(), 0
    for _ in range(training.epochs):
        for rows in torch.randperm(len(keys), generator=generator).split(training.batch):
            optimizer.zero_grad()
            functional.cross_entropy(head(keys[rows]), labels[rows]).backward()
            optimizer.step()
        waited += 1
        with torch.no_grad():
            loss = float(functional.cross_entropy(head(held[0]), held[1])) if len(held[1]) else 0.0
        if loss < least or not len(held[1]):
            best = {name: tensor.clone() for name, tensor in head.state_dict().items()}
            least, waited = loss, 0
        if waited >= training.patience:
            break
    head.load_state_dict(best)
    return head.eval().requires_grad_(False)


# Tuning


def _chosen(
    keys: Float[Tensor, "N D"],
    labels: Int[Tensor, "N"],
    training: Training,
    generator: torch.Generator,
    progress: bool,
) -> Choice | None:
    """What rehearsals say, each with other labels and other held-out examples."""
    tasks = [
        rehearsal(keys, labels, held_out(labels, generator, ASKED), training, generator)
        for _ in range(REHEARSALS)
    ]
    there = [task for task in tasks if task is not None]
    return choose(there, progress) if there else None


def _new_rows(
    head: nn.Linear, keys: Float[Tensor, "N D"], labels: Int[Tensor, "N"], choice: Choice | None
) -> NewRows | None:
    if choice is None:
        return None
    sums = label_sums(keys, labels, head.out_features)
    scale = choice.reach * even_scale(head.weight, sums)
    return NewRows.around(head.weight, head.bias, sums, scale=scale, offset=choice.offset)


def rehearsal(
    keys: Float[Tensor, "N D"],
    labels: Int[Tensor, "N"],
    held: Bool[Tensor, "N"],
    training: Training,
    generator: torch.Generator,
    most_queries: int = 1000,
) -> Rehearsal | None:
    """Some labels as if they were new; `None` if there are too few examples for that."""
    counts = labels.bincount()
    rich = (counts > SHOTS).nonzero()[:, 0]
    new = rich[torch.randperm(len(rich), generator=generator)[: int(NEW * len(counts))]]
    if not len(new) or len(counts) - len(new) < 2:
        return None
    is_new = torch.isin(labels, new)
    order = torch.cat([torch.tensor(sorted(set(range(len(counts))) - set(new.tolist()))), new])
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    numbered, known = places[labels], len(order) - len(new)
    shots = torch.cat([_some(labels == label, SHOTS, generator) for label in new])
    fit = ~held & ~is_new
    head = trained_head(
        keys[fit], numbered[fit], known, training, (keys[held & ~is_new], numbered[held & ~is_new])
    )
    unused = is_new.clone()
    unused[shots] = False
    old = _some(held & ~is_new, most_queries, generator)
    asked = torch.cat([old, _some(unused, most_queries // 2, generator)])
    if not 0 < len(old) < len(asked):
        return None
    in_memory = torch.cat([fit.nonzero()[:, 0], shots])
    return Rehearsal(
        head, keys[in_memory], numbered[in_memory], keys[asked], numbered[asked], len(order)
    )


def _some(wanted: Bool[Tensor, "N"], most: int, generator: torch.Generator) -> Int[Tensor, "S"]:
    places = wanted.nonzero()[:, 0]
    return places[torch.randperm(len(places), generator=generator)[:most]]


# Measuring


def _rehearsed(choice: Choice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    return {"rehearsed_new": choice.score.new, "rehearsed_old": choice.score.old}


def _measured(
    head: nn.Linear,
    predictor: mbpa.Predictor,
    keys: Float[Tensor, "N D"],
    labels: Int[Tensor, "N"],
    held: Bool[Tensor, "N"],
) -> tuple[dict[str, Any], float]:
    """How well held-out examples are answered, and the threshold that follows."""
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
    threshold = break_even(confidence, right) if count >= FEW else 0.0
    answered = confidence >= threshold
    summary |= {
        "accuracy": float(right.double().mean()),
        "accuracy_of_the_head_alone": float(alone.double().mean()),
        "answered": float(answered.double().mean()),
        "accuracy_of_answers": float(right[answered].double().mean()) if answered.any() else None,
    }
    return summary, threshold


def break_even(confidence: Float[Tensor, "H"], right: Bool[Tensor, "H"]) -> float:
    """The threshold that leaves the most right answers over wrong ones, of such the lowest; 0 if
    that is to answer all."""
    levels, group = confidence.unique(return_inverse=True)  # rising; equal ones go together
    gains = torch.zeros(len(levels), dtype=torch.int64).scatter_add_(0, group, 2 * right.long() - 1)
    lowest = int(gains.flip(0).cumsum(0).flip(0).argmax())
    return float(levels[lowest]) if lowest else 0.0


def _left_out(data: Spreadsheet | Album) -> list[tuple[str, str]]:
    """What of the data is not among the examples, and what is odd about the rest."""
    row, item = ("picture", "picture") if isinstance(data, Album) else ("row", "text")
    strays = data.strays if isinstance(data, Album) else 0
    counts = [
        (data.duplicates, f"duplicate {row}", f"duplicate {row}s"),
        (strays, "file that is no picture", "files that are no pictures"),
    ]
    told = [_counted(*each) for each in counts if each[0]]
    lines = list(zip(["left out", ""], told, strict=False))
    if data.contradictions:
        odd = f"{item} has several labels", f"{item}s have several labels"
        lines.append(("note", _counted(data.contradictions, *odd)))
    return lines


def _counted(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"


def report(taught: Taught, data: Spreadsheet | Album) -> str:
    """What came of it, in a few lines."""
    summary, rule = taught.info.summary or {}, taught.predictor
    lines = [("examples", f"{len(data.items)} of {summary['labels']} labels"), *_left_out(data)]
    if "accuracy" in summary:
        alone, answers = summary["accuracy_of_the_head_alone"], summary["accuracy_of_answers"]
        lines += [
            ("held out", f"{summary['held_out']} examples"),
            ("accuracy", f"{summary['accuracy']:.1%} (the head alone {alone:.1%})"),
            ("threshold", f"{taught.info.threshold:.2f}: {summary['answered']:.1%} are answered"),
            ("", "it never abstains: no answer to what was held out is worth refusing")
            if not taught.info.threshold
            else ("", ""),
            ("", f"of which {answers:.1%} right" if answers is not None else ""),
        ]
    else:
        lines.append(("held out", "nothing: there are too few examples, so it never abstains"))
    if "rehearsed_new" in summary:
        new, old = summary["rehearsed_new"], summary["rehearsed_old"]
        lines.append(
            ("new labels", f"{new:.1%} right from {SHOTS} examples each, others {old:.1%}")
        )
    if isinstance(rule, mbpa.Adapted):
        lines += [("adapts by", f"{rule.rule}"), ("", f"k={rule.k}, {rule.kernel}")]
    if taught.rows is not None:
        scale, offset = taught.rows.scale, taught.rows.offset
        lines.append(("new rows", f"scale {scale:.1f}, offset {offset:.1f}"))
    return "\n".join(f"{name:10} {value}" for name, value in lines if value)
