"""One corpus read by one network: a memory of its states, neighbours of its texts, and scores.

Neighbours are searched once per text and kept; every method and setting starts from them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import mbpa
from experiments.memory_language_model.networks import States
from mbpa.language.gate import NEIGHBORHOOD_FEATURES, Neighborhood, measure_features
from mbpa.memory import Neighbors
from mbpa.predictors import Context, Predictor

SEARCH_ROWS = 4096
TABLE_BYTES = 1 << 33
DOMAIN, TEXT, BOTH = "domain", "text", "both"


@dataclass(frozen=True, eq=False)
class Found:
    """Neighbours of all tokens of a text, nearest first: slots, −1 for none, and distances."""

    slots: Int[Tensor, "N K"]
    distances: Float[Tensor, "N K"]

    def first(self, k: int) -> Found:
        """Return only the first k neighbours of each token."""
        return Found(self.slots[:, :k], self.distances[:, :k])


@dataclass(frozen=True, eq=False)
class PartScores:
    """What one predictor says about the tokens of a text."""

    scores: Float[Tensor, "N"]
    """Log-probability of each token."""
    features: Float[Tensor, "N F"]
    """Features of the predictions, for a gate."""


@dataclass(frozen=True, eq=False)
class TextScores:
    """What the model and some predictors say about the tokens of a text."""

    model: Float[Tensor, "N"]
    around: Float[Tensor, "N F"]
    """Features of the neighbourhoods, for a gate."""
    parts: dict[str, PartScores]
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that each predictor took, without reading the memory."""

    def stack(self, *names: str) -> tuple[Float[Tensor, "N F"], Float[Tensor, "N P"]]:
        """Return features and scores of the model and these predictors, as `fit_gate` takes."""
        parts = [self.parts[name] for name in names]
        features = torch.cat([self.around, *(part.features for part in parts)], 1)
        return features, torch.stack([self.model, *(part.scores for part in parts)], 1)

    def join(self, other: TextScores) -> TextScores:
        """Return these scores with further predictors."""
        return TextScores(
            self.model,
            self.around,
            {**self.parts, **other.parts},
            {**self.seconds, **other.seconds},
        )


