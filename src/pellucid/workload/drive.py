"""Sending a load: open loop by a schedule fixed in advance, or closed loop with a number of users who wait for answers.

Open loop never waits for a reply before the next request is due: a slow server does not slow its load down. Closed loop
measures how fast a fixed crowd is served; its rate is a result, not an input. Both return what they have when they are
cancelled: requests still open are recorded as unfinished.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from pellucid.workload.client import UNFINISHED, LoadClient, LoadItem
from pellucid.workload.metrics import RequestRecord

LAG_PROBE_SECONDS = 0.01

OnRecord = Callable[[RequestRecord], None]


class Health(NamedTuple):
    """How well the *client* kept up: processor share of one core, and how late its event loop woke (seconds)."""

    cpu_share: float
    loop_lag_p99: float
    loop_lag_max: float


class HealthProbe:
    """Measures the client while a load runs. Use as an async context manager; read `result` afterwards."""

    def __init__(self) -> None:
        self.result = Health(0.0, 0.0, 0.0)
        self._lags: list[float] = []

    async def __aenter__(self) -> HealthProbe:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        self._task = asyncio.create_task(self._probe())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()
        wall = max(time.perf_counter() - self._wall, 1e-9)
        lags = sorted(self._lags) or [0.0]
        self.result = Health((time.process_time() - self._cpu) / wall, lags[int(0.99 * (len(lags) - 1))], lags[-1])

    async def _probe(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(LAG_PROBE_SECONDS)
            self._lags.append(time.perf_counter() - before - LAG_PROBE_SECONDS)


class _Flight:
    """The requests in the air, and the records of those that landed."""

    def __init__(self, client: LoadClient, on_record: OnRecord) -> None:
        self.client = client
        self.on_record = on_record
        self.records: list[RequestRecord] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.num_cohort_open = 0

    def launch(self, item: LoadItem, body: bytes) -> None:
        self.num_cohort_open += item.cohort
        task = asyncio.create_task(self._follow(item, body))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _follow(self, item: LoadItem, body: bytes) -> None:
        record = await self.client.send(item, body)
        self.num_cohort_open -= item.cohort
        if item.cohort:
            self.records.append(record)
            self.on_record(record)

    async def abandon(self) -> None:
        """Cancel what is open; each request still leaves its record."""
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_open(
    client: LoadClient, items: Iterable[LoadItem], *, on_record: OnRecord = lambda record: None
) -> list[RequestRecord]:
    """Send every item at its due time until all measured ones have been answered.

    Items behind the measured cohort keep the load up while the cohort finishes; what is left of them then is not sent.
    """
    flight = _Flight(client, on_record)
    upcoming = _with_outlook(items)
    try:
        for item, cohort_is_through in upcoming:
            body = client.encode(item)
            assert item.due is not None, "an open-loop item has a due time"
            while (wait := item.due - client.now()) > 0:
                if cohort_is_through and not flight.num_cohort_open:
                    break
                await asyncio.sleep(min(wait, 0.05) if cohort_is_through else wait)
            if cohort_is_through and not flight.num_cohort_open:
                break
            flight.launch(item, body)
        while flight.num_cohort_open:
            await asyncio.wait(flight.tasks, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        pass
    await flight.abandon()
    return sorted(flight.records, key=lambda record: record.index)


def _with_outlook(items: Iterable[LoadItem]) -> Iterator[tuple[LoadItem, bool]]:
    """Each item, and whether it lies behind the cohort (the measured items come first, or after a ramp)."""
    seen_cohort = False
    for item in items:
        seen_cohort = seen_cohort or item.cohort
        yield item, seen_cohort and not item.cohort


async def run_closed(
    client: LoadClient,
    sessions: Sequence[Sequence[LoadItem]],
    *,
    concurrency: int,
    think_seconds: float = 0.0,
    on_record: OnRecord = lambda record: None,
) -> list[RequestRecord]:
    """`concurrency` users take sessions in order; inside a session each turn waits for the answer to the one before,
    plus the think time. A session whose turn fails is not continued: its later turns are recorded as not sent."""
    records: list[RequestRecord] = []
    waiting = iter(sessions)

    async def user() -> None:
        for session in waiting:
            failed = False
            for position, item in enumerate(session):
                if failed:
                    record = _not_sent(client, item)
                else:
                    if position and think_seconds:
                        await asyncio.sleep(think_seconds)
                    record = await client.send(item)
                    failed = not record.ok
                records.append(record)
                on_record(record)
                if record.status == UNFINISHED:
                    raise asyncio.CancelledError

    users = [asyncio.create_task(user()) for _ in range(min(concurrency, len(sessions)))]
    try:
        await asyncio.gather(*users)
    except asyncio.CancelledError:
        for task in users:
            task.cancel()
        await asyncio.gather(*users, return_exceptions=True)
    return sorted(records, key=lambda record: record.index)


def _not_sent(client: LoadClient, item: LoadItem) -> RequestRecord:
    now = client.now()
    return RequestRecord(
        index=item.index,
        scheduled=now,
        sent=now,
        status="not-sent",
        detail="an earlier turn of its session failed",
        requested=item.output_len,
        group=item.group,
        tenant=item.tenant,
        session=item.session,
        turn=item.turn,
    )
