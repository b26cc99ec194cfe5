"""A model as a directory: memory, predictor, a linear or grown head, and digests of weights.

The network itself is not saved. Its digests tell whether a model is loaded around the same weights
again, since keys are meaningful only to the embedding that computed them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mbpa.checkpoint import load_checkpoint, save_checkpoint
from mbpa.errors import CheckpointError
from mbpa.memory import Entries, ExactMemory, GraphMemory, Memory
from mbpa.memory.schema import parse_schema
from mbpa.modules.embedding import Embedding, digest_weights, list_weights
from mbpa.modules.head import Head
from mbpa.modules.split import grow
from mbpa.predictors import Predictor
from mbpa.serialization import describe, restore_predictor


def save_model(
    directory: str | os.PathLike[str],
    memory: Memory,
    predictor: Predictor,
    embedding: Embedding,
    head: Head,
) -> None:
    """Save the parts of a model to a directory atomically."""
    with memory.lock:
        entries = memory.entries()
        held = {"type": type(memory).__name__, **memory.schema, "next_id": memory.next_id}
        if isinstance(memory, GraphMemory):
            held["settings"] = memory.settings
    tensors = {"memory": dict(entries._asdict())}
    if head.is_ours or type(head.module) is nn.Linear:
        tensors["head"] = dict(head.module.state_dict())
    description = {
        "memory": held,
        "predictor": describe(predictor),
        "grown_classes": head.output_shape[0] if head.is_ours else None,
        "weights": {
            "embed": digest_weights(embedding.weights()),
            "head": digest_weights(list_weights(head.module)),
        },
    }
    save_checkpoint(directory, tensors=tensors, description=description)


@dataclass(frozen=True, eq=False)
class SavedModel:
    """What `save_model` saved."""

    manifest: str
    """Path of the file that describes it."""
    memory: dict[str, Any]
    predictor: Any
    entries: Entries
    head: dict[str, Tensor]
    """Empty if the head was neither linear nor grown."""
    grown_classes: int | None
    weights: dict[str, str | None]
    """Digests of the weights of `embed` and `head`; none in early checkpoints."""

    @classmethod
    def read(cls, directory: str | os.PathLike[str]) -> SavedModel:
        """Read and verify what is in a directory."""
        checkpoint = load_checkpoint(directory)
        description, tensors = checkpoint.description, checkpoint.tensors
        manifest = os.path.join(directory, "manifest.json")
        with _require_description(manifest):
            return cls(
                manifest=manifest,
                memory=description["memory"],
                predictor=description["predictor"],
                entries=Entries(**tensors["memory"]),
                head=tensors.get("head", {}),
                grown_classes=description["grown_classes"],
                weights=dict(description.get("weights", {})),
            )

    def restore_predictor(self) -> Predictor:
        """Return the predictor; raise `ValueError` if it has parts of the user's own."""
        with _require_description(self.manifest):
            return restore_predictor(self.predictor)

    def fill(self, memory: Memory | None, device: torch.device | None) -> Memory:
        """Return this memory, or a new one like the saved one, with the saved entries.

        Args:
            memory: its content is replaced.
            device: of a new memory, if it can be on a GPU.
        """
        with _require_description(self.manifest):
            if memory is None:
                memory = _make_memory(self.memory, device)
            ids, keys, values = self.entries
            entries = Entries(ids, keys.to(memory.device), values.to(memory.device))
            memory.restore(entries, self.memory["next_id"])
        return memory

    def make_head(self) -> nn.Linear:
        """Return the saved head, which must be linear."""
        if "weight" not in self.head:  # the layers of other heads have names
            raise ValueError("the head of this model was not saved, or is not linear: pass head=")
        classes, key_dim = self.head["weight"].shape
        dtype = self.head["weight"].dtype
        head = nn.Linear(key_dim, classes, bias="bias" in self.head, dtype=dtype)
        head.load_state_dict(self.head)
        return head

    def grow_head(self, head: nn.Module) -> nn.Module:
        """Return a grown copy of the head with the saved weights."""
        assert self.grown_classes is not None
        try:
            grown = grow(head, self.grown_classes)
            grown.load_state_dict(self.head)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"head must be the one the model was saved with: {error}") from error
        return grown

    def check_weights(self, embed: Callable[..., Tensor] | None, head: nn.Module | None) -> None:
        """Raise `ValueError` if these modules have other weights than those it was saved with.

        Args:
            embed: `None` if keys come from elsewhere; functions are not compared either.
            head: `None` if the saved one is used. One that was grown has the saved weights anyway.
        """
        found: dict[str, str | None] = {}
        if embed is not None:
            own_head = self._find_head(embed) if head is None else head
            found["embed"] = digest_weights(Embedding(embed, own_head).weights())
        if head is not None and self.grown_classes is None:
            found["head"] = digest_weights(list_weights(head))
        for name, digest in found.items():
            saved = self.weights.get(name)
            if digest is not None and saved is not None and digest != saved:
                keys = "the keys in the memory were computed with those, and " * (name == "embed")
                raise ValueError(
                    f"{name} must have the weights that the model was saved with, got others: "
                    f"{keys}its answers would change. Load the weights of that time into {name}, "
                    "or pass allow_other_weights=True if this is intended"
                )

    def _find_head(self, embed: Callable[..., Tensor]) -> nn.Module:
        """Return the saved head if it is a part of this embedding, whose digest leaves it out."""
        parts = embed.modules() if isinstance(embed, nn.Module) else ()
        for part in parts:
            is_like_it = type(part) is nn.Linear and part.weight.shape == self.head["weight"].shape
            if is_like_it and digest_weights(list_weights(part)) == self.weights.get("head"):
                return part
        return nn.Identity()


@contextmanager
def _require_description(manifest: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{manifest} does not describe an MbPA model") from error


def _make_memory(saved: dict[str, Any], device: torch.device | None) -> Memory:
    if saved["type"] == GraphMemory.__name__:
        return GraphMemory(**parse_schema(saved), **saved["settings"])
    if saved["type"] != ExactMemory.__name__:
        raise ValueError(f"the saved memory was a {saved['type']}: pass an empty one as memory=")
    return ExactMemory(**parse_schema(saved), device=device or "cpu")
