"""A memory in Qdrant: one collection of entries, and one that holds the state. Extra `qdrant`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mbpa.errors import MissingExtraError
from mbpa.memory.stored import Found, StoredMemory, StoredState
from mbpa.memory.validation import count, require_float32_keys

if TYPE_CHECKING:
    from qdrant_client import QdrantClient

STATE_ID = 0
IDS_PER_PAGE = 10_000


class QdrantMemory(StoredMemory):
    """Entries in a collection of Qdrant, whose index proposes candidates.

    Writes wait until they are applied on all replicas of the collection, and reads ask all of them,
    so that a read sees every write that was acknowledged before.

    Args:
        client: a `qdrant_client.QdrantClient`; it is left open.
        collection: name of the collection; it is created if it does not exist, and so is
            `<collection>-state`.
        capacity: maximum number of entries; when full, the oldest are overwritten first.
        key_dim: size or shape of a key.
        value_shape: shape of one value; `()` for class labels.
        value_dtype: an integer dtype for class labels, a floating one for regression targets.
        device: device on which results are returned.
        read_only: attach for reading; other memories may write meanwhile.
        take_over: become the writer even if another memory is registered as such, as after a crash.
        dtype: dtype of the keys; Qdrant stores float32, so float64 is refused.
        rows_per_call: entries sent to the server at a time.
    """

    def __init__(
        self,
        client: QdrantClient,
        collection: str,
        capacity: int,
        key_dim: int | Sequence[int],
        *,
        value_shape: Sequence[int] = (),
        value_dtype: torch.dtype = torch.int64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        read_only: bool = False,
        take_over: bool = False,
        rows_per_call: int = 1_000,
    ) -> None:
        try:
            from qdrant_client import models
        except ImportError as error:
            raise MissingExtraError("qdrant-client", extra="qdrant") from error
        require_float32_keys("Qdrant", dtype)
        self._models, self._client = models, client
        self.collection: str = collection
        self._rows = count("rows_per_call", rows_per_call)
        self._state = f"{collection}-state"
        super().__init__(
            capacity,
            key_dim,
            value_shape=value_shape,
            value_dtype=value_dtype,
            dtype=dtype,
            device=device,
            read_only=read_only,
            take_over=take_over,
        )

    def _load_state(self) -> StoredState | None:
        if not self._client.collection_exists(self._state):
            return None
        found = self._client.retrieve(
            self._state, [STATE_ID], with_payload=True, consistency=self._all
        )
        return StoredState(**found[0].payload) if found and found[0].payload else None

    def _save_state(self, state: StoredState) -> None:
        models = self._models
        if not self._client.collection_exists(self.collection):
            form = models.VectorParams(size=self.key_size, distance=models.Distance.EUCLID)
            self._client.create_collection(self.collection, vectors_config=form)
        if not self._client.collection_exists(self._state):
            self._client.create_collection(self._state, vectors_config={})
        point = models.PointStruct(id=STATE_ID, vector={}, payload=dict(state._asdict()))
        self._client.upsert(self._state, [point], wait=True, ordering=self._strong)

    def _list_ids(self) -> Int[Tensor, "M"]:
        return torch.tensor(list(self._scroll_ids()), dtype=torch.int64)

    def _scroll_ids(self) -> Iterator[int]:
        place: Any = None
        while True:
            page, place = self._client.scroll(
                self.collection,
                limit=IDS_PER_PAGE,
                offset=place,
                with_payload=False,
                with_vectors=False,
                consistency=self._all,
            )
            yield from (int(point.id) for point in page)
            if place is None:
                return

    def _upsert(
        self, ids: Int[Tensor, "N"], keys: Float[Tensor, "N D"], values: Shaped[Tensor, "N *V"]
    ) -> None:
        for start in range(0, len(ids), self._rows):
            rows = slice(start, start + self._rows)
            batch = self._models.Batch(
                ids=ids[rows].tolist(),
                vectors=keys[rows].float().tolist(),
                payloads=[{"value": value} for value in values[rows].tolist()],
            )
            self._client.upsert(self.collection, batch, wait=True, ordering=self._strong)

    def _fetch(
        self, ids: Int[Tensor, "N"]
    ) -> tuple[Int[Tensor, "M"], Float[Tensor, "M D"], Shaped[Tensor, "M *V"]]:
        points: list[Any] = []
        for part in ids.split(self._rows):
            points += self._client.retrieve(
                self.collection,
                part.tolist(),
                with_payload=True,
                with_vectors=True,
                consistency=self._all,
            )
        return self._decode(points)

    def _remove(self, ids: Int[Tensor, "N"]) -> None:
        for part in ids.split(self._rows):
            if len(part):
                chosen = self._models.PointIdsList(points=part.tolist())
                self._client.delete(self.collection, chosen, wait=True, ordering=self._strong)

    def _search(self, queries: Float[Tensor, "B D"], k: int) -> Found:
        asked = [
            self._models.QueryRequest(query=query, limit=k, with_payload=True, with_vector=True)
            for query in queries.float().tolist()
        ]
        answers = self._client.query_batch_points(self.collection, asked, consistency=self._all)
        return Found.stack([self._decode(answer.points) for answer in answers])

    def _decode(self, points: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
        ids = torch.tensor([int(point.id) for point in points], dtype=torch.int64)
        keys = np.array([point.vector for point in points], np.float32)
        values = torch.tensor([point.payload["value"] for point in points], dtype=self.value_dtype)
        return (
            ids.to(self.device),
            torch.from_numpy(keys).reshape(len(ids), self.key_size).to(self.device, self.dtype),
            values.reshape(len(ids), *self.value_shape).to(self.device),
        )

    @property
    def _all(self) -> Any:
        return self._models.ReadConsistencyType.ALL

    @property
    def _strong(self) -> Any:
        return self._models.WriteOrdering.STRONG
