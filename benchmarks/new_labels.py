"""`python -m benchmarks.new_labels`: the accuracy of a served run on labels it was just taught.

Decides how `mbpa teach` rehearses and which settings it may choose from. The splits are those of
the experiment on new intents. Known intents go through `teach` into a run directory, three examples
of each new intent through `Classifier.learn`, and test sentences through `Classifier.predict`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import mbpa
from benchmarks.tables import markdown, replaced, write
from experiments.experiment import Context
from experiments.intents.measures import subsets, top1
from experiments.intents.task import CORPORA, Size, Task, make_task, read_corpus
from experiments.workspace import Workspace
from mbpa.encoders import text
from mbpa.serve import teaching
from mbpa.serve.answers import Lesson
from mbpa.serve.classifier import Classifier
from mbpa.serve.labelled_texts import LabelledTexts

NAME = "new labels"
SHOTS = 3
AT_ONCE = 256  # queries per call
COLUMNS = {"novel": "new", "pre-trained": "old", "all": "all"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.new_labels", description=__doc__)
    parser.add_argument("--corpora", nargs="*", default=list(CORPORA), choices=list(CORPORA))
    parser.add_argument("--splits", nargs="*", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/mbpa/embeddings"))
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/new_labels.json"))
    parser.add_argument("--document", type=Path, default=Path("docs/serving.md"))
    arguments = parser.parse_args()
    encoder, cache = text.encoder(), arguments.cache.expanduser()
    report: dict[str, Any] = {
        "machine": {"torch": str(torch.__version__), "python": platform.python_version()},
        "mbpa": mbpa.__version__,
        "shots": SHOTS,
        "corpora": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        context = Context(torch.device("cpu"), None, Workspace(Path(folder)), cache=cache)
        for name in arguments.corpora:
            corpus = read_corpus(name, "test", Size(), encoder, context)
            found = report["corpora"][name] = []
            for split in arguments.splits:
                run = Path(folder) / f"{name}-{split}"
                task = make_task(corpus, split)
                found.append({"split": split, **measured(task, encoder, cache, run)})
                print(name, json.dumps(found[-1]), flush=True)
    print(table(report))
    write(report, arguments.out, arguments.document, refreshed)
    return 0


def measured(task: Task, encoder: text.TextEncoder, cache: Path, run: Path) -> dict[str, Any]:
    """Return accuracies in percent before and after teaching the new intents, and the settings."""
    known = task.known
    labels = tuple(task.names[label] for label in known.labels.tolist())
    data = LabelledTexts(known.texts, labels, len(known), 0)
    taught = teaching.teach(data, encoder, cache=cache)
    teaching.write_new_run(taught, data, run)
    new = task.examples(SHOTS)
    lessons = [
        Lesson(task.names[label], words, key)
        for words, key, label in zip(new.texts, new.keys, new.labels.tolist(), strict=True)
    ]
    with Classifier.load(run, text_encoder=encoder) as classifier:
        before = accuracies(classifier, task)
        for start in range(0, len(lessons), AT_ONCE):
            classifier.learn(lessons[start : start + AT_ONCE])
        after = accuracies(classifier, task)
    return {"before": before, "after": after, "chosen": chosen(taught)}


def chosen(taught: teaching.NewRun) -> dict[str, Any]:
    """Return the settings chosen by the rehearsal."""
    rows = taught.rows
    told = {} if rows is None else {"scale": rows.scale, "offset": rows.offset}
    return {"predictor": repr(taught.predictor), **told}


def accuracies(classifier: Classifier, task: Task) -> dict[str, float]:
    """Return accuracies in percent when the classifier never abstains."""
    right = []
    for rows in torch.arange(len(task.scored)).split(AT_ONCE):
        asked = task.scored.chosen(rows)
        answers = classifier.predict(keys=asked.keys, threshold=0.0)
        right += [
            answer.label == task.names[label]
            for answer, label in zip(answers, asked.labels.tolist(), strict=True)
        ]
    hits = torch.tensor(right)
    parts = subsets(task.scored.labels, task.old)
    return {COLUMNS[name]: top1(hits[members]) for name, members in parts.items()}


# The document


def refreshed(page: str, report: dict[str, Any]) -> str:
    """Return the document with its table rebuilt from the results."""
    return replaced(page, NAME, table(report))


def table(report: dict[str, Any]) -> str:
    rows = [["corpus", "old, before", *(f"{name}, taught" for name in COLUMNS.values())]]
    for name, splits in report["corpora"].items():
        cells = [_spread([split["before"]["old"] for split in splits])]
        cells += [_spread([split["after"][part] for split in splits]) for part in COLUMNS.values()]
        rows.append([name, *cells])
    count = len(next(iter(report["corpora"].values())))
    note = (
        f"*Right answers in percent, {report['shots']} examples of each new label; "
        f"mean ± standard deviation of {count} splits.*"
    )
    return f"{markdown(rows)}\n{note}\n"


def _spread(numbers: list[float]) -> str:
    spread = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
    return f"{statistics.mean(numbers):.1f} ± {spread:.1f}"


if __name__ == "__main__":
    sys.exit(main())
