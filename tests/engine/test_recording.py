"""Every step is noted: what the record says is what was planned, executed and left behind."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.fakes import FakeExecutor
from tests.telemetry.steps import CONFIG, Clock, engine, request, run

from pellucid.core.cost import StepFeatures, features_of
from pellucid.core.errors import InvariantViolation
from pellucid.core.plan import StepPlan, StepResult
from pellucid.core.scheduler import Scheduler
from pellucid.core.step_record import StepRecord
from pellucid.engine.engine import Engine
from pellucid.engine.messages import decode_step_record, encode
from pellucid.engine.recording import SECONDS_BETWEEN_BATCHES, block_counts


class Kept:
    """A recorder that keeps everything."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.failures: list[str] = []

    def record(self, record: StepRecord) -> None:
        self.records.append(record)

    def last(self, count: int) -> list[bytes]:
        return [encode(record) for record in self.records[-count:]]

    def failed(self, reason: str) -> None:
        self.failures.append(reason)


class Watched(FakeExecutor):
    """Remembers the plans as they were launched."""

    def __init__(self) -> None:
        super().__init__(CONFIG.num_blocks, CONFIG.block_size)
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return super().launch(plan)


LOADS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), st.sampled_from(["", "a", "b"])), max_size=6)


@settings(deadline=None)
@given(LOADS)
def test_records_are_the_plans_and_name_everyone(loads):
    kept, executor = Kept(), Watched()
    running = Engine(Scheduler(CONFIG), executor, Clock(), recorder=kept)
    tenants = {}
    for index, (num_prompt, max_tokens, tenant) in enumerate(loads):
        running.add(request(f"r{index}", num_prompt, max_tokens, tenant))
        tenants[f"r{index}"] = (tenant, num_prompt)
    run(running)
    assert len(kept.records) == len(executor.plans)
    for record, plan in zip(kept.records, executor.plans):
        assert record.plan_line == str(plan)
        assert record.summary.features == features_of(plan)
        assert [who.seq_id for who in record.who] == [chunk.seq_id for chunk in plan.chunks]
        assert all(tenants[who.request_id] == (who.tenant, who.num_prompt) for who in record.who)
        assert sum(record.summary.device_blocks) == CONFIG.num_blocks
        inside = sum(max(0, min(c.end, w.num_prompt) - c.start) for c, w in zip(record.chunks, record.who))
        assert record.summary.num_prompt_tokens == inside
        assert decode_step_record(encode(record)) == record, "it crosses the socket as it is"
    assert sum(r.summary.num_preempted for r in kept.records) == running.stats().num_preemptions


def test_the_parts_of_a_step_are_the_clocks_and_leave_no_hole():
    kept, clock = Kept(), Clock(tick=0.25)
    running = engine(kept, clock=clock)
    running.add(request("a", 3, 3))
    run(running)
    first, *others = [record.summary for record in kept.records]
    assert first.gap_seconds == 0.0, "the engine had been idle"
    assert (first.schedule_seconds, first.commit_seconds) == (0.25, 0.25)
    for before, after in zip([first, *others], others):
        ended = before.started + before.schedule_seconds + 0.25 + before.commit_seconds  # 0.25: two readings around it
        assert after.started - after.gap_seconds == ended
    running.add(request("b", 3, 1))
    run(running)
    assert kept.records[-1].summary.gap_seconds == 0.0


def test_the_prediction_is_the_one_made_before_the_step_was_known():
    kept = Kept()
    running = engine(kept)
    running.add(request("a", 8, 6))
    before = running.scheduler.cost.predict(StepFeatures(8, 36, 8, 1, 1))  # the whole prompt, one sample
    run(running)
    assert kept.records[0].summary.predicted_seconds == before.seconds
    assert kept.records[-1].summary.predicted_seconds != before.seconds, "it learns"


def test_batches_leave_no_oftener_than_twice_a_second_and_lose_nothing():
    clock = Clock(tick=0.02)
    running = engine(clock=clock)
    batches, taken = [], []
    for index in range(6):
        running.add(request(f"r{index}", 5, 10))
    while running.has_work:
        running.step()
        if batch := running.take_summaries():
            batches.append(batch)
            taken.append(clock.now)
    clock.now += SECONDS_BETWEEN_BATCHES
    batches.append(running.take_summaries())
    ids = [summary.step_id for batch in batches for summary in batch]
    assert ids == list(range(running.stats().num_steps))
    assert len(taken) > 2
    assert all(later - earlier >= SECONDS_BETWEEN_BATCHES for earlier, later in pairwise(taken))
    assert running.take_summaries() == []


def test_the_snapshot_says_why_requests_wait():
    running = engine(clock=Clock(tick=1.0))
    for index in range(7):
        running.add(request(f"r{index}", 3, 10))
    running.step()
    assert dict(running.stats().waiting_by_reason) == {"queue.capacity": running.stats().num_waiting}
    running.add(request("new", 3, 10))
    assert dict(running.stats().waiting_by_reason)["queue.step_in_flight"] == 1
    while running.stats().num_waiting:
        assert sum(count for _, count in running.stats().waiting_by_reason) == running.stats().num_waiting
        running.step()
    assert running.stats().waiting_by_reason == ()


def test_who_was_swapped_out_is_counted_until_it_runs_again_or_ends():
    config = replace(CONFIG, num_host_blocks=16, bytes_per_block=64, preemption="swap", token_budget=32)
    kept = Kept()
    running = engine(kept, config)
    for index in range(4):
        running.add(request(f"r{index}", 9, 40, first=100 * index))
    most, aborted = 0, False
    while running.has_work:
        running.step()
        swapped = [s.request.id for s in running.scheduler.waiting if s.wanted]
        stats = running.stats()
        assert stats.num_swapped == kept.records[-1].summary.num_swapped == len(swapped)
        assert kept.records[-1].summary.host_blocks == block_counts(running.scheduler.kv.host)
        assert stats.host_blocks_free + stats.host_blocks_cached + stats.host_blocks_in_flight == 16
        most = max(most, len(swapped))
        if swapped and not aborted and stats.num_preemptions > 1:
            running.abort(swapped[0])
            aborted = True
            assert running.stats().num_swapped == len(swapped) - 1
    assert most > 0
    assert aborted
    stats = running.stats()
    assert stats.num_swapped == 0
    assert stats.num_preempted_swap > 0
    assert stats.num_preempted_swap + stats.num_preempted_recompute == stats.num_preemptions


def test_what_ends_the_loop_is_told_to_the_recorder_first():
    class Failing(FakeExecutor):
        def launch(self, plan: StepPlan) -> StepResult:
            raise RuntimeError("the device fell off the bus")

    kept = Kept()
    running = Engine(Scheduler(CONFIG), Failing(16, 4), Clock(), recorder=kept)
    running.add(request("a", 3))
    with pytest.raises(RuntimeError):
        running.step()
    assert kept.failures == ["RuntimeError: the device fell off the bus"]


def test_a_broken_law_found_at_idle_is_told_to_the_recorder():
    kept = Kept()
    running = engine(kept, clock=Clock(tick=20.0))
    running.scheduler.kv.pool.refs[3] = 1
    with pytest.raises(InvariantViolation):
        running.check_when_idle()
    assert kept.failures == ["InvariantViolation: block 3 has 1 references; 0 block tables hold it"]
