"""A trace is a header and a stream of `TraceRequest`: what was asked, when, and which prompt blocks it shares.

Every file format is read into this one frozen value (`workload/formats`), and one function, `to_request`, turns it
into the core's `Request`, so a replay against a server, a simulation and an offline analysis see the same workload.

Invariants of a well-formed trace (checked by `lint.py`, not here, so that a bad trace can be looked at): times are
seconds from the start and never decrease; `prefix_block_hash` holds one id for each *full* block of the prompt and
ids chain (an id names its block and everything before it); a partly filled last block, where the source names one, is
`tail_block_hash` and never counts as a hit for a different prompt.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from pellucid.core.errors import ConfigError, PellucidError
from pellucid.core.request import Request, SamplingParams

TRACE_VERSION = 1
DEFAULT_BLOCK_SIZE = 16

BlockHash = int | str
Progress = Callable[[str, float], None]
"""Told the stage of a long piece of work and the share of that stage that is done, 0 to 1."""
PROGRESS_ROWS = 5000  # read between two reports


class TraceError(PellucidError):
    """A trace that cannot be read, written or used. The message names file, line, field, value and expectation."""


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One row of a trace.

    `arrival_time` is in seconds from the start; `input_len` and `output_len` are tokens. `turn` counts from 0 inside a
    `session`; `parent` is the id of the row that this one continues. `outcome` is what a recorded run measured, as the
    recorder wrote it. `extra` holds fields of the source that have no place here; they are written back unchanged.
    """

    arrival_time: float
    input_len: int
    output_len: int
    prefix_block_hash: tuple[BlockHash, ...] = ()
    tail_block_hash: BlockHash | None = None
    id: str | None = None
    tenant: str = ""
    session: str = ""
    turn: int | None = None
    parent: str | None = None
    priority: int = 0
    deadline_s: float | None = None
    input_token_ids: tuple[int, ...] | None = None
    output_token_ids: tuple[int, ...] | None = None
    sampling: dict[str, Any] | None = None
    outcome: dict[str, Any] | None = None
    extra: dict[str, Any] = {}


class Transform(msgspec.Struct, frozen=True, omit_defaults=True):
    """One change made to a trace: its name, its arguments (seed included) and the sha256 of the bytes it was applied
    to."""

    name: str
    arguments: dict[str, Any] = {}
    source_sha256: str = ""


class TraceHeader(msgspec.Struct, frozen=True):
    """What the rows mean: tokens per block of `prefix_block_hash` (0: the trace has no hashes), where the rows come
    from, and every transform applied since."""

    block_size: int
    origin: str = ""
    transforms: tuple[Transform, ...] = ()

    def after(self, transform: Transform) -> TraceHeader:
        """This header with one more transform recorded."""
        return msgspec.structs.replace(self, transforms=(*self.transforms, transform))


def chain_hashes(token_ids: Sequence[int], block_size: int) -> tuple[int, ...]:
    """Ids of the full blocks of `token_ids`, each covering its block and all before it.

    63-bit integers cut from a chained 128-bit BLAKE2b digest over little-endian 32-bit token ids, so that they survive
    any JSON reader and any numpy integer column. Meant for measuring reuse, not for trusting a cache with.
    """
    ids: list[int] = []
    digest = b""
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = struct.pack(f"<{block_size}I", *token_ids[start : start + block_size])
        digest = hashlib.blake2b(digest + block, digest_size=16).digest()
        ids.append(int.from_bytes(digest[:8], "little") >> 1)
    return tuple(ids)


def to_request(row: TraceRequest, *, request_id: str, cache_key: bytes = b"") -> Request:
    """The core's Request for one row: the only way from a trace to the scheduler.

    The prompt is the row's token ids, or a `range` of the right length with the block hashes as keys. The row
    generates exactly `output_len` tokens (`ignore_eos`) unless its own `sampling` says otherwise. Raises TraceError
    for a row that no engine can serve (an empty prompt or no output) or whose sampling is invalid.
    """
    if row.input_len < 1 or row.output_len < 1:
        raise TraceError(
            f"request {request_id}: input_len {row.input_len}, output_len {row.output_len}; both must be at least 1 to "
            f"be served (drop such rows with `pellucid trace sample --drop-empty`)"
        )
    settings: dict[str, Any] = {"max_tokens": row.output_len, "temperature": 0.0, "ignore_eos": True}
    settings.update(row.sampling or {})
    try:
        sampling = SamplingParams(**settings)
    except (TypeError, ConfigError) as error:
        raise TraceError(f"request {request_id}: sampling {row.sampling}: {error}") from None
    has_tokens = row.input_token_ids is not None
    return Request(
        id=request_id,
        prompt=row.input_token_ids if row.input_token_ids is not None else range(row.input_len),
        sampling=sampling,
        arrival=row.arrival_time,
        tenant=row.tenant,
        priority=row.priority,
        deadline=None if row.deadline_s is None else row.arrival_time + row.deadline_s,
        cache_key=cache_key,
        block_keys=None if has_tokens else row.prefix_block_hash,
    )


_FIELDS = tuple(name for name in TraceRequest.__struct_fields__ if name != "extra")
_DEFAULTS: dict[str, Any] = {"tenant": "", "session": "", "priority": 0, "prefix_block_hash": ()}
_REQUIRED = ("arrival_time", "input_len", "output_len")


def row_to_json(row: TraceRequest) -> dict[str, Any]:
    """The row as it stands in the file: the required fields, what differs from its default, then unknown fields."""
    out: dict[str, Any] = {}
    for name in _FIELDS:
        value = getattr(row, name)
        if name in _REQUIRED or value != _DEFAULTS.get(name):
            out[name] = value
    out.update(row.extra)
    return out


def header_to_json(header: TraceHeader) -> dict[str, Any]:
    """The header line."""
    return {
        "pellucid_trace": TRACE_VERSION,
        "block_size": header.block_size,
        "time_unit": "s",
        "origin": header.origin,
        "transforms": list(header.transforms),
    }


def write_trace(target: str | os.PathLike[str] | IO[bytes], header: TraceHeader, rows: Iterable[TraceRequest]) -> int:
    """Write our own format; returns the number of rows. A path ending in .gz is compressed (with no time stamp inside,
    so equal traces are equal bytes). A path appears only when complete."""
    encode = msgspec.json.Encoder().encode
    num_rows = 0
    with _sink(target) as out:
        out.write(encode(header_to_json(header)) + b"\n")
        for row in rows:
            out.write(encode(row_to_json(row)) + b"\n")
            num_rows += 1
    return num_rows


@contextmanager
def _sink(target: str | os.PathLike[str] | IO[bytes]) -> Iterator[IO[bytes]]:
    if not isinstance(target, (str, os.PathLike)):
        yield target
        return
    path = Path(target)
    if not path.parent.is_dir():
        raise TraceError(f"cannot write {path}: the folder {path.parent} does not exist")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as raw:
            if path.suffix == ".gz":
                with gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed:
                    yield packed  # type: ignore[misc]
            else:
                yield raw
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def file_sha256(path: str | os.PathLike[str]) -> str:
    """The hex sha256 of a file's bytes, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
