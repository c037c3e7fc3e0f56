"""The step being decided: its chunks so far, what they are predicted to cost, and what still fits.

Two bounds. The token budget is hard. The step target is a time: a chunk may take as many tokens as keep the predicted
step at or under it. Due decodes are not asked (a user's next token never waits for a forecast). So that prompts always
progress, they may add `PROMPT_FLOOR` of what the decodes alone are predicted to take, and `PROMPT_FLOOR_TOKENS` tokens
in any case: where decodes fill the target by themselves, it is missed by that much and no more. Where nobody waits for
a next token there is no gap to bound, only the wait of whoever comes next: both may be `ALONE` times as large.
"""

from __future__ import annotations

from typing import NamedTuple

from pellucid.core.config import SchedulerConfig
from pellucid.core.cost import CostModel, Prediction, StepFeatures
from pellucid.core.plan import Chunk
from pellucid.core.sequence import Sequence

PROMPT_FLOOR = 0.5
PROMPT_FLOOR_TOKENS = 32
ALONE = 4.0
MAX_REFUSED = 8
"""Waiting requests that are tried in vain in one step before it is left at that."""


class Bound(NamedTuple):
    """How far prompts may fill a step: up to `seconds` predicted (None: any), leaving `leave` tokens of the budget."""

    seconds: float | None
    leave: int


class Draft:
    """Chunks by sequence id, and the step's features as they add up."""

    def __init__(self, config: SchedulerConfig, cost: CostModel) -> None:
        self._cost = cost
        self._target = config.step_target
        self._chunked = config.chunked_prefill
        self._bytes_per_block = config.bytes_per_block
        self.budget_left = config.token_budget
        self.chunks: dict[int, Chunk] = {}
        self.promised = 0  # blocks that running sequences will need up to their next token
        self.preempted = False  # somebody lost blocks in this step: nobody new is started
        self.patient: frozenset[str] = frozenset()  # tenants that have no claim to be served first
        self.refused: set[int] = set()  # waiting sequences that were tried in vain
        self._floor_left = PROMPT_FLOOR_TOKENS
        self.num_moved = 0  # blocks that are copied between tiers in this step
        self.num_preempted = 0
        self._num_attended = self._num_context = self._num_tokens = self._num_samples = 0

    @property
    def closed(self) -> bool:
        """Whether nobody new is started in this step."""
        return self.preempted or len(self.refused) >= MAX_REFUSED

    @property
    def features(self) -> StepFeatures:
        return StepFeatures(
            self._num_tokens,
            self._num_attended,
            self._num_context,
            len(self.chunks),
            self._num_samples,
            self.num_moved * self._bytes_per_block,
        )

    @property
    def predicted(self) -> Prediction:
        """What the step costs as drafted."""
        return self._cost.predict(self.features)

    def put(self, sequence: Sequence, count: int) -> None:
        """Compute the next `count` due tokens of `sequence`; a chunk that it has already in this step grows."""
        before = self.chunks.get(sequence.id)
        start, end = sequence.num_scheduled, sequence.num_scheduled + count
        samples = end == sequence.num_known
        self.chunks[sequence.id] = Chunk(sequence.id, start if before is None else before.start, end, samples)
        self._count(start, end, samples, end if before is None else count)
        if end - start > 1 or before is not None:
            self._floor_left -= count
        sequence.num_scheduled = end
        sequence.num_pending += samples

    def withdraw(self, sequence: Sequence) -> None:
        """Take back what was given to `sequence` in this step, if anything; its own counters are the caller's."""
        chunk = self.chunks.pop(sequence.id, None)
        if chunk is None:
            return
        num_tokens = chunk.end - chunk.start
        self.budget_left += num_tokens
        self._num_tokens -= num_tokens
        self._num_attended -= num_tokens * (chunk.start + chunk.end + 1) // 2
        self._num_context -= chunk.end
        self._num_samples -= chunk.samples

    def bound(self, share: float = 1.0) -> Bound:
        """Where `share` of what the step has for prompts beside the present draft is used up."""
        leave = self.budget_left - int(share * self.budget_left)
        if self._target is None:
            return Bound(None, leave)
        base = self.predicted.seconds
        target = self._target
        if not self.chunks:
            target *= ALONE
            self._floor_left = max(self._floor_left, int(ALONE * PROMPT_FLOOR_TOKENS))
        return Bound(base + share * max(target - base, PROMPT_FLOOR * base), leave)

    def past(self, share: float) -> bool:
        """Whether what is drafted takes `share` of the target, where one is set."""
        return self._target is not None and self.predicted.seconds >= share * self._target

    def exhausted(self, bound: Bound) -> bool:
        """Whether no prompt token fits within `bound` any more, whoever's."""
        if self.budget_left <= bound.leave:
            return True
        floor = 0 if bound.leave else self._floor_left
        return bound.seconds is not None and floor <= 0 and self.predicted.seconds >= bound.seconds

    def room(self, sequence: Sequence, want: int, bound: Bound) -> int:
        """How many of `want` more tokens of a prompt fit within `bound`. Only the whole step has the floor."""
        if not self._chunked:
            return want if self.budget_left > 0 else 0
        want = max(0, min(want, self.budget_left - bound.leave))
        if bound.seconds is None:
            return want
        low, high = 0 if bound.leave else min(want, max(0, self._floor_left)), want
        while low < high:
            middle = (low + high + 1) // 2
            if self._cost.predict(self._features_with(sequence, middle)).seconds <= bound.seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def _features_with(self, sequence: Sequence, count: int) -> StepFeatures:
        before = self.chunks.get(sequence.id)
        start, end = sequence.num_scheduled, sequence.num_scheduled + count
        return StepFeatures(
            self._num_tokens + count,
            self._num_attended + count * (start + end + 1) // 2,
            self._num_context + (end if before is None else count),
            len(self.chunks) + (before is None),
            self._num_samples + (end == sequence.num_known),
            self.num_moved * self._bytes_per_block,
        )

    def _count(self, start: int, end: int, samples: bool, context: int) -> None:
        count = end - start
        self.budget_left -= count
        self._num_tokens += count
        self._num_attended += count * (start + end + 1) // 2
        self._num_context += context
        self._num_samples += samples
