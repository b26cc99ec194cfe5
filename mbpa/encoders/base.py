"""The interface of a frozen encoder, which turns texts or pictures into keys, and a cache on disk.

`mbpa.encoders.text` and `mbpa.encoders.image` provide encoders. The cache looks up embeddings by
content.
"""

from __future__ import annotations

import abc
import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, Literal, TypeVar

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from mbpa import files

ITEMS_PER_WRITE = 4096
Item = TypeVar("Item", str, bytes)


class Encoder(abc.ABC, Generic[Item]):
    """A frozen encoder that turns texts or pictures into keys of unit norm.

    Pictures are files as returned by `mbpa.encoders.pictures.standardize`.
    """

    name: str
    key_dim: int
    takes: Literal["texts", "images"]
    can_be_cached: bool = True
    """Whether encoders with other keys are sure to have another fingerprint."""

    @abc.abstractmethod
    def __call__(self, items: Sequence[Item], /) -> Float[Tensor, "B D"]:
        """Return keys in float32; the key of an item does not depend on the others (to 1e-6).

        Args:
            items: texts, or picture files as bytes.
        """

    @property
    def fingerprint(self) -> str:
        """Hash of everything that keys depend on; encoders with the same one may share a cache."""
        return hashlib.sha256(self.name.encode()).hexdigest()

    def matches(self, fingerprint: str) -> bool:
        """Return whether keys of the encoder with this fingerprint can be used with this one.

        Args:
            fingerprint: fingerprint that a run has stored.
        """
        return fingerprint == self.fingerprint


def embed_items(
    encoder: Encoder[Item],
    items: Sequence[Item],
    cache: Path | None = None,
    tick: Callable[[int], object] | None = None,
    *,
    items_per_write: int = ITEMS_PER_WRITE,
) -> Float[Tensor, "N D"]:
    """Return the keys of items; each is embedded once and then looked up on disk by its content.

    Any number of processes may use a cache at the same time. It can be deleted whenever none does.

    Args:
        encoder: embeds items that are not in the cache.
        items: texts, or picture files.
        cache: directory of the cache, created if needed; `None` for no cache. Not used if the
            encoder's keys cannot be cached.
        tick: called with the number of further items that are done.
        items_per_write: number of items embedded between writes to the cache; an interrupted
            call has to embed at most this many again.
    """
    digests = [hashlib.sha256(_to_bytes(item)).digest() for item in items]
    content = dict(zip(digests, items, strict=True))
    folder = None
    if cache is not None and encoder.can_be_cached:
        folder = Path(cache) / f"{encoder.takes}-{encoder.fingerprint[:16]}"
    keys_by_digest = {} if folder is None else _read_cache(folder, set(content), encoder.key_dim)
    missing = [digest for digest in content if digest not in keys_by_digest]
    if tick is not None:
        tick(sum(digest in keys_by_digest for digest in digests))
    for start in range(0, len(missing), items_per_write):
        part = missing[start : start + items_per_write]
        keys = encoder([content[digest] for digest in part]).cpu()
        keys_by_digest |= dict(zip(part, keys, strict=True))
        if folder is not None:
            _write_cache(folder, part, keys)
        if tick is not None:
            done = set(part)
            tick(sum(digest in done for digest in digests))
    if not digests:
        return torch.empty(0, encoder.key_dim)
    return torch.stack([keys_by_digest[digest] for digest in digests])


def _to_bytes(item: str | bytes) -> bytes:
    return item.encode("utf-8", "surrogatepass") if isinstance(item, str) else item


def compute_fingerprint(directory: Path, *, version: int) -> str:
    """Return a hash of a model's files and of the version of the code that computes the keys."""
    digest = hashlib.sha256(str(version).encode())
    for path in sorted(directory.rglob("*")):
        if path.suffix in {".json", ".safetensors", ".bin", ".txt", ".model"}:
            name = path.relative_to(directory).as_posix()
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{name}\0{content}\0".encode())
    return digest.hexdigest()


# The cache: files of digests and keys that are written atomically and never changed, so that no
# process waits for another. Two that embed the same items at once both write them.


def _read_cache(folder: Path, wanted: set[bytes], key_dim: int) -> dict[bytes, Tensor]:
    """Return the cached keys among those wanted, by digest."""
    found: dict[bytes, Tensor] = {}
    for digests, keys in _read_shards(folder):
        if keys.shape[1:] != (key_dim,) or len(digests) != len(keys):
            continue
        for digest, key in zip(digests, keys, strict=True):
            if digest in wanted:
                found.setdefault(digest, key)
    return found


def _read_shards(folder: Path) -> Iterator[tuple[list[bytes], Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        try:
            tensors = load_file(path)
            yield [bytes(row) for row in tensors["digests"].numpy()], tensors["keys"]
        except FileNotFoundError:
            continue  # another process has deleted it
        except (SafetensorError, KeyError):
            warnings.warn(f"{path} is damaged: its items are embedded again", stacklevel=4)
            path.unlink(missing_ok=True)


def _write_cache(folder: Path, digests: Sequence[bytes], keys: Float[Tensor, "N D"]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).reshape(-1, 32)
    path = folder / f"{hashlib.sha256(b''.join(digests)).hexdigest()[:16]}.safetensors"
    files.replace_file(path, save({"digests": rows, "keys": keys.contiguous()}))
