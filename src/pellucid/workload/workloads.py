"""Loads with a name, each aimed at one question; the same five that the published comparison of engines uses.

    single     one stream, 64 in, 256 out                              how fast is one user's answer (bandwidth)?
    decode32   32 streams at once, 64 in, 128 out                      how fast is batched decoding?
    prefill    three prompts of 4,000, one after the other, 1 out      how fast are prompts read?
    prefix     48 requests, 8 at a time, over 4 prefixes of 1,500      does shared work get shared?
    hol        short requests at 2/s and 4 endless chats, then three   does one long document freeze everyone?
               documents of 6,000 within a second

A workload says how to send itself, over which window throughput counts, and which figures it exists for.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from pellucid.core.errors import ConfigError
from pellucid.workload.client import UNFINISHED, LoadClient, LoadItem
from pellucid.workload.drive import OnRecord, run_closed, run_open
from pellucid.workload.metrics import Clocking, RequestRecord, summarise, tokens_inside
from pellucid.workload.prompts import PromptMaker, expected_cached
from pellucid.workload.trace import TraceRequest

PROMPT_BLOCK = 16


class Workload(Protocol):
    """A load that can be sent. `num_requests` is None where the load itself decides when it ends."""

    @property
    def name(self) -> str: ...

    @property
    def clocking(self) -> Clocking: ...

    @property
    def num_requests(self) -> int | None: ...

    def schedule_digest(self) -> str | None:
        """Hex sha256 of who is sent when and how long, prompts left out; None where replies decide."""
        ...

    async def run(self, client: LoadClient, prompts: PromptMaker, on_record: OnRecord) -> list[RequestRecord]: ...

    def window(self, records: Sequence[RequestRecord]) -> tuple[float, float]:
        """Where throughput is counted."""
        ...

    def highlights(self, records: Sequence[RequestRecord]) -> dict[str, Any]:
        """The figures that this load is for, beside the general ones."""
        ...


def whole_run(records: Sequence[RequestRecord]) -> tuple[float, float]:
    """From the first request sent to the last token received."""
    starts = [record.sent for record in records]
    ends = [record.last for record in records if record.last is not None]
    return (min(starts, default=0.0), max(ends, default=0.0))


class _Asked(NamedTuple):
    """One request of a closed workload: tokens in (shared and own) and out."""

    prefix: str
    num_prefix: int
    num_own: int
    output_len: int


class Burst:
    """A fixed list of requests, `concurrency` at a time."""

    clocking = Clocking(open_loop=False)

    def __init__(self, name: str, asked: Sequence[_Asked], concurrency: int) -> None:
        self.name = name
        self._asked = asked
        self._concurrency = concurrency

    @property
    def num_requests(self) -> int | None:
        return len(self._asked)

    def schedule_digest(self) -> str | None:
        return hashlib.sha256(repr((self._concurrency, self._asked)).encode()).hexdigest()

    async def run(self, client: LoadClient, prompts: PromptMaker, on_record: OnRecord) -> list[RequestRecord]:
        sessions = [[item] for item in self._items(prompts)]
        return await run_closed(client, sessions, concurrency=self._concurrency, on_record=on_record)

    def _items(self, prompts: PromptMaker) -> Iterator[LoadItem]:
        seen: set[str] = set()
        for index, asked in enumerate(self._asked):
            name = f"{self.name}/{index}"
            shared = asked.num_prefix // PROMPT_BLOCK * PROMPT_BLOCK if asked.prefix in seen else 0
            seen.add(asked.prefix)
            prompt = (
                prompts.shared(f"{self.name}/{asked.prefix}", asked.num_prefix, name, asked.num_own)
                if asked.num_prefix
                else prompts.fresh(name, asked.num_own)
            )
            yield LoadItem(index=index, prompt=prompt, output_len=asked.output_len, expected_cached=shared)

    def window(self, records: Sequence[RequestRecord]) -> tuple[float, float]:
        return whole_run(records)

    def highlights(self, records: Sequence[RequestRecord]) -> dict[str, Any]:
        low, high = whole_run(records)
        prompt_tokens = sum(record.prompt_tokens or 0 for record in records if record.ok)
        return {"prompt_tokens_per_second": prompt_tokens / max(high - low, 1e-9)}


SHORT, CHAT, DOCUMENT = "short", "chat", "document"


class HeadOfLine:
    """Short requests on a schedule and chats that never stop; after `calm` seconds documents arrive.

    The short ones are open loop and their clock starts at the schedule; chats and documents are sent when they are
    sent. Ends when the last document has been answered. "Calm" ends a second before the first document.
    """

    name = "hol"
    clocking = Clocking(open_loop=True)
    num_requests = None
    calm = 4.0
    short_gap = 0.5
    num_chats = 4
    num_documents = 3
    document_gap = 0.3
    document_len = 6000

    def schedule_digest(self) -> str | None:
        return None

    async def run(self, client: LoadClient, prompts: PromptMaker, on_record: OnRecord) -> list[RequestRecord]:
        run = _HeadOfLineRun(self, client, prompts, on_record)
        with contextlib.suppress(asyncio.CancelledError):
            await run.all_phases()
        await run.settle()
        return sorted(run.records, key=lambda record: record.index)

    def window(self, records: Sequence[RequestRecord]) -> tuple[float, float]:
        return whole_run(records)

    def highlights(self, records: Sequence[RequestRecord]) -> dict[str, Any]:
        whole = [record for record in records if record.ok]
        documents = [record for record in whole if record.group == DOCUMENT]
        start = min((record.sent for record in documents), default=float("inf"))
        end = max((record.last or 0.0 for record in documents), default=float("inf"))
        shorts = [record for record in whole if record.group == SHORT]
        chats = [record for record in whole if record.group == CHAT]
        calm_before = start - 1.0
        return {
            "short_ttft_calm": summarise(self.clocking.ttft(r) for r in shorts if r.scheduled < calm_before),
            "short_ttft_storm": summarise(self.clocking.ttft(r) for r in shorts if start <= r.scheduled <= end),
            "chat_gap_calm": summarise(_gaps_within(chats, 0.0, calm_before)),
            "chat_gap_storm": summarise(_gaps_within(chats, start, end)),
            "document_ttft": summarise(self.clocking.ttft(r) for r in documents),
            "documents_seconds": end - start if documents else None,
        }


def _gaps_within(records: Iterable[RequestRecord], low: float, high: float) -> Iterator[float]:
    for record in records:
        for before, after in zip(record.chunks, record.chunks[1:]):
            if low <= before.at <= high:
                yield after.at - before.at


class _HeadOfLineRun:
    """One run of `HeadOfLine`: who is in the air, and what came back."""

    def __init__(self, load: HeadOfLine, client: LoadClient, prompts: PromptMaker, on_record: OnRecord) -> None:
        self.load = load
        self.client = client
        self.prompts = prompts
        self.on_record = on_record
        self.records: list[RequestRecord] = []
        self._next_index = 0
        self._over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def all_phases(self) -> None:
        documents = [self._item(DOCUMENT, self.load.document_len, 4) for _ in range(self.load.num_documents)]
        self._tasks += [asyncio.create_task(self._chat()) for _ in range(self.load.num_chats)]
        self._tasks.append(asyncio.create_task(self._shorts(self.client.now())))
        await asyncio.sleep(self.load.calm)
        sent = []
        for number, document in enumerate(documents):
            if number:
                await asyncio.sleep(self.load.document_gap)
            sent.append(asyncio.create_task(self._send(document)))
        self._tasks += sent
        await asyncio.gather(*sent)
        self._over.set()
        while open_tasks := [task for task in self._tasks if not task.done()]:
            await asyncio.wait(open_tasks)

    async def settle(self) -> None:
        """After a cancellation: stop everything, keep the records."""
        self._over.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _chat(self) -> None:
        while not self._over.is_set():
            await self._send(self._item(CHAT, 64, 64))

    async def _shorts(self, start: float) -> None:
        number = 0
        while not self._over.is_set():
            due = start + number * self.load.short_gap
            item = self._item(SHORT, 64, 16, due)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), max(0.0, due - self.client.now()))
            if not self._over.is_set():
                self._tasks.append(asyncio.create_task(self._send(item)))
            number += 1

    def _item(self, group: str, input_len: int, output_len: int, due: float | None = None) -> LoadItem:
        index, self._next_index = self._next_index, self._next_index + 1
        prompt = self.prompts.fresh(f"hol/{index}", input_len)
        return LoadItem(index=index, prompt=prompt, output_len=output_len, due=due, group=group)

    async def _send(self, item: LoadItem) -> None:
        record = await self.client.send(item)
        self.records.append(record)
        self.on_record(record)
        if record.status == UNFINISHED:
            raise asyncio.CancelledError


NAMED: dict[str, Callable[[], Workload]] = {
    "single": lambda: Burst("single", [_Asked("", 0, 64, 256)], 1),
    "decode32": lambda: Burst("decode32", [_Asked("", 0, 64, 128)] * 32, 32),
    "prefill": lambda: Burst("prefill", [_Asked("", 0, 4000, 1)] * 3, 1),
    "prefix": lambda: Burst("prefix", [_Asked(str(i % 4), 1500, 40, 32) for i in range(48)], 8),
    "hol": HeadOfLine,
}


def named_workload(name: str) -> Workload:
    """The workload of this name. Raises ConfigError naming all."""
    if name not in NAMED:
        raise ConfigError(f"unknown workload {name!r}; known: {', '.join(NAMED)}")
    return NAMED[name]()


class Pacing(NamedTuple):
    """How the rows of a trace are sent.

    `speed` divides all times. In open loop (`concurrency` None) rows due in the first `ramp` seconds load the server
    but are not measured, and rows due from `measured_until` on only keep the load up until the measured ones are
    answered. In closed loop `concurrency` users work through the sessions in the order of their first arrival, with a
    pause of `think_seconds` between turns; a row without a session is one of its own.
    """

    speed: float = 1.0
    ramp: float = 0.0
    measured_until: float = float("inf")
    concurrency: int | None = None
    think_seconds: float = 0.0


_AS_RECORDED = Pacing()


class Replay:
    """The rows of a trace, real or synthetic: in open loop at their own times, or in closed loop by session."""

    def __init__(self, name: str, rows: Sequence[TraceRequest], block_size: int, pacing: Pacing = _AS_RECORDED) -> None:
        if not 0 < pacing.speed < float("inf"):
            raise ConfigError(f"--speed is {pacing.speed:g}; it must be positive")
        empty = sum(1 for row in rows if row.input_len < 1 or row.output_len < 1)
        if empty:
            raise ConfigError(
                f"{name}: {empty} of {len(rows)} requests have no input or no output and cannot be replayed; "
                f"drop them with `pellucid trace sample --drop-empty`"
            )
        if not rows:
            raise ConfigError(f"{name}: no request to send")
        self.name = name
        self.clocking = Clocking(open_loop=pacing.concurrency is None)
        self._rows = sorted(rows, key=lambda row: row.arrival_time)
        self._block_size = block_size
        self._pacing = pacing
        self._origin = min(0.0, self._rows[0].arrival_time)
        self._shared = expected_cached(self._rows, block_size) if block_size else []

    @property
    def num_requests(self) -> int | None:
        if self._pacing.concurrency is not None:
            return len(self._rows)
        return sum(1 for row in self._rows if self._measured(self._due(row)))

    def _due(self, row: TraceRequest) -> float:
        return (row.arrival_time - self._origin) / self._pacing.speed

    def _measured(self, due: float) -> bool:
        return self._pacing.ramp <= due < self._pacing.measured_until

    def schedule_digest(self) -> str | None:
        digest = hashlib.sha256(f"{self._pacing.concurrency} {self._pacing.think_seconds}".encode())
        for row in self._rows:
            digest.update(f"{self._due(row):.9f} {row.input_len} {row.output_len} {row.session}\n".encode())
        return digest.hexdigest()

    async def run(self, client: LoadClient, prompts: PromptMaker, on_record: OnRecord) -> list[RequestRecord]:
        if self._pacing.concurrency is None:
            return await run_open(client, self._items(prompts), on_record=on_record)
        sessions: dict[str, list[LoadItem]] = {}
        for item in self._items(prompts):
            sessions.setdefault(item.session or f"\0{item.index}", []).append(item)
        return await run_closed(
            client,
            list(sessions.values()),
            concurrency=self._pacing.concurrency,
            think_seconds=self._pacing.think_seconds,
            on_record=on_record,
        )

    def _items(self, prompts: PromptMaker) -> Iterator[LoadItem]:
        open_loop = self._pacing.concurrency is None
        for index, row in enumerate(self._rows):
            due = self._due(row)
            yield LoadItem(
                index=index,
                prompt=prompts.realise(row, self._block_size, f"{self.name}/{index}"),
                output_len=row.output_len,
                due=due if open_loop else None,
                tenant=row.tenant,
                session=row.session,
                turn=row.turn,
                expected_cached=self._shared[index] if self._shared else None,
                cohort=not open_loop or self._measured(due),
            )

    def window(self, records: Sequence[RequestRecord]) -> tuple[float, float]:
        """Open loop: the time in which measured requests fall due; closed loop: the whole run."""
        if self._pacing.concurrency is not None:
            return whole_run(records)
        last = max((record.scheduled for record in records), default=self._pacing.ramp)
        end = (
            self._pacing.measured_until
            if self._pacing.measured_until < float("inf")
            else max(last, self._pacing.ramp + 1e-3)
        )
        return (self._pacing.ramp, end)

    def highlights(self, records: Sequence[RequestRecord]) -> dict[str, Any]:
        low, high = self.window(records)
        whole_low, whole_high = whole_run(records)
        drain = max(0.0, whole_high - high)
        return {
            "offered_requests_per_second": len(records) / max(high - low, 1e-9),
            "drain_seconds": drain,
            "whole_run_output_tokens_per_second": tokens_inside(records, (whole_low, whole_high))
            / max(whole_high - whole_low, 1e-9),
        }
