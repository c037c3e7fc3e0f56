"""Requests through a real scheduler and a modelled machine: what each of them saw, in virtual time.

Arrivals are fixed in advance (open loop). The engine is the one that serves, with its own loop and its own counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from pellucid.core.config import SchedulerConfig
from pellucid.core.cost import CostModel
from pellucid.core.errors import RequestRejected
from pellucid.core.events import Admitted, Event, Finished, Preempted, TokensGenerated
from pellucid.core.request import Request
from pellucid.core.scheduler import Scheduler
from pellucid.engine.engine import Engine
from pellucid.sim.executor import ModelledExecutor, VirtualClock

_PAUSE = 1e-3
"""Seconds until the scheduler is asked again when nothing could be computed and nothing arrives."""


@dataclass(slots=True)
class Outcome:
    """What a request saw. Times are on the virtual clock; `token_times` has one entry for each output token."""

    request: Request
    token_times: list[float] = field(default_factory=list)
    ended: float | None = None
    reason: str = ""
    num_cached: int = 0
    num_preemptions: int = 0

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token."""
        return self.token_times[0] - self.request.arrival

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]


def replay(
    config: SchedulerConfig,
    machine: CostModel,
    requests: Iterable[Request],
    *,
    overhead: float = 0.0,
    watch: Callable[[Scheduler, float], None] | None = None,
) -> dict[str, Outcome]:
    """Serve `requests` on a machine whose steps take what `machine` says; outcomes by request id.

    The scheduler starts from `config.cost_prior` and learns the machine as it would a real one. `watch` is called
    after every step. A request that is refused has the refusal's code as its reason.
    """
    clock = VirtualClock()
    scheduler = Scheduler(config)
    executor = ModelledExecutor(machine, clock, bytes_per_block=config.bytes_per_block, overhead=overhead)
    engine = Engine(scheduler, executor, clock)
    arrivals = sorted(requests, key=lambda request: request.arrival)
    outcomes = {request.id: Outcome(request) for request in arrivals}
    position = 0
    while position < len(arrivals) or engine.has_work:
        while position < len(arrivals) and arrivals[position].arrival <= clock.now:
            request = arrivals[position]
            position += 1
            try:
                _note(engine.add(request), outcomes, clock.now)
            except RequestRejected as error:
                outcomes[request.id].reason = error.code
        if not engine.has_work:
            if position < len(arrivals):
                clock.now = max(clock.now, arrivals[position].arrival)
            continue
        before = clock.now
        _note(engine.step(), outcomes, clock.now)
        if clock.now == before:
            clock.advance(_PAUSE)
        if watch is not None:
            watch(scheduler, clock.now)
    return outcomes


def _note(events: list[Event], outcomes: dict[str, Outcome], now: float) -> None:
    for event in events:
        match event:
            case TokensGenerated(request_id, token_ids):
                outcomes[request_id].token_times.extend([now] * len(token_ids))
            case Admitted(request_id, num_cached=num_cached):
                outcomes[request_id].num_cached = num_cached
            case Preempted(request_id):
                outcomes[request_id].num_preemptions += 1
            case Finished(request_id, reason):
                outcomes[request_id].ended = now
                outcomes[request_id].reason = reason
