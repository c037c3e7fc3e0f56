"""Changes to a trace: each one named, seeded where it draws, and recorded in the header with what it was applied to.

A transform takes the header and the rows and returns both. Applied to the same file with the same arguments it gives
the same rows on every machine, so a header identifies exactly what was replayed. All of them stream except
`sort_rows`, `merge` of unsorted files, and `dequantize`, which holds the rows of one tick.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from pellucid.workload.trace import BlockHash, TraceError, TraceHeader, TraceRequest, Transform

Rows = Iterable[TraceRequest]
_HASH_BITS = 62


class Stage(NamedTuple):
    """A header and its rows, between two transforms."""

    header: TraceHeader
    rows: Rows

    def then(self, name: str, rows: Rows, source_sha256: str = "", **arguments: Any) -> Stage:
        """After one more transform. Arguments that are None were not given and are not recorded."""
        given = {key: value for key, value in arguments.items() if value is not None}
        return Stage(self.header.after(Transform(name, given, source_sha256)), rows)


def _with(row: TraceRequest, **changes: Any) -> TraceRequest:
    return msgspec.structs.replace(row, **changes)


def slice_rows(
    stage: Stage, source: str, *, start: float | None, end: float | None, first: int | None, last: int | None
) -> Stage:
    """Rows with `start <= arrival_time < end` and number in `[first, last)`; times are moved so that `start` is 0."""
    if start is not None and end is not None and end <= start:
        raise TraceError(f"slice: the end ({end:g} s) is not behind the start ({start:g} s)")
    if first is not None and last is not None and last <= first:
        raise TraceError(f"slice: request {last} is not behind request {first}")

    def rows() -> Iterator[TraceRequest]:
        for number, row in enumerate(stage.rows):
            if last is not None and number >= last:
                return
            inside = (start is None or row.arrival_time >= start) and (end is None or row.arrival_time < end)
            if inside and (first is None or number >= first):
                yield row if start is None else _with(row, arrival_time=row.arrival_time - start)

    return stage.then("slice", rows(), source, start=start, end=end, first=first, last=last)


def scale(stage: Stage, source: str, *, speed: float) -> Stage:
    """All times divided by `speed`: 2 doubles the request rate, and keeps the shape of the bursts."""
    if not 0 < speed < float("inf"):
        raise TraceError(f"scale: the speed is {speed:g}; it must be positive")
    rows = (_with(row, arrival_time=row.arrival_time / speed) for row in stage.rows)
    return stage.then("scale", rows, source, speed=speed)


def dequantize(stage: Stage, source: str, *, tick: float, seed: int) -> Stage:
    """Spread the requests of each tick evenly at random over [tick start, tick end), keeping their order.

    Rows must be in time order. What the clock lost is not brought back; only bursts that were never there go away.
    """
    if not 0 < tick < float("inf"):
        raise TraceError(f"dequantize: the tick is {tick:g} s; it must be positive")

    def rows() -> Iterator[TraceRequest]:
        rng = random.Random(seed)
        group: list[TraceRequest] = []
        for row in stage.rows:
            if group and row.arrival_time < group[-1].arrival_time:
                raise TraceError("dequantize needs rows in time order; sort them first (trace convert --sort)")
            if group and row.arrival_time - group[0].arrival_time > tick / 2:
                yield from _spread(group, tick, rng)
                group = []
            group.append(row)
        yield from _spread(group, tick, rng)

    return stage.then("dequantize", rows(), source, tick=tick, seed=seed)


def _spread(group: list[TraceRequest], tick: float, rng: random.Random) -> Iterator[TraceRequest]:
    for row, offset in zip(group, sorted(rng.random() for _ in group)):
        yield _with(row, arrival_time=group[0].arrival_time + offset * tick)


def sample(
    stage: Stage, source: str, *, share: float, seed: int, drop_empty: bool = False, drop_duplicates: bool = False
) -> Stage:
    """Keep a random share of the sessions (a row without one stands for itself), all turns of a session or none.

    `drop_empty` leaves out rows without input or output, `drop_duplicates` rows equal to an earlier one in time,
    lengths, blocks and session.
    """
    if not 0 < share <= 1:
        raise TraceError(f"sample: the share is {share:g}; it must lie in (0, 1]")

    def rows() -> Iterator[TraceRequest]:
        seen: set[int] = set()
        for number, row in enumerate(stage.rows):
            key = row.session or f"row-{number}"
            if _unit(f"{seed}/{key}") >= share or (drop_empty and not (row.input_len and row.output_len)):
                continue
            if drop_duplicates:
                identity = hash((row.arrival_time, row.input_len, row.output_len, row.prefix_block_hash, row.session))
                if identity in seen:
                    continue
                seen.add(identity)
            yield row

    flags = {"drop_empty": drop_empty or None, "drop_duplicates": drop_duplicates or None}
    return stage.then("sample", rows(), source, share=share, seed=seed, **flags)


def _unit(text: str) -> float:
    """A number in [0, 1) from a name: the same on every machine and for every order of rows."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") / 2.0**64


