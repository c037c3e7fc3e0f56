"""The loop: decide, do, fold in. Owns a scheduler and an executor, knows nothing of HTTP, processes or text.

One `step` is the four lines that server, simulator and tests share. On a CPU the executor has the cores to itself while
it computes, so one step is in flight at a time. Every step is noted (`engine/recording.py`), and whatever ends the loop
is handed to the recorder before it is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pellucid.core.errors import InvariantViolation
from pellucid.core.events import Admitted, Event, Fate, Finished, Preempted, Resumed, TokensGenerated
from pellucid.core.invariants import check
from pellucid.core.request import Request
from pellucid.core.scheduler import Scheduler
from pellucid.core.sequence import Status
from pellucid.core.step_record import StepSummary
from pellucid.core.tenants import Tenant
from pellucid.engine.executor import Executor
from pellucid.engine.recording import Recorder, Recording, StepTimes
from pellucid.engine.view import EngineView, Viewer

SECONDS_BETWEEN_CHECKS = 10.0
SECONDS_BETWEEN_REASONS = 0.5


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine, at most a moment old. Counters only grow; seconds are wall time.

    `waiting_by_reason` are (ledger cause, requests), counted anew at most twice a second; `num_swapped` of the waiting
    are preempted ones whose blocks are kept on the host. `num_preemptions` is the sum over both fates. Host blocks are
    all 0 without a host tier. `ledger_residue_seconds` is what the causes of finished
    requests missed of their time: a bug of ours if not 0.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    waiting_by_reason: tuple[tuple[str, int], ...] = ()
    blocks_free: int = 0
    blocks_active: int = 0
    blocks_cached: int = 0
    blocks_in_flight: int = 0
    host_blocks_free: int = 0
    host_blocks_active: int = 0
    host_blocks_cached: int = 0
    host_blocks_in_flight: int = 0
    num_steps: int = 0
    step_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    num_preemptions: int = 0
    num_preempted_swap: int = 0
    num_preempted_recompute: int = 0
    num_finished: int = 0
    ledger_residue_seconds: float = 0.0


class Engine:
    """A scheduler, an executor and a clock. Not thread-safe: one thread calls everything. `recorder` keeps the last
    steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float],
        description: str = "",
        *,
        recorder: Recorder | None = None,
    ) -> None:
        self.description = description  # of the executor, for people
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self._recording = Recording(scheduler, recorder)
        self._num_steps = 0
        self._step_seconds = 0.0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._num_preempted: dict[Fate, int] = {"swap": 0, "recompute": 0}
        self._swapped: dict[str, None] = {}  # preempted requests that wait for their blocks on the host
        self._num_finished = 0
        self._checked_at = clock()
        self._viewer: Viewer | None = None  # while somebody watches
        self._reasons: tuple[tuple[str, int], ...] = ()
        self._reasons_at = float("-inf")

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> list[Event]:
        """Queue a request. Raises RequestRejected where it can never be served, or not now."""
        self.scheduler.add(request, self.clock())
        return self._count(self.scheduler.take_events())

    def abort(self, request_id: str) -> list[Event]:
        """End a request now; its blocks are free when this returns."""
        return self._count(self.scheduler.abort(request_id, self.clock()))

    def reconfigure(self, tenants: Sequence[Tenant]) -> None:
        """Replace the tenants; what is running and waiting stays."""
        self.scheduler.reconfigure(tuple(tenants), self.clock())

    def step(self) -> list[Event]:
        """Run one step and return what it produced. Call it only while there is work."""
        try:
            return self._step()
        except Exception as error:
            self._save_steps(error)
            raise

    def _step(self) -> list[Event]:
        started = self.clock()
        plan = self.scheduler.schedule(started)
        if plan is None:
            if not self.scheduler.running:
                # Everyone waits for something that a bound will end (see core/shared_prefix.py), or was too late.
                return self._count(self.scheduler.take_events())
            raise InvariantViolation(f"nothing can be computed for {self.scheduler.sequences()}")
        if self._viewer is not None:
            self._viewer.launched(plan)
        planned = self._recording.planned(plan)
        decided = self.clock()
        result = self.executor.collect(self.executor.launch(plan))
        executed = self.clock()
        events = self._count(self.scheduler.commit(result, executed))
        times = StepTimes(started, decided, executed, self.clock())
        self._recording.folded(planned, result, times, events, num_swapped=len(self._swapped))
        self._num_steps += 1
        self._step_seconds += result.seconds
        if self._viewer is not None and self._viewer.expired(executed):
            self._viewer = None
        return events

    def look(self, *, tokens: bool = False) -> EngineView:
        """This moment, for whoever watches; see `engine/view.py`. `tokens`: with the first ones of prompts."""
        now = self.clock()
        if self._viewer is None:
            self._viewer = Viewer(self.scheduler, now)
        return self._viewer.look(now, tokens=tokens)

    def check_when_idle(self) -> None:
        """Check the conservation laws if nothing is running and it was not done in the last seconds."""
        now = self.clock()
        if not self.has_work and now - self._checked_at > SECONDS_BETWEEN_CHECKS:
            try:
                check(self.scheduler)
            except InvariantViolation as error:
                self._save_steps(error)
                raise
            self._checked_at = now

    def take_summaries(self) -> list[StepSummary]:
        """The steps since the last call that returned any, in numbers; nothing more often than twice a second."""
        return self._recording.take_batch(self.clock())

    def last_steps(self, count: int) -> list[bytes]:
        """The last `count` steps that were kept, oldest first, each a StepRecord in msgpack."""
        recorder = self._recording.recorder
        return [] if recorder is None else recorder.last(count)

    def _save_steps(self, error: Exception) -> None:
        recorder = self._recording.recorder
        if recorder is not None:
            recorder.failed(f"{type(error).__name__}: {error}")

    def stats(self) -> EngineStats:
        pool, host = self.scheduler.kv.pool, self.scheduler.kv.host
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=self.scheduler.num_waiting,
            num_swapped=len(self._swapped),
            waiting_by_reason=self._waiting_by_reason(),
            blocks_free=pool.num_free,
            blocks_active=pool.num_active,
            blocks_cached=pool.num_cached,
            blocks_in_flight=pool.num_in_flight,
            host_blocks_free=host.num_free,
            host_blocks_active=host.num_active,
            host_blocks_cached=host.num_cached,
            host_blocks_in_flight=host.num_in_flight,
            num_steps=self._num_steps,
            step_seconds=self._step_seconds,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            num_preemptions=sum(self._num_preempted.values()),
            num_preempted_swap=self._num_preempted["swap"],
            num_preempted_recompute=self._num_preempted["recompute"],
            num_finished=self._num_finished,
            ledger_residue_seconds=self.scheduler.ledgers.residue_seconds,
        )

    def _waiting_by_reason(self) -> tuple[tuple[str, int], ...]:
        if not self.scheduler.num_waiting:
            return ()
        now = self.clock()
        if now - self._reasons_at >= SECONDS_BETWEEN_REASONS:  # there may be thousands to look at
            waiting = (s.ledger for s in self.scheduler.sequences() if s.status is Status.WAITING)
            self._reasons = tuple(self.scheduler.ledgers.reasons(waiting).items())
            self._reasons_at = now
        return self._reasons

    def _count(self, events: list[Event]) -> list[Event]:
        if self._viewer is not None:
            self._viewer.happened(events)
        for event in events:
            match event:
                case TokensGenerated():
                    self._generated_tokens += len(event.token_ids)
                case Admitted():
                    self._prompt_tokens += event.num_prompt
                    self._cached_tokens += event.num_cached
                case Preempted():
                    self._num_preempted[event.fate] += 1
                    if event.fate == "swap":
                        self._swapped[event.request_id] = None
                case Resumed():
                    self._swapped.pop(event.request_id, None)
                case Finished():
                    self._swapped.pop(event.request_id, None)
                    self._num_finished += 1
        return events