class Library:
    """The memory of one corpus, and the texts scored with it.

    Args:
        head: the output layer of the network.
        states: states along the splits; those of `train` are what the memory of the domain holds.
        k: number of neighbours to search for.
    """

    def __init__(self, head: nn.Linear, states: Mapping[str, States], k: int) -> None:
        self.head, self.states, self.k = head, dict(states), k
        order = ["train", *(name for name in states if name != "train")]
        self.keys = torch.cat([states[name].keys for name in order])
        self.labels = torch.cat([states[name].targets for name in order])
        sizes = [len(states[name].targets) for name in order]
        self.starts = {name: sum(sizes[:place]) for place, name in enumerate(order)}
        self.norms = torch.cat([part.float().square().sum(1) for part in self.keys.split(1 << 18)])
        self.scale = float(self.norms[: sizes[0]].mean())
        self.memory = mbpa.ExactMemory(
            len(self.keys), self.keys.shape[1], dtype=self.keys.dtype, device=self.keys.device
        )
        self.memory.write(states["train"].keys, states["train"].targets)
        self.model = mbpa.MbPA(
            head=head,
            memory=self.memory,
            predictor=mbpa.Parametric(),
            engine=mbpa.Engine(tolerance=math.inf, store_bytes=TABLE_BYTES),
        )
        self._found: dict[tuple[str, str], Found] = {}

    @property
    def device(self) -> torch.device:
        return self.keys.device

    @property
    def bytes_per_entry(self) -> int:
        """Bytes that an entry takes: its key in half precision, and its token."""
        return self.keys.shape[1] * self.keys.itemsize + self.labels.itemsize

    def count(self, split: str) -> int:
        """Return the number of tokens of a split."""
        return len(self.states[split].targets)

    def find(self, split: str, source: str = DOMAIN) -> Found:
        """Return the neighbours of a text, searched on first use.

        Args:
            split: name of the text.
            source: `DOMAIN` for neighbours from the training text, `TEXT` for those from the part
                of this text before each token, `BOTH` for the nearest of either.
        """
        if (split, source) not in self._found:
            if source == DOMAIN:
                found = self._search_domain(split)
            elif source == TEXT:
                found = self._search_text(split)
            else:
                found = _merge(self.find(split, DOMAIN), self.find(split, TEXT), self.k)
            self._found[split, source] = found
        return self._found[split, source]

    def restrict(self, split: str, entries: int, k: int, rows: Tensor) -> Found:
        """Return neighbours of some tokens among the first entries of the training text only."""
        keys, count = self.keys[:entries], self.count(split)
        memory = mbpa.ExactMemory(entries, keys.shape[1], dtype=keys.dtype, device=self.device)
        memory.write(keys, self.labels[:entries])
        found = _search(memory, self.states[split].keys[rows], min(k, entries))
        slots = found.slots.new_full((count, found.slots.shape[1]), -1)
        distances = found.distances.new_full(slots.shape, math.inf)
        return Found(
            slots.index_copy(0, rows, found.slots), distances.index_copy(0, rows, found.distances)
        )

    def _search_domain(self, split: str) -> Found:
        return _search(self.memory, self.states[split].keys, self.k)

    def _search_text(self, split: str) -> Found:
        """Search the part of the text before each token: labels must be known by then."""
        start, keys = self.starts[split], self.states[split].keys
        norms = self.norms[start : start + len(keys)]
        slots, distances = [], []
        for first in range(0, len(keys), SEARCH_ROWS):
            queries = keys[first : first + SEARCH_ROWS].float()
            seen = first + len(queries)
            squares = norms[first:seen, None] + norms[None, :seen]
            scores = squares.addmm(queries, keys[:seen].float().T, alpha=-2).clamp_min_(0)
            rows = torch.arange(first, seen, device=self.device)
            is_later = torch.arange(seen, device=self.device)[None] >= rows[:, None]
            nearest = scores.masked_fill_(is_later, math.inf).topk(min(self.k, seen), largest=False)
            missing = self.k - nearest.values.shape[1]
            values = nn.functional.pad(nearest.values, (0, missing), value=math.inf)
            places = nn.functional.pad(nearest.indices + start, (0, missing))
            slots.append(places.masked_fill(values == math.inf, -1).int())
            distances.append(values)
        return Found(torch.cat(slots), torch.cat(distances))

    def make_context(
        self, split: str, rows: slice | Tensor, found: Found, keys_for: int
    ) -> Context:
        """Return the input of predictors for some tokens of a text.

        Args:
            split: name of the text.
            rows: the tokens.
            found: the neighbours of the whole text.
            keys_for: number of neighbours whose keys are needed.
        """
        queries = self.states[split].keys[rows].float()
        slots, distances = found.slots[rows].long(), found.distances[rows]
        mask = slots >= 0
        there = slots.clamp_min(0)
        squares = queries.square().sum(1, keepdim=True)
        neighbors = Neighbors(
            values=self.labels[there],
            distances=distances,
            dots=((self.norms[there] + squares - distances) / 2).where(mask, 0),
            mask=mask,
            ids=slots,
            slots=slots,
            keys=self.keys[there[:, :keys_for]].float(),
            revision=self.memory.revision,
            capacity=self.memory.capacity,
        )
        return self.model.build_context(queries, neighbors)

    @torch.no_grad()
    def score(
        self,
        split: str,
        found: Found,
        parts: Mapping[str, Predictor],
        *,
        rows: Tensor | None = None,
        batch: int = 512,
        tick: Callable[[int], object] = lambda _: None,
    ) -> TextScores:
        """Score the tokens of a text with some predictors.

        Args:
            split: name of the text.
            found: the neighbours of its tokens.
            parts: the predictors by name.
            rows: the tokens to score; by default all.
            batch: number of tokens at a time.
            tick: called with the number of tokens after each batch.
        """
        chosen = torch.arange(self.count(split), device=self.device) if rows is None else rows
        keys_for = max((part.keys_for for part in parts.values()), default=0)
        most = max((part.k for part in parts.values()), default=64)
        model, around = [], []
        columns: dict[str, list[Tensor]] = {name: [] for name in parts}
        features: dict[str, list[Tensor]] = {name: [] for name in parts}
        seconds = dict.fromkeys(parts, 0.0)
        for some in chosen.split(batch):
            context = self.make_context(split, some, found.first(max(most, 64)), keys_for)
            targets = self.states[split].targets[some, None]
            model.append(context.parametric.gather(1, targets)[:, 0])
            near = context.nearest(64)
            for name, part in parts.items():
                began = self._now()
                prediction = part(context.nearest(part.k))
                seconds[name] += self._now() - began
                columns[name].append(prediction.gather(1, targets)[:, 0])
                measured = measure_features(near, [prediction])
                features[name].append(measured[:, len(NEIGHBORHOOD_FEATURES) :])
            around.append(Neighborhood.measure(near).features)
            tick(len(some))
        made = {
            name: PartScores(torch.cat(columns[name]), torch.cat(features[name])) for name in parts
        }
        return TextScores(torch.cat(model), torch.cat(around), made, seconds)

    def add_texts(self) -> None:
        """Write the other splits to the memory, so that neighbours from them can be adapted to.

        Neighbours from the domain are searched before: a text must not find itself.
        """
        others = {name: start for name, start in self.starts.items() if name != "train"}
        for name in others:
            self.find(name)
        for name, start in others.items():
            if len(self.memory) == start:
                self.memory.write(self.states[name].keys, self.states[name].targets)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _search(memory: mbpa.ExactMemory, keys: Tensor, k: int) -> Found:
    slots, distances = [], []
    for part in keys.split(SEARCH_ROWS):
        found = memory.read(part.float(), k, keys_for=0)
        slots.append(found.slots.int())
        distances.append(found.distances)
    return Found(torch.cat(slots), torch.cat(distances))


def _merge(first: Found, second: Found, k: int) -> Found:
    distances = torch.cat([first.distances, second.distances], 1)
    slots = torch.cat([first.slots, second.slots], 1)
    nearest = distances.topk(min(k, distances.shape[1]), largest=False)
    return Found(slots.gather(1, nearest.indices), nearest.values)
