"""`python -m benchmarks.new_labels`: the accuracy of a served run on labels it was just taught.

Decides how `mbpa teach` rehearses and which settings it may choose from. The splits are those of
the experiment on new intents. Known intents go through `teach` into a run directory, three examples
of each new intent through `Classifier.learn`, and test sentences through `Classifier.predict`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import mbpa
from benchmarks.tables import DocumentTable, format_rows, format_spread
from experiments.experiment import Context
from experiments.intents.task import CORPORA, IntentTask, Size, embed_corpus, make_intent_task
from experiments.measures import percent, split_labels
from experiments.workspace import Workspace
from mbpa.encoders import text
from mbpa.serve import teaching
from mbpa.serve.answers import Lesson
from mbpa.serve.classifier import Classifier
from mbpa.serve.labelled_texts import LabelledTexts

TAUGHT_EXAMPLES = 3
QUERIES_PER_CALL = 256
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
        "shots": TAUGHT_EXAMPLES,
        "corpora": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        context = Context(torch.device("cpu"), None, Workspace(Path(folder)), cache=cache)
        for name in arguments.corpora:
            corpus = embed_corpus(name, "test", Size(), encoder, context)
            found = report["corpora"][name] = []
            for split in arguments.splits:
                run = Path(folder) / f"{name}-{split}"
                task = make_intent_task(corpus, split)
                found.append({"split": split, **measure_split(task, encoder, cache, run)})
                print(name, json.dumps(found[-1]), flush=True)
    print(format_new_labels(report))
    NEW_LABELS_TABLE.publish(report, arguments.out, arguments.document)
    return 0


def measure_split(
    task: IntentTask, encoder: text.TextEncoder, cache: Path, run: Path
) -> dict[str, Any]:
    """Return accuracies in percent before and after teaching the new intents, and the settings."""
    known = task.known
    labels = tuple(task.names[label] for label in known.labels.tolist())
    data = LabelledTexts(known.texts, labels, len(known), 0)
    taught = teaching.teach(data, encoder, cache=cache)
    teaching.write_new_run(taught, data, run)
    new = task.examples(TAUGHT_EXAMPLES)
    lessons = [
        Lesson(task.names[label], words, key)
        for words, key, label in zip(new.texts, new.keys, new.labels.tolist(), strict=True)
    ]
    with Classifier.load(run, text_encoder=encoder) as classifier:
        before = measure_accuracies(classifier, task)
        for start in range(0, len(lessons), QUERIES_PER_CALL):
            classifier.learn(lessons[start : start + QUERIES_PER_CALL])
        after = measure_accuracies(classifier, task)
    return {"before": before, "after": after, "chosen": describe_choice(taught)}


def describe_choice(taught: teaching.NewRun) -> dict[str, Any]:
    """Return the settings chosen by the rehearsal."""
    rows = taught.rows
    told = {} if rows is None else {"scale": rows.scale, "offset": rows.offset}
    return {"predictor": repr(taught.predictor), **told}


def measure_accuracies(classifier: Classifier, task: IntentTask) -> dict[str, float]:
    """Return accuracies in percent when the classifier never abstains."""
    right = []
    for rows in torch.arange(len(task.scored)).split(QUERIES_PER_CALL):
        asked = task.scored.select(rows)
        answers = classifier.predict(keys=asked.keys, threshold=0.0)
        right += [
            answer.label == task.names[label]
            for answer, label in zip(answers, asked.labels.tolist(), strict=True)
        ]
    hits = torch.tensor(right)
    parts = split_labels(task.scored.labels, task.old)
    return {COLUMNS[name]: percent(hits[members]) for name, members in parts.items()}


# The document


def format_new_labels(report: dict[str, Any]) -> str:
    rows = [["corpus", "old, before", *(f"{name}, taught" for name in COLUMNS.values())]]
    for name, splits in report["corpora"].items():
        cells = [format_spread([split["before"]["old"] for split in splits], 1)]
        cells += [
            format_spread([split["after"][part] for split in splits], 1)
            for part in COLUMNS.values()
        ]
        rows.append([name, *cells])
    count = len(next(iter(report["corpora"].values())))
    note = (
        f"*Accuracy in percent, {report['shots']} examples of each new label; "
        f"mean ± standard deviation of {count} splits.*"
    )
    return f"{format_rows(rows)}\n{note}\n"


NEW_LABELS_TABLE = DocumentTable("new labels", format_new_labels)


if __name__ == "__main__":
    sys.exit(main())
