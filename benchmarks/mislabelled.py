"""`python -m benchmarks.mislabelled`: which method finds the wrong labels in a memory?

Decides how the explorer finds examples that may be mislabelled. A share of the labels of Banking77
is replaced. Three methods rank the labels by doubt and are compared by average precision: the vote
of the nearest other examples, the head adapted to the memory without the example, and the head
alone. Both heads are trained with the wrong labels.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import mbpa
from benchmarks.tables import DocumentTable, format_rows, format_spread
from experiments import data
from mbpa.encoders import text
from mbpa.explorer import review
from mbpa.serve import teaching, training
from mbpa.serve.journal import Example

SHARE = 0.05  # share of the labels that are replaced
NEAR_EXAMPLES = 10  # nearest examples with another label, one of which provides the wrong label
DRAWS = 5
LISTED_FIRST = 100  # length of the beginning of the list that is reported
VOTE, ADAPTED, HEAD = "vote", "adapted head, left out", "head alone"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mislabelled", description=__doc__)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/mbpa/embeddings"))
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/mislabelled.json"))
    parser.add_argument("--document", type=Path, default=Path("docs/explorer.md"))
    arguments = parser.parse_args()
    keys, labels = embed_sentences(arguments.cache.expanduser())
    report: dict[str, Any] = {
        "machine": {"torch": str(torch.__version__), "python": platform.python_version()},
        "data": "Banking77, training sentences",
        "examples": len(keys),
        "replaced": round(SHARE * len(keys)),
        "draws": arguments.draws,
        "kinds": {},
    }
    for kind, plant in KINDS.items():
        draws = [compare_methods(keys, labels, plant, seed) for seed in range(arguments.draws)]
        report["kinds"][kind] = {
            method: {
                measure: [draw[method][measure] for draw in draws] for measure in draws[0][VOTE]
            }
            for method in draws[0]
        }
    print(format_mislabelled(report))
    MISLABELLED_TABLE.publish(report, arguments.out, arguments.document)
    return 0


def embed_sentences(cache: Path) -> tuple[Tensor, Tensor]:
    """Return the keys and labels."""
    sentences = data.banking77().train
    encoder = text.encoder()
    with tqdm(total=len(sentences.texts), desc="embedding", file=sys.stderr) as bar:
        return text.embed_items(encoder, sentences.texts, cache, bar.update), sentences.labels


# Wrong labels


def any_other(keys: Tensor, labels: Tensor, places: Tensor, generator: torch.Generator) -> Tensor:
    classes = int(labels.max()) + 1
    return (labels[places] + torch.randint(1, classes, places.shape, generator=generator)) % classes


def of_a_near_one(
    keys: Tensor, labels: Tensor, places: Tensor, generator: torch.Generator
) -> Tensor:
    scores = keys[places] @ keys.T
    scores[labels[places][:, None] == labels] = -1.0
    near = scores.topk(NEAR_EXAMPLES, dim=1).indices
    chosen = torch.randint(NEAR_EXAMPLES, (len(places), 1), generator=generator)
    return labels[near.gather(1, chosen)[:, 0]]


KINDS: dict[str, Callable[[Tensor, Tensor, Tensor, torch.Generator], Tensor]] = {
    "any other label": any_other,
    "the label of a near example": of_a_near_one,
}


# Methods that find doubtful labels


def compare_methods(
    keys: Tensor,
    labels: Tensor,
    plant: Callable[[Tensor, Tensor, Tensor, torch.Generator], Tensor],
    seed: int,
) -> dict[str, dict[str, float]]:
    """Return how well each method finds the replaced labels."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randperm(len(keys), generator=generator)[: round(SHARE * len(keys))]
    given = labels.clone()
    given[places] = plant(keys, labels, places, generator)
    wrong = given != labels
    assert int(wrong.sum()) == len(places)
    found = {}
    for method, doubts in DOUBTS.items():
        start = time.perf_counter()
        order = doubts(keys, given, seed).argsort(descending=True, stable=True)
        seconds = time.perf_counter() - start
        hits = wrong[order]
        found[method] = {
            "average_precision": average_precision(hits),
            "found_among_the_first": int(hits[:LISTED_FIRST].sum()),
            "seconds": seconds,
        }
        print(f"{plant.__name__}, draw {seed}, {method}: {found[method]}", flush=True)
    return found


def average_precision(hits: Tensor) -> float:
    """Return the mean, over all hits, of the precision of the list down to that hit."""
    ranks = hits.nonzero()[:, 0] + 1
    return float((torch.arange(1, len(ranks) + 1) / ranks).mean())


def doubts_of_the_vote(keys: Tensor, given: Tensor, seed: int) -> Tensor:
    """Return the doubts as the explorer's page computes them."""
    examples = [Example(i + 1, str(label), None, None) for i, label in enumerate(given.tolist())]
    opinions = review.compute_votes(examples, keys, most=len(examples))
    return torch.tensor([each.doubt for each in opinions])


def doubts_of_the_adapted_head(keys: Tensor, given: Tensor, seed: int) -> Tensor:
    memory = mbpa.ExactMemory(len(keys), keys.shape[1])
    memory.write(keys, given)
    head = train_head(keys, given, seed)
    model = mbpa.MbPA(head=head, memory=memory, predictor=teaching.DEFAULT_PREDICTOR)
    left_out = mbpa.leave_one_out(model)
    assert torch.equal(left_out.ids, torch.arange(len(keys)))
    return doubts(left_out.predictions, given)


def doubts_of_the_head(keys: Tensor, given: Tensor, seed: int) -> Tensor:
    return doubts(train_head(keys, given, seed)(keys).log_softmax(1), given)


def train_head(keys: Tensor, given: Tensor, seed: int) -> nn.Linear:
    """Train a head as `mbpa teach` does, with the wrong labels."""
    held = training.choose_held_out(given, torch.Generator().manual_seed(seed))
    classes = int(given.max()) + 1
    return training.train_head(
        keys[~held], given[~held], classes, training.Training(), (keys[held], given[held])
    )


def doubts(logs: Tensor, given: Tensor) -> Tensor:
    """Return how much more probable another label is than the given one, as `Opinion.doubt`."""
    own = logs.exp().gather(1, given[:, None])[:, 0]
    best, label = logs.exp().max(1)
    return torch.where(label == given, -own, best - own)


DOUBTS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    VOTE: doubts_of_the_vote,
    ADAPTED: doubts_of_the_adapted_head,
    HEAD: doubts_of_the_head,
}


# The document


def format_mislabelled(report: dict[str, Any]) -> str:
    rows = [
        [
            "replaced by",
            *(f"{m}: average precision" for m in DOUBTS),
            f"{VOTE}: first {LISTED_FIRST}",
        ]
    ]
    for kind, methods in report["kinds"].items():
        cells = [format_spread(methods[method]["average_precision"], 3) for method in DOUBTS]
        cells.append(format_spread(methods[VOTE]["found_among_the_first"], 0))
        rows.append([kind, *cells])
    note = (
        f"*{report['data']}, {report['replaced']} of {report['examples']:,} labels replaced; "
        f"mean ± standard deviation over {report['draws']} draws.*"
    )
    return f"{format_rows(rows)}\n{note}\n"


MISLABELLED_TABLE = DocumentTable("mislabelled", format_mislabelled)


if __name__ == "__main__":
    sys.exit(main())
