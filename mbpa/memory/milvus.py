"""A memory in Milvus: one collection of entries, and one that holds the state. Extra `milvus`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mbpa.errors import MissingExtraError
from mbpa.memory.stored import Found, StoredMemory, StoredState
from mbpa.memory.validation import count, require_float32_keys

if TYPE_CHECKING:
    from pymilvus import MilvusClient

IDS_PER_PAGE = 10_000
MAX_CANDIDATES = 16_384  # per query, of Milvus
STRONG = "Strong"  # the default of Milvus reads what may be seconds old


class MilvusMemory(StoredMemory):
    """Entries in a collection of Milvus, whose index proposes candidates.

    Reads are strongly consistent: they see every write that was acknowledged before.

    Args:
        client: a `pymilvus.MilvusClient`, of a server or of a file (Milvus Lite); it is left open.
        collection: name of the collection; it is created if it does not exist, and so is
            `<collection>_state`.
        capacity: maximum number of entries; when full, the oldest are overwritten first.
        key_dim: size or shape of a key.
        value_shape: shape of one value; `()` for class labels.
        value_dtype: an integer dtype for class labels, a floating one for regression targets.
        device: device on which results are returned.
        read_only: attach for reading; other memories may write meanwhile.
        take_over: become the writer even if another memory is registered as such, as after a crash.
        dtype: dtype of the keys; Milvus stores float32, so float64 is refused.
        index_type: index of a new collection, such as FLAT, HNSW or AUTOINDEX.
        index_params: its settings, such as `{"M": 16, "efConstruction": 200}` of HNSW.
        search_params: settings of each search, such as `{"ef": 256}` of HNSW: a wider search finds
            more of the nearest entries. By default, the server's.
        rows_per_call: entries sent to the server at a time.
    """

    def __init__(
        self,
        client: MilvusClient,
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
        index_type: str = "AUTOINDEX",
        index_params: dict[str, Any] | None = None,
        search_params: dict[str, Any] | None = None,
        rows_per_call: int = 1_000,
    ) -> None:
        try:
            from pymilvus import DataType
        except ImportError as error:
            raise MissingExtraError("pymilvus", extra="milvus") from error
        require_float32_keys("Milvus", dtype)
        self._types, self._client = DataType, client
        self.collection: str = collection
        self._rows = count("rows_per_call", rows_per_call)
        self._index = index_type, index_params or {}
        self._search_params = {"params": search_params or {}}
        self._state = f"{collection}_state"
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
        if not self._client.has_collection(self._state):
            return None
        rows = self._client.query(
            self._state, ids=[0], output_fields=["value"], consistency_level=STRONG
        )
        return StoredState(**rows[0]["value"]) if rows else None

    def _save_state(self, state: StoredState) -> None:
        if not self._client.has_collection(self.collection):
            self._create_collection(self.collection, self.key_size, *self._index)
        if not self._client.has_collection(self._state):
            self._create_collection(self._state, 2, "FLAT", {})  # a collection must have vectors
        row = {"id": 0, "key": [0.0, 0.0], "value": dict(state._asdict())}
        self._client.upsert(self._state, [row])

    def _create_collection(self, name: str, size: int, index: str, params: dict[str, Any]) -> None:
        types = self._types
        schema = self._client.create_schema(auto_id=False)
        schema.add_field("id", types.INT64, is_primary=True)
        schema.add_field("key", types.FLOAT_VECTOR, dim=size)
        schema.add_field("value", types.JSON)
        indexes = self._client.prepare_index_params()
        indexes.add_index("key", index_type=index, metric_type="L2", params=params)
        self._client.create_collection(
            name, schema=schema, index_params=indexes, consistency_level=STRONG
        )

    def _list_ids(self) -> Int[Tensor, "M"]:
        pages = self._client.query_iterator(
            self.collection,
            batch_size=IDS_PER_PAGE,
            filter="id >= 0",
            output_fields=["id"],
            consistency_level=STRONG,
        )
        ids: list[int] = []
        while page := pages.next():
            ids += [row["id"] for row in page]
        pages.close()
        return torch.tensor(ids, dtype=torch.int64)

    def _upsert(
        self, ids: Int[Tensor, "N"], keys: Float[Tensor, "N D"], values: Shaped[Tensor, "N *V"]
    ) -> None:
        columns = ids.tolist(), keys.float().cpu().numpy(), values.tolist()
        rows = [
            {"id": id_, "key": key, "value": {"value": value}}
            for id_, key, value in zip(*columns, strict=True)
        ]
        for start in range(0, len(rows), self._rows):
            self._client.upsert(self.collection, rows[start : start + self._rows])

    def _fetch(
        self, ids: Int[Tensor, "N"]
    ) -> tuple[Int[Tensor, "M"], Float[Tensor, "M D"], Shaped[Tensor, "M *V"]]:
        rows: list[Any] = []
        for part in ids.split(self._rows):
            rows += self._client.query(
                self.collection,
                ids=part.tolist(),
                output_fields=["id", "key", "value"],
                consistency_level=STRONG,
            )
        return self._decode(rows)

    def _remove(self, ids: Int[Tensor, "N"]) -> None:
        for part in ids.split(self._rows):
            if len(part):
                self._client.delete(self.collection, ids=part.tolist())

    def _search(self, queries: Float[Tensor, "B D"], k: int) -> Found:
        answers = self._client.search(
            self.collection,
            data=queries.float().cpu().numpy().tolist(),
            anns_field="key",
            limit=min(k, MAX_CANDIDATES),
            search_params=self._search_params,
            output_fields=["key", "value"],
            consistency_level=STRONG,
        )
        return Found.stack(
            [
                self._decode([{"id": hit["id"], **hit["entity"]} for hit in answer])
                for answer in answers
            ]
        )

    def _decode(self, rows: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
        ids = torch.tensor([row["id"] for row in rows], dtype=torch.int64)
        keys = np.array([row["key"] for row in rows], np.float32)
        values = torch.tensor([row["value"]["value"] for row in rows], dtype=self.value_dtype)
        return (
            ids.to(self.device),
            torch.from_numpy(keys).reshape(len(ids), self.key_size).to(self.device, self.dtype),
            values.reshape(len(ids), *self.value_shape).to(self.device),
        )
