"""Tokens used per tenant and day, kept in a small SQLite file that outlives the server.

Counts gather in memory and are added to the file by a thread, at most once a second and once more at the end, so that
no request waits for a disk; a server that is killed loses at most the last second. Several servers may add to one file.
A day is a UTC date, the one on which a choice ended. What is counted is what the client was told: a choice that ended
before its first token counts nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from pellucid.core.errors import ConfigError

FILE_NAME = "usage.sqlite"
SECONDS_BETWEEN_WRITES = 1.0
COLUMNS = ("day", "tenant", "requests", "prompt_tokens", "cached_tokens", "output_tokens")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS usage (
  day TEXT NOT NULL, tenant TEXT NOT NULL, requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
  cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL, PRIMARY KEY (day, tenant)
) WITHOUT ROWID
"""
_ADD = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (day, tenant) DO UPDATE SET
  requests = requests + excluded.requests, prompt_tokens = prompt_tokens + excluded.prompt_tokens,
  cached_tokens = cached_tokens + excluded.cached_tokens, output_tokens = output_tokens + excluded.output_tokens
"""
log = logging.getLogger("pellucid.server")


class UsageRow(NamedTuple):
    """One tenant's day. `requests` counts choices, `prompt_tokens` those that were computed and not found in the
    cache."""

    day: str
    tenant: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class UsageLog:
    """Adds to the file at `path`. `clock` gives Unix seconds. All but the writing happens on one event loop."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Raises ConfigError if the file cannot be written."""
        self._path, self._clock = path, clock
        self._pending: dict[tuple[str, str], Counter[str]] = {}
        self._failed = False
        with _open(path):
            pass

    def add(self, tenant: str, *, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Count one choice that ended."""
        day = time.strftime("%Y-%m-%d", time.gmtime(self._clock()))
        counts = self._pending.setdefault((day, tenant), Counter())
        counts.update(requests=1, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, output_tokens=output_tokens)

    async def run(self) -> None:
        """Write what has gathered, once a second, for ever."""
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_WRITES)
            await self.flush()

    async def flush(self) -> None:
        """Write what has gathered. What cannot be written now stays for the next time, and is said once."""
        taken, self._pending = self._pending, {}
        if not taken:
            return
        try:
            await asyncio.shield(asyncio.to_thread(self._write, taken))
            self._failed = False
        except ConfigError as error:
            if not self._failed:
                log.error("%s; usage gathers in memory meanwhile", error)
            self._failed = True
            for key, counts in taken.items():
                self._pending.setdefault(key, Counter()).update(counts)

    def _write(self, taken: dict[tuple[str, str], Counter[str]]) -> None:
        rows = [(day, tenant, *(counts[name] for name in COLUMNS[2:])) for (day, tenant), counts in taken.items()]
        with _open(self._path) as database, database:
            database.executemany(_ADD, rows)


def read_usage(path: Path, day: str | None = None) -> list[UsageRow]:
    """What the file at `path` holds, of one day or all, by day and tenant. Raises ConfigError where there is none."""
    if not path.exists():
        raise ConfigError(f"there is no {path}; a server that was given --tenants writes it")
    with _open(path) as database:
        where, values = ("WHERE day = ?", (day,)) if day else ("", ())
        return [UsageRow(*row) for row in database.execute(f"SELECT * FROM usage {where} ORDER BY day, tenant", values)]


@contextmanager
def _open(path: Path) -> Iterator[sqlite3.Connection]:
    """The database at `path`, made if there is none; its errors, in opening and in the block, are ConfigErrors."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # who used how much is nobody else's business
        with closing(sqlite3.connect(path, timeout=5.0)) as database:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute(_SCHEMA)
            yield database
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"cannot use {path}: {error}") from None
