"""The ledgers of past requests in one SQLite file: written beside the server, readable when it is gone.

`Store.put` only appends to a queue; one thread writes what has gathered, several times a second, in one transaction. So
neither a step nor the event loop ever waits for a disk. The file is bounded by age and by size, the oldest rows go
first. It holds token counts, times, ids and names of tenants, never text, and only its owner can read it. Several
processes may read and write it at once (write-ahead log).
"""

from __future__ import annotations

import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pellucid.core.errors import PellucidError
from pellucid.core.ledger import LedgerReport

log = logging.getLogger("pellucid.store")

MAX_AGE_SECONDS = 14 * 86_400.0
MAX_BYTES = 256 << 20
SCHEMA = 1
_GATHER_SECONDS = 0.25
_MAX_QUEUED = 100_000  # a disk that hangs costs memory up to here, and rows after it
_TRIM_SECONDS = 30.0
_PAGES_AT_ONCE = 2000

_TABLE = """
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY, finished_at REAL NOT NULL, tenant TEXT NOT NULL, reason TEXT NOT NULL,
    e2e_seconds REAL NOT NULL, first_token_seconds REAL, ledger BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS requests_by_time ON requests (finished_at);
"""
_INSERT = "INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?, ?, ?, ?)"

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(LedgerReport).decode


class StoreError(PellucidError):
    """A store that cannot be opened or read. The message names the file and what to change."""


class StoredRequest(msgspec.Struct, frozen=True):
    """One request that ended. `finished_at` is in Unix seconds; `reason` is "stop", "length", "disconnect", "error" or
    why else it ended; `ledger` covers arrival to last byte."""

    id: str
    tenant: str
    finished_at: float
    reason: str
    ledger: LedgerReport


class Store:
    """Writes requests to the file at `path`, which is made if need be. Raises StoreError where that is impossible."""

    def __init__(self, path: Path, *, max_age_seconds: float = MAX_AGE_SECONDS, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self.num_dropped = 0  # rows that were lost because the disk did not keep up or failed
        self._max_age_seconds, self._max_bytes = max_age_seconds, max_bytes
        self._queue: queue.SimpleQueue[StoredRequest | None] = queue.SimpleQueue()
        self._trimmed_at = 0.0
        _prepare(path)
        self._thread = threading.Thread(target=self._run, name="pellucid-store", daemon=True)
        self._thread.start()

    def put(self, request: StoredRequest) -> None:
        """Keep this request. Never waits."""
        if self._queue.qsize() >= _MAX_QUEUED:
            self.num_dropped += 1
            return
        self._queue.put(request)

    def close(self) -> None:
        """Write what is queued and stop. A second call does nothing."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        connection = _connect(self.path)
        open_ = True
        while open_:
            rows, open_ = self._gather()
            try:
                self._write(connection, rows)
            except sqlite3.Error as error:
                self.num_dropped += len(rows)
                log.warning("%s: %d requests were not kept: %s", self.path, len(rows), error)
        connection.close()

    def _gather(self) -> tuple[list[StoredRequest], bool]:
        """What arrives within a moment of the first; False once the store was closed."""
        first = self._queue.get()
        if first is None:
            return [], False
        rows = [first]
        until = time.monotonic() + _GATHER_SECONDS
        while (left := until - time.monotonic()) > 0.0:
            try:
                row = self._queue.get(timeout=left)
            except queue.Empty:
                break
            if row is None:
                return rows, False
            rows.append(row)
        return rows, True

    def _write(self, connection: sqlite3.Connection, rows: list[StoredRequest]) -> None:
        with connection:
            connection.executemany(_INSERT, map(_columns, rows))
        if time.monotonic() - self._trimmed_at > _TRIM_SECONDS:
            self._trimmed_at = time.monotonic()
            self._trim(connection)

    def _trim(self, connection: sqlite3.Connection) -> None:
        """Delete what is too old, then the oldest tenth until the file is small enough."""
        with connection:
            connection.execute("DELETE FROM requests WHERE finished_at < ?", (time.time() - self._max_age_seconds,))
        while _used_bytes(connection) > self._max_bytes:
            (num_rows,) = connection.execute("SELECT count(*) FROM requests").fetchone()
            if not num_rows:
                return
            oldest = "SELECT id FROM requests ORDER BY finished_at LIMIT ?"
            with connection:
                connection.execute(f"DELETE FROM requests WHERE id IN ({oldest})", (num_rows // 10 + 1,))
        connection.execute(f"PRAGMA incremental_vacuum({_PAGES_AT_ONCE})").fetchall()


class StoreReader:
    """Reads a store, while a server writes it or after. Raises StoreError if there is none at `path`."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise StoreError(f"{path}: there is no store; serve with --store {path}, or name another with --store")
        self._path = path
        self._connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)

    def get(self, request_id: str) -> StoredRequest | None:
        """The request of this id. The beginning of an id will do where it fits only one."""
        rows = list(self._select("id = ?", (request_id,), limit=1))
        if not rows:
            rows = list(self._select("id >= ? AND id < ?", (request_id, request_id + "\U0010ffff"), limit=2))
        return rows[0] if len(rows) == 1 else None

    def slowest(self, count: int, *, tenant: str | None = None, since: float = 0.0) -> list[StoredRequest]:
        """The requests that took longest, of those that finished after `since` (Unix seconds)."""
        return list(self._filtered(tenant, since, order="e2e_seconds DESC", limit=count))

    def all(self, *, tenant: str | None = None, since: float = 0.0) -> Iterator[StoredRequest]:
        """All requests that finished after `since`, newest first."""
        return self._filtered(tenant, since)

    def close(self) -> None:
        self._connection.close()

    def _filtered(
        self, tenant: str | None, since: float, order: str = "finished_at DESC", limit: int = -1
    ) -> Iterator[StoredRequest]:
        where, values = "finished_at >= ?", [since]
        if tenant is None:
            return self._select(where, tuple(values), order=order, limit=limit)
        return self._select(where + " AND tenant = ?", (*values, tenant), order=order, limit=limit)

    def _select(
        self, where: str, values: tuple[Any, ...], *, order: str = "finished_at DESC", limit: int = -1
    ) -> Iterator[StoredRequest]:
        columns = "id, tenant, finished_at, reason, ledger"
        query = f"SELECT {columns} FROM requests WHERE {where} ORDER BY {order} LIMIT {limit}"
        try:
            for request_id, tenant, finished_at, reason, ledger in self._connection.execute(query, values):
                yield StoredRequest(request_id, tenant, finished_at, reason, decode(ledger))
        except (sqlite3.DatabaseError, msgspec.MsgspecError) as error:
            raise StoreError(f"{self._path} is not a store of this version: {error}") from None


def _columns(request: StoredRequest) -> tuple[Any, ...]:
    ledger = request.ledger
    times = (ledger.e2e_seconds, ledger.first_token_seconds)
    return (request.id, request.finished_at, request.tenant, request.reason, *times, encode(ledger))


def _prepare(path: Path) -> None:
    """Make the file, readable by its owner only, and its table."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise StoreError(f"cannot write the store {path}: {error.strerror}; choose another with --store") from None
    try:
        connection = _connect(path)
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, SCHEMA):
            raise StoreError(f"{path} is a store of version {version}; this program writes version {SCHEMA}")
        connection.executescript(_TABLE)
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
        connection.close()
    except sqlite3.Error as error:
        raise StoreError(f"cannot use {path} as a store: {error}; choose another with --store") from None


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=10.0)
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def _used_bytes(connection: sqlite3.Connection) -> int:
    (pages,), (free,), (size,) = (
        connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)
