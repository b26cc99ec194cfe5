"""A memory in a SQLite file: small, exhaustive, and shared by several processes."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mbpa.memory import Found, StoredMemory, StoredState


class SqliteMemory(StoredMemory):
    """Every entry is a row; a change is committed row by row, with no transactions."""

    def __init__(self, path: Path, capacity: int, key_dim: int, **named: Any) -> None:
        self.path = path
        self.connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self.connection.execute("CREATE TABLE IF NOT EXISTS state (name PRIMARY KEY, value)")
        self.connection.execute(
            "CREATE TABLE IF NOT EXISTS entries (id INTEGER PRIMARY KEY, key BLOB, value BLOB)"
        )
        super().__init__(capacity, key_dim, **named)

    def _load_state(self) -> StoredState | None:
        row = self.connection.execute("SELECT value FROM state").fetchone()
        return None if row is None else StoredState(*json.loads(row[0]))

    def _save_state(self, state: StoredState) -> None:
        self.connection.execute(
            "INSERT OR REPLACE INTO state VALUES ('state', ?)", (json.dumps(state),)
        )

    def _list_ids(self) -> Tensor:
        rows = self.connection.execute("SELECT id FROM entries").fetchall()
        return torch.tensor([row[0] for row in rows], dtype=torch.int64)

    def _upsert(self, ids: Tensor, keys: Tensor, values: Tensor) -> None:
        for id_, key, value in zip(ids.tolist(), keys.numpy(), values.numpy(), strict=True):
            row = id_, key.tobytes(), value.tobytes()
            self.connection.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", row)

    def _fetch(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        marks = ",".join("?" * len(ids))
        query = f"SELECT id, key, value FROM entries WHERE id IN ({marks})"
        return self._decode(self.connection.execute(query, ids.tolist()).fetchall())

    def _remove(self, ids: Tensor) -> None:
        for id_ in ids.tolist():
            self.connection.execute("DELETE FROM entries WHERE id = ?", (id_,))

    def _search(self, queries: Tensor, k: int) -> Found:
        rows = self.connection.execute("SELECT id, key, value FROM entries").fetchall()
        ids, keys, values = self._decode(rows)
        count = len(queries)
        return Found(*(part.expand(count, *part.shape) for part in (ids, keys, values)))

    def _disconnect(self) -> None:
        self.connection.close()

    def _decode(self, rows: Sequence[tuple[int, bytes, bytes]]) -> tuple[Tensor, Tensor, Tensor]:
        def stack(place: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            kind = torch.empty(0, dtype=dtype).numpy().dtype
            data = np.frombuffer(b"".join(row[place] for row in rows), kind).copy()
            return torch.from_numpy(data).reshape(len(rows), *shape)

        ids = torch.tensor([row[0] for row in rows], dtype=torch.int64)
        keys = stack(1, (self.key_size,), self.dtype)
        return ids, keys, stack(2, self.value_shape, self.value_dtype)