def merge(stages: list[Stage], sources: list[str], *, tenants: list[str], offsets: list[float]) -> Stage:
    """Several traces as one, in time order. Each is given a tenant name where one is named and moved by its offset.

    Block ids of different traces never meet, unless the traces are the same file: they are kept apart by number.
    Raises TraceError where block sizes differ.
    """
    sizes = {stage.header.block_size for stage in stages if stage.header.block_size}
    if len(sizes) > 1:
        raise TraceError(f"merge: block sizes differ ({', '.join(map(str, sorted(sizes)))}); hashes would not compare")

    def moved(number: int, rows: Rows) -> Iterator[TraceRequest]:
        fold = _apart(sources.index(sources[number]))
        for row in rows:
            changes: dict[str, Any] = {"arrival_time": row.arrival_time + offsets[number], **fold(row)}
            if tenants:
                changes["tenant"] = tenants[number]
            yield _with(row, **changes)

    streams = [moved(number, stage.rows) for number, stage in enumerate(stages)]
    origin = " + ".join(stage.header.origin for stage in stages)
    header = TraceHeader(max(sizes, default=0), origin)
    rows = heapq.merge(*streams, key=lambda row: row.arrival_time)
    return Stage(header, rows).then("merge", rows, "", sources=sources, tenants=tenants or None, offsets=offsets)


def _apart(number: int) -> Callable[[TraceRequest], dict[str, Any]]:
    def fold(row: TraceRequest) -> dict[str, Any]:
        session = f"{number}/{row.session}" if row.session else ""
        return {**_map_hashes(row, lambda block: keyed_id(block, str(number).encode())), "session": session}

    return fold


def anonymize(stage: Stage, source: str, *, key: bytes) -> Stage:
    """Take out everything that could name someone: token ids, outcomes and unknown fields go; block ids, sessions,
    tenants and request ids become keyed digests. Sharing stays visible; without the key nothing can be looked up.

    The key is not recorded. Times and lengths stay as they are: shift or scale them where those tell too much.
    """
    if len(key) < 8:
        raise TraceError("anonymize: the key has fewer than 8 bytes; take a longer one, or let it be drawn")
    names: dict[str, str] = {}

    def rows() -> Iterator[TraceRequest]:
        for row in stage.rows:
            tenant = names.setdefault(row.tenant, f"t{len(names)}") if row.tenant else ""
            yield TraceRequest(
                arrival_time=row.arrival_time,
                input_len=row.input_len,
                output_len=row.output_len,
                **_map_hashes(row, lambda block: keyed_id(block, key)),
                id=_digest(row.id, key),
                tenant=tenant,
                session=_digest(row.session, key) or "",
                turn=row.turn,
                parent=_digest(row.parent, key),
                priority=row.priority,
                deadline_s=row.deadline_s,
            )

    return stage.then("anonymize", rows(), source)


def _map_hashes(row: TraceRequest, change: Callable[[BlockHash], int]) -> dict[str, Any]:
    tail = row.tail_block_hash
    return {
        "prefix_block_hash": tuple(map(change, row.prefix_block_hash)),
        "tail_block_hash": None if tail is None else change(tail),
    }


def keyed_id(block: BlockHash, key: bytes) -> int:
    """A block id under a key: equal ids stay equal, nothing else can be told from them."""
    digest = hashlib.blake2b(repr(block).encode(), digest_size=8, key=key[:64]).digest()
    return int.from_bytes(digest, "little") >> 64 - _HASH_BITS


def _digest(name: str | None, key: bytes) -> str | None:
    return hashlib.blake2b(name.encode(), digest_size=8, key=key[:64]).hexdigest() if name else None


def sort_rows(stage: Stage, source: str) -> Stage:
    """Rows in time order, equal times in file order. Holds the trace in memory."""
    return stage.then("sort", sorted(stage.rows, key=lambda row: row.arrival_time), source)


def from_zero(stage: Stage, source: str) -> Stage:
    """Times moved so that the first row arrives at 0."""

    def rows() -> Iterator[TraceRequest]:
        origin: float | None = None
        for row in stage.rows:
            origin = row.arrival_time if origin is None else origin
            yield _with(row, arrival_time=row.arrival_time - origin)

    return stage.then("from-zero", rows(), source)


def chain(stage: Stage, source: str) -> Stage:
    """Replace block ids that name one block only by ids that name the block and all before it."""

    def chained(row: TraceRequest) -> TraceRequest:
        ids, before = [], b""
        for block in row.prefix_block_hash:
            before = hashlib.blake2b(before + repr(block).encode(), digest_size=16).digest()
            ids.append(int.from_bytes(before[:8], "little") >> 64 - _HASH_BITS)
        tail = row.tail_block_hash
        if tail is not None:
            tail = keyed_id(tail, before) if before else keyed_id(tail, b"root")
        return _with(row, prefix_block_hash=tuple(ids), tail_block_hash=tail)

    return stage.then("chain-hashes", map(chained, stage.rows), source)


def without_tokens(stage: Stage, source: str) -> Stage:
    """Drop token ids and keep the block hashes made from them: a tenth of the size, and no text can be read back."""
    rows = (_with(row, input_token_ids=None, output_token_ids=None) for row in stage.rows)
    return stage.then("drop-token-ids", rows, source)
