"""`python -m benchmarks.estimators`: estimators of mbpa and of scikit-learn on its own data sets.

Decides when to prefer `MbPAClassifier` and `MbPARegressor`. Settings were chosen
with seeds 0 to 2; this uses others. Every method gets standardised features and its default
settings. There are three tasks:

- all at once: fit on 70% of the rows;
- in two parts: fit on a quarter of these rows, then `partial_fit` on the others. Estimators
  without `partial_fit` are fitted on all of them;
- a new class: fit without one class (digits: two), then `partial_fit` on five examples of each.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import (
    load_breast_cancer,
    load_diabetes,
    load_digits,
    load_iris,
    load_wine,
    make_friedman1,
)
from sklearn.linear_model import LogisticRegression, Ridge, SGDClassifier, SGDRegressor
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.preprocessing import StandardScaler

from benchmarks.tables import DocumentTable, format_rows
from mbpa.integrations.sklearn import MbPAClassifier, MbPARegressor

SEEDS = (100, 101, 102)
NEW_CLASSES = {"digits": (3, 8), "iris": (1,), "wine": (1,)}
NEW_EXAMPLES = 5
CLASSIFIERS: dict[str, Callable[[int], Any]] = {
    "MbPAClassifier": lambda seed: MbPAClassifier(random_state=seed),
    "LogisticRegression": lambda seed: LogisticRegression(max_iter=1000),
    "LogisticRegression (balanced)": lambda seed: LogisticRegression(
        max_iter=1000, class_weight="balanced"
    ),
    "KNeighborsClassifier": lambda seed: KNeighborsClassifier(),
    "MLPClassifier": lambda seed: MLPClassifier(random_state=seed, max_iter=500),
    "SGDClassifier": lambda seed: SGDClassifier(loss="log_loss", random_state=seed),
}
REGRESSORS: dict[str, Callable[[int], Any]] = {
    "MbPARegressor": lambda seed: MbPARegressor(random_state=seed),
    "Ridge": lambda seed: Ridge(),
    "KNeighborsRegressor": lambda seed: KNeighborsRegressor(),
    "MLPRegressor": lambda seed: MLPRegressor(random_state=seed, max_iter=500),
    "SGDRegressor": lambda seed: SGDRegressor(random_state=seed),
}


def learn_in_two_parts(model: Any, X: Any, y: Any, first: Any, classes: Any) -> Any:
    """Fit on the first rows, then add the others; or fit on all rows, if it cannot add."""
    if not hasattr(model, "partial_fit"):
        return model.fit(X, y)
    later = ~first
    if classes is None or isinstance(model, MbPAClassifier):
        return model.fit(X[first], y[first]).partial_fit(X[later], y[later])
    if set(y[first]) == set(classes):
        return model.fit(X[first], y[first]).partial_fit(X[later], y[later])
    for _ in range(50):  # a class that is not known from the start must be declared: no `fit`
        model.partial_fit(X[first], y[first], classes=classes)
    return model.partial_fit(X[later], y[later])


def compare_classifiers(scores: dict[tuple[str, str, str], list[float]]) -> None:
    for name, load in (
        ("digits", load_digits),
        ("iris", load_iris),
        ("wine", load_wine),
        ("breast_cancer", load_breast_cancer),
    ):
        X, y = load(return_X_y=True)
        for seed in SEEDS:
            known, asked, labels, answers = train_test_split(
                X, y, test_size=0.3, random_state=seed, stratify=y
            )
            for method, make in CLASSIFIERS.items():
                scaler = StandardScaler().fit(known)
                rows, queries = scaler.transform(known), scaler.transform(asked)
                model = make(seed).fit(rows, labels)
                scores["all at once", name, method].append(model.score(queries, answers))
                first = np.arange(len(rows)) < len(rows) // 4
                scaler = StandardScaler().fit(known[first])
                rows, queries = scaler.transform(known), scaler.transform(asked)
                model = learn_in_two_parts(make(seed), rows, labels, first, np.unique(y))
                scores["in two parts", name, method].append(model.score(queries, answers))
                if name not in NEW_CLASSES:
                    continue
                is_old = ~np.isin(labels, NEW_CLASSES[name])
                few = [np.flatnonzero(labels == each)[:NEW_EXAMPLES] for each in NEW_CLASSES[name]]
                used = np.concatenate([np.flatnonzero(is_old), *few])
                scaler = StandardScaler().fit(known[is_old])
                rows, queries = scaler.transform(known[used]), scaler.transform(asked)
                model = learn_in_two_parts(
                    make(seed), rows, labels[used], is_old[used], np.unique(y)
                )
                predicted, is_new = model.predict(queries), np.isin(answers, NEW_CLASSES[name])
                is_right = predicted == answers
                scores["a new class: new", name, method].append(float(is_right[is_new].mean()))
                scores["a new class: old", name, method].append(float(is_right[~is_new].mean()))
                scores["a new class: all", name, method].append(float(is_right.mean()))
            print(name, seed, flush=True)


def compare_regressors(scores: dict[tuple[str, str, str], list[float]]) -> None:
    for name in ("diabetes", "friedman1"):
        for seed in SEEDS:
            X, y = load_diabetes(return_X_y=True)
            if name == "friedman1":
                X, y = make_friedman1(600, noise=1.0, random_state=seed)
            known, asked, targets, answers = train_test_split(
                X, y, test_size=0.3, random_state=seed
            )
            center, spread = targets.mean(), targets.std()
            targets, answers = (targets - center) / spread, (answers - center) / spread
            for method, make in REGRESSORS.items():
                scaler = StandardScaler().fit(known)
                rows, queries = scaler.transform(known), scaler.transform(asked)
                model = make(seed).fit(rows, targets)
                scores["all at once", name, method].append(model.score(queries, answers))
                first = np.arange(len(rows)) < len(rows) // 4
                model = learn_in_two_parts(make(seed), rows, targets, first, None)
                scores["in two parts", name, method].append(model.score(queries, answers))
            print(name, seed, flush=True)


ALL_AT_ONCE, IN_TWO_PARTS, NEW_CLASS = "all at once", "in two parts", "a new class"
REFITTED = ("LogisticRegression", "LogisticRegression (balanced)", "KNeighborsClassifier")
SHOWN_CLASSIFIERS = {
    ALL_AT_ONCE: ("LogisticRegression", "KNeighborsClassifier", "MLPClassifier"),
    IN_TWO_PARTS: ("LogisticRegression", "MLPClassifier", "SGDClassifier"),
    NEW_CLASS: (
        "LogisticRegression (balanced)",
        "LogisticRegression",
        "KNeighborsClassifier",
        "SGDClassifier",
    ),
}
SHOWN_REGRESSORS = {
    ALL_AT_ONCE: ("Ridge", "MLPRegressor"),
    IN_TWO_PARTS: ("MLPRegressor", "SGDRegressor"),
}


def format_scores(report: dict[str, Any]) -> str:
    """Format the tables of docs/integrations-sklearn.md, in percent."""
    means = {
        (each["task"], each["data"], each["method"]): f"{100 * statistics.mean(each['scores']):.1f}"
        for each in report["scores"]
    }

    def compare(task: str, ours: str, others: tuple[str, ...], data: list[str]) -> list[list[str]]:
        rows = []
        for method in (ours, *others):
            name, _, setting = method.partition(" ")
            words = [f"`{name}`", *([setting] if setting else [])]
            is_refitted = task != ALL_AT_ONCE and method in REFITTED
            title = " ".join(words) + (", refitted" if is_refitted else "")
            parts = [f"{task}: {part}" for part in ("new", "old", "all")]
            tasks = parts if task == NEW_CLASS else [task]
            cells = [" / ".join(means[each, source, method] for each in tasks) for source in data]
            is_first = method == ours and task != NEW_CLASS
            rows.append([f"**{task}**: {title}" if is_first else title, *cells])
        return rows

    data = ["digits", "iris", "wine", "breast_cancer"]
    several = [["accuracy in percent", "digits", "iris", "wine", "breast cancer"]]
    for task in (ALL_AT_ONCE, IN_TWO_PARTS):
        several += compare(task, "MbPAClassifier", SHOWN_CLASSIFIERS[task], data)
    few = [["a new class: new / old / all", *NEW_CLASSES]]
    few += compare(NEW_CLASS, "MbPAClassifier", SHOWN_CLASSIFIERS[NEW_CLASS], list(NEW_CLASSES))
    numbers = [["R² in percent", "diabetes", "Friedman's first problem"]]
    for task, others in SHOWN_REGRESSORS.items():
        numbers += compare(task, "MbPARegressor", others, ["diabetes", "friedman1"])
    return "\n".join(format_rows(rows) for rows in (several, few, numbers))


ESTIMATORS_TABLE = DocumentTable("estimators", format_scores)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.estimators", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/estimators.json"))
    parser.add_argument("--document", type=Path, default=Path("docs/integrations-sklearn.md"))
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="Stochastic Optimizer: Maximum iterations")
    scores: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    compare_regressors(scores)
    compare_classifiers(scores)
    rows = [
        {"task": task, "data": data, "method": method, "scores": found}
        for (task, data, method), found in scores.items()
    ]
    ESTIMATORS_TABLE.publish({"seeds": SEEDS, "scores": rows}, arguments.out, arguments.document)


if __name__ == "__main__":
    main()
