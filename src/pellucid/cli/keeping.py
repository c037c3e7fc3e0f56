"""What a server keeps of its requests beside answering them: the store of ledgers, and a recording."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from pellucid.planner.profile import state_directory
from pellucid.server.config import ServedModel, ServerConfig
from pellucid.server.ledgers import LedgerDesk, Served
from pellucid.telemetry.ledger_json import reply_fields
from pellucid.telemetry.store import Store
from pellucid.workload.record import Ended, TraceRecorder


def store_path(setting: str) -> Path | None:
    """Where `--store` points: a file, or None for `off`."""
    if setting == "off":
        return None
    return state_directory(os.environ) / "store.sqlite" if setting == "auto" else Path(setting)


@contextmanager
def keep_ledgers(desk: LedgerDesk, config: ServerConfig, served: ServedModel) -> Iterator[None]:
    """While the block runs, what the desk closes is kept as `config` says; all of it is written when it ends. Raises
    StoreError or TraceError where a file cannot be used."""
    with ExitStack() as open_files:
        path = store_path(config.store)
        if path is not None:
            store = open_files.enter_context(closing(Store(path)))
            desk.store = path
            desk.listeners.append(lambda ended: store.put(ended.record))
        if config.record is not None:
            block_size, began = served.limits.block_size, time.monotonic()
            recorder = open_files.enter_context(
                closing(TraceRecorder(config.record, block_size=block_size, origin=served.name, began=began))
            )
            desk.listeners.append(
                lambda ended: recorder.ended(_for_trace(ended, token_ids=config.record_text), desk.oldest_arrival)
            )
        yield


def _for_trace(ended: Served, *, token_ids: bool) -> Ended:
    record = ended.record
    outcome = {
        "status": record.reason,
        "ttft_seconds": record.ledger.first_token_seconds,
        "cached_tokens": record.ledger.tokens.cached,
        "ledger": reply_fields(record.ledger),
    }
    return Ended(ended.request, ended.arrival, ended.output_ids, outcome, token_ids)
