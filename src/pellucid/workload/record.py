"""Writes what a server is asked as a trace of our own format, in order of arrival, as `--record` does.

A row is known when its request ends, but rows stand in order of arrival; so a row waits until everything that arrived
before it has ended. Hashing and writing happen on one thread beside the server. Rows hold lengths and chained block
hashes, which say what is shared and not what is written; token ids only where the caller gives them.
"""

from __future__ import annotations

import heapq
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pellucid.core.request import Request, SamplingParams
from pellucid.workload.trace import TraceError, TraceHeader, TraceRequest, chain_hashes, header_to_json, row_to_json

# What a replay takes where a row says nothing. It generates as many tokens as the row has, whatever had ended it.
_REPLAYED = {
    name: value
    for name, value in msgspec.to_builtins(SamplingParams(temperature=0.0)).items()
    if name not in ("max_tokens", "ignore_eos", "stop_token_ids")
}


class Ended(NamedTuple):
    """A request that ended: what was asked, when it arrived (seconds, any clock), what came out, and what was recorded
    of the run. `token_ids` says whether prompt and output may be written."""

    request: Request
    arrival: float
    output_ids: Sequence[int]
    outcome: dict[str, Any]
    token_ids: bool = False


class TraceRecorder:
    """Appends to the file at `path`, which must not hold anything yet. `began` is the moment that arrivals count from.
    Raises TraceError where it cannot be written."""

    def __init__(self, path: Path, *, block_size: int, origin: str, began: float) -> None:
        self._block_size, self._began = block_size, began
        self._encode = msgspec.json.Encoder().encode
        try:
            self._file = path.open("xb")
        except FileExistsError:
            raise TraceError(
                f"{path} exists already; a recording does not overwrite: choose another --record"
            ) from None
        except OSError as error:
            raise TraceError(f"cannot write the recording {path}: {error.strerror}") from None
        self._file.write(self._encode(header_to_json(TraceHeader(block_size, origin))) + b"\n")
        self._file.flush()
        self._queue: queue.SimpleQueue[tuple[Ended, float | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pellucid-record", daemon=True)
        self._thread.start()

    def ended(self, ended: Ended, oldest_open: float | None) -> None:
        """A request ended; the oldest one that has not arrived at `oldest_open` (None: all have ended)."""
        self._queue.put((ended, oldest_open))

    def close(self) -> None:
        """Write everything that ended, and stop. A second call does nothing."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        held: list[tuple[float, str, Ended]] = []
        while (item := self._queue.get()) is not None:
            ended, oldest_open = item
            heapq.heappush(held, (ended.arrival, ended.request.id, ended))
            while held and (oldest_open is None or held[0][0] <= oldest_open):
                self._write(heapq.heappop(held)[2])
            if self._queue.empty():
                self._file.flush()
        while held:
            self._write(heapq.heappop(held)[2])
        self._file.close()

    def _write(self, ended: Ended) -> None:
        self._file.write(self._encode(row_to_json(self._row(ended))) + b"\n")

    def _row(self, ended: Ended) -> TraceRequest:
        request = ended.request
        sampling = msgspec.to_builtins(request.sampling)
        changed = {name: value for name, value in sampling.items() if value != _REPLAYED.get(name, value)}
        return TraceRequest(
            arrival_time=max(0.0, ended.arrival - self._began),
            input_len=len(request.prompt),
            output_len=len(ended.output_ids),
            prefix_block_hash=chain_hashes(request.prompt, self._block_size),
            id=request.id,
            tenant=request.tenant,
            priority=request.priority,
            deadline_s=None if request.deadline is None else request.deadline - ended.arrival,
            input_token_ids=tuple(request.prompt) if ended.token_ids else None,
            output_token_ids=tuple(ended.output_ids) if ended.token_ids else None,
            sampling=changed or None,
            outcome=ended.outcome,
        )
