"""Timing drives any executor: every batch is announced, timed on the runs after that, and forgotten."""

from __future__ import annotations

from pellucid.core.cost import features_of
from pellucid.core.plan import StepPlan, StepResult
from pellucid.runtime.step_timing import Batch, standard_batches, time_steps


class Clockwork:
    """An executor whose steps take a known time, the announcing ones a second more; it checks what it is told."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.known: set[int] = set()
        self.steps = 0

    def launch(self, plan: StepPlan) -> StepPlan:
        self.known -= set(plan.released)
        self.known |= {n.seq_id for n in plan.new}
        owned = [block for update in plan.blocks for block in update.blocks]
        assert len(owned) == len(set(owned))
        assert all(0 <= block < self.num_blocks for block in owned)
        assert {c.seq_id for c in plan.chunks} <= self.known
        self.steps += 1
        return plan

    def collect(self, plan: StepPlan) -> StepResult:
        features = features_of(plan)
        seconds = 0.001 * features.num_tokens + (1.0 if plan.new else 0.0)
        tokens = tuple((7,) if c.samples else () for c in plan.chunks)
        return StepResult(plan.step_id, tokens, seconds, (("prepare", 0.0005),))


def test_the_runs_after_the_first_are_timed_and_nothing_is_left_behind() -> None:
    batches = [Batch(4, 1, 31, True), Batch(1, 64, 0, False)]
    executor = Clockwork(max(b.num_blocks(16) for b in batches))
    seen: list[tuple[int, int]] = []
    timings = time_steps(executor, batches, block_size=16, repeats=3, progress=lambda *p: seen.append(p))
    assert [t.seconds for t in timings] == [0.004, 0.064]
    assert [(t.prepare_seconds, t.spread) for t in timings] == [(0.0005, 0.0)] * 2
    assert timings[0].features == (4, 4 * 32, 4 * 32, 4, 4, 0)
    assert seen[-1] == (6, 6)
    # Announced, timed and released, three turns each: the short step twelve times, the long one three times.
    assert executor.steps == 3 * (1 + 12 + 1) + 3 * (1 + 3 + 1)
    assert not executor.known


def test_a_limit_cuts_repeats_but_never_the_first_round() -> None:
    batches = [Batch(1, 1, 15, False)]
    executor = Clockwork(1)
    assert len(time_steps(executor, batches, block_size=16, repeats=5, limit_seconds=0.0)) == 1
    assert executor.steps == 1 + 12 + 1


def test_the_standard_batches_stay_within_the_context_and_show_what_context_costs() -> None:
    for context in (256, 2048, 8192):
        batches = standard_batches(context)
        assert max(b.num_cached + b.num_new for b in batches) <= context
        rows = {b.num_sequences * b.num_new for b in batches if b.num_cached < 16 and not b.samples}
        far = [b for b in batches if b.num_cached >= 16]
        assert len(far) == 4
        assert len({b.num_sequences * b.num_cached for b in far if b.num_new == 1}) == 3
        assert {b.num_sequences * b.num_new for b in far} <= rows
