"""Notes on every step while the engine runs: makes a StepRecord of each and hands it to whoever listens.

Costs little enough to be always on: names of sequences are looked up once per sequence, and summaries leave in batches.
A record is made after the step's events are known and before they are sent; it changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from pellucid.core.block_pool import BlockPool
from pellucid.core.cost import Prediction, StepFeatures
from pellucid.core.events import Event, Preempted
from pellucid.core.plan import StepPlan, StepResult
from pellucid.core.scheduler import Scheduler
from pellucid.core.step_record import BlockCounts, StepRecord, StepSummary, Who, num_prompt_tokens

SECONDS_BETWEEN_BATCHES = 0.5


class Recorder(Protocol):
    """Keeps the last steps. `telemetry/recorder.py` has the one that serves."""

    def record(self, record: StepRecord) -> None:
        """Keep one more step."""
        ...

    def last(self, count: int) -> list[bytes]:
        """The last `count` steps, oldest first, each a StepRecord in msgpack."""
        ...

    def failed(self, reason: str) -> None:
        """A law of the core is broken, or a step failed: save what is known. Returns when it is on disk."""
        ...


class Planned(NamedTuple):
    """What is known of a step before it runs."""

    plan: StepPlan
    who: tuple[Who, ...]
    features: StepFeatures
    prediction: Prediction


class StepTimes(NamedTuple):
    """When a step's parts began and ended, on the engine's clock."""

    started: float
    decided: float
    executed: float
    folded: float


class Recording:
    """Turns steps into records. `recorder` keeps them whole; their summaries are collected for `take_batch`."""

    def __init__(self, scheduler: Scheduler, recorder: Recorder | None = None) -> None:
        self.recorder = recorder
        self._scheduler = scheduler
        self._who: dict[int, Who] = {}
        self._ended: float | None = None  # when the last step ended, if work was left
        self._batch: list[StepSummary] = []
        self._batch_sent = float("-inf")

    def planned(self, plan: StepPlan) -> Planned:
        """Note the plan just made, while the scheduler knows whose sequences it has and before its cost model learns
        from the step."""
        for seq_id in plan.released:
            self._who.pop(seq_id, None)
        known = self._who
        who = tuple([known.get(chunk[0]) or self._learn(chunk[0]) for chunk in plan.chunks])
        features = self._scheduler.in_flight[-1].features
        return Planned(plan, who, features, self._scheduler.cost.predict(features))

    def folded(
        self, planned: Planned, result: StepResult, times: StepTimes, events: Iterable[Event], *, num_swapped: int = 0
    ) -> None:
        """The step was executed and folded in: make its record."""
        scheduler, (plan, who, features, prediction) = self._scheduler, planned
        summary = StepSummary(
            step_id=plan.step_id,
            started=times.started,
            gap_seconds=0.0 if self._ended is None else times.started - self._ended,
            schedule_seconds=times.decided - times.started,
            seconds=result.seconds,
            commit_seconds=times.folded - times.executed,
            predicted_seconds=prediction.seconds,
            predicted_spread=prediction.spread,
            phases=result.phases,
            features=features,
            num_prompt_tokens=num_prompt_tokens(plan.chunks, who),
            num_waiting=scheduler.num_waiting,
            num_running=len(scheduler.running),
            num_swapped=num_swapped,
            num_preempted=sum(1 for event in events if isinstance(event, Preempted)),
            device_blocks=block_counts(scheduler.kv.pool),
            host_blocks=block_counts(scheduler.kv.host) if scheduler.config.num_host_blocks else None,
            stolen_seconds=result.stolen_seconds,
        )
        self._ended = times.folded if scheduler.has_work else None
        self._batch.append(summary)
        if self.recorder is not None:
            new = tuple([(new.seq_id, len(new.token_ids)) for new in plan.new])
            self.recorder.record(
                StepRecord(summary, who, plan.chunks, new, plan.blocks, plan.released, plan.copies, plan.transfers)
            )

    def take_batch(self, now: float) -> list[StepSummary]:
        """The summaries since the last batch; empty before half a second has passed since then."""
        if not self._batch or now - self._batch_sent < SECONDS_BETWEEN_BATCHES:
            return []
        batch, self._batch = self._batch, []
        self._batch_sent = now
        return batch

    def _learn(self, seq_id: int) -> Who:
        request = self._scheduler.running[seq_id].request
        who = self._who[seq_id] = Who(seq_id, request.id, request.tenant, len(request.prompt))
        return who


def block_counts(pool: BlockPool) -> BlockCounts:
    """The blocks of a tier by state."""
    return BlockCounts(pool.num_free, pool.num_active, pool.num_cached, pool.num_in_flight)
