"""How long an executor takes for steps of known make-up: the measurement behind predictions of this engine's speed.

A step is described by (sequences, new tokens each, tokens before them, whether the last row samples). Its cache is
claimed, not computed: reading zeros takes as long as reading keys. Every batch runs once untimed, so that what is timed
is the step and not the announcement of its sequences, and then several times in a row, because a step that follows its
like finds its weights where a stranger's successor does not; short steps more often, since a neighbour disturbs them
more. The repeats go round the whole list, so that a change in the machine's mood spreads over all batches instead of
spoiling one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

from pellucid.core.cost import StepFeatures, features_of
from pellucid.core.plan import BlockUpdate, Chunk, NewSequence, StepPlan
from pellucid.core.request import SamplingParams
from pellucid.engine.executor import Executor

# Timed in a row, each time a batch has its turn: so many, or fewer once they have taken so long.
_FEWEST_RUNS, _MOST_RUNS, _TURN_SECONDS = 3, 12, 0.05


class Batch(NamedTuple):
    """`num_sequences` sequences of `num_cached` tokens, each computing `num_new` more."""

    num_sequences: int
    num_new: int
    num_cached: int
    samples: bool

    def num_blocks(self, block_size: int) -> int:
        """Blocks that the batch occupies (a sampled token needs none before it is computed)."""
        return self.num_sequences * -(-(self.num_cached + self.num_new) // block_size)


class StepTiming(NamedTuple):
    """Median over the repeats: the whole step, and the part of it before the forward pass. `spread` is the standard
    deviation of the whole over its median."""

    batch: Batch
    features: StepFeatures
    seconds: float
    prepare_seconds: float
    spread: float


def standard_batches(max_context: int) -> list[Batch]:
    """Rows from 1 to 512 without and with the head, and longer contexts for decodes and for a chunk: what they read of
    the cache grows from what a processor may hold in its own caches to what it may not. All within `max_context` tokens
    a sequence (at least 128)."""
    decodes = [Batch(rows, 1, 15, samples) for rows in (1, 2, 4, 8, 16, 32, 64) for samples in (False, True)]
    chunks = [Batch(1, rows, 0, False) for rows in (64, 128, 256, 512) if rows <= max_context // 2]
    far = min(4096, max_context)
    rows = chunks[-1].num_new
    reads = [Batch(1, 1, far // 4 - 1, False), Batch(1, 1, far - 1, False), Batch(4, 1, far - 1, False)]
    return [*decodes, *chunks, *reads, Batch(1, rows, far - rows, False)]


def time_steps(
    executor: Executor,
    batches: Sequence[Batch],
    *,
    block_size: int,
    repeats: int = 5,
    limit_seconds: float = math.inf,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[StepTiming]:
    """Give every batch `repeats` turns, or fewer where that would take longer than `limit_seconds` (but one).
    The executor must hold the largest batch's blocks, numbered from 0."""
    runs: list[list[tuple[float, float]]] = [[] for _ in batches]
    step_id, began = 0, perf_counter()
    for round_ in range(repeats):
        if round_ and (perf_counter() - began) * (round_ + 1) / round_ > limit_seconds:
            break
        for index, batch in enumerate(batches):
            turn = _turn(executor, _plan(batch, step_id, block_size))
            runs[index] += turn
            step_id += len(turn) + 2
            progress(round_ * len(batches) + index + 1, repeats * len(batches))
    return [_timing(batch, times) for batch, times in zip(batches, runs, strict=True)]


def warm_up(executor: Executor, *, num_tokens: int, num_sequences: int, block_size: int, num_blocks: int) -> None:
    """Run a chunk of `num_tokens` and a step of `num_sequences` decodes once, or what `num_blocks` hold of them: a
    step's buffers, the first pages of the cache and the kernels' threads are there before a request waits for them."""
    chunk = Batch(1, min(num_tokens, num_blocks * block_size), 0, True)
    decodes = Batch(min(num_sequences, num_blocks), 1, 0, True)
    for index, batch in enumerate((chunk, decodes)):
        first = _plan(batch, 2 * index, block_size)
        executor.collect(executor.launch(first))
        _release(executor, first, 2 * index + 1)


def _release(executor: Executor, first: StepPlan, step_id: int) -> None:
    released = tuple(n.seq_id for n in first.new)
    executor.collect(executor.launch(StepPlan(step_id, (), released=released)))


def _turn(executor: Executor, first: StepPlan) -> list[tuple[float, float]]:
    """Announce `first`, run its like, and release its sequences: (seconds, of them preparation) of each timed run."""
    executor.collect(executor.launch(first))
    times: list[tuple[float, float]] = []
    while len(times) < _FEWEST_RUNS or (len(times) < _MOST_RUNS and sum(t for t, _ in times) < _TURN_SECONDS):
        result = executor.collect(executor.launch(StepPlan(first.step_id + 1 + len(times), first.chunks)))
        times.append((result.seconds, dict(result.phases).get("prepare", 0.0)))
    _release(executor, first, first.step_id + 1 + len(times))
    return times


def _plan(batch: Batch, step_id: int, block_size: int) -> StepPlan:
    """The step that announces the batch's sequences and computes it."""
    start, end = batch.num_cached, batch.num_cached + batch.num_new
    per_sequence = -(-end // block_size)
    ids = range(-batch.num_sequences, 0)  # a scheduler that uses the same executor counts up from 0
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    return StepPlan(
        step_id,
        chunks=tuple(Chunk(i, start, end, batch.samples) for i in ids),
        new=tuple(NewSequence(i, (1,) * end, end, sampling) for i in ids),
        blocks=tuple(
            BlockUpdate(i, 0, tuple(range(n * per_sequence, (n + 1) * per_sequence))) for n, i in enumerate(ids)
        ),
    )


def _timing(batch: Batch, times: list[tuple[float, float]]) -> StepTiming:
    seconds = [whole for whole, _ in times]
    middle = statistics.median(seconds)
    features = features_of(_plan(batch, 0, 1))
    spread = statistics.pstdev(seconds) / middle
    return StepTiming(batch, features, middle, statistics.median(p for _, p in times), spread)
