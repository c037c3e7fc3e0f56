"""A draft becomes a plan: the executor is told what it does not know yet, the scheduler remembers what it launched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pellucid.core.cost import StepFeatures
from pellucid.core.plan import BlockUpdate, Chunk, NewSequence, StepPlan, Transfer
from pellucid.core.sequence import Sequence, Status


class Part(NamedTuple):
    """A chunk of a launched step: whose it is, and the epoch in which it was planned."""

    sequence: Sequence
    chunk: Chunk
    epoch: int


class Launched(NamedTuple):
    """A step that was planned and not yet committed."""

    step_id: int
    features: StepFeatures
    parts: list[Part]


def seal(
    step_id: int,
    chunks: Mapping[int, Chunk],
    running: Mapping[int, Sequence],
    released: tuple[int, ...],
    transfers: tuple[Transfer, ...],
) -> tuple[StepPlan, list[Part]]:
    """The plan of a step, and its parts in the order of its chunks. Marks in each sequence what the executor knows."""
    parts = [Part(running[i], chunk, running[i].epoch) for i, chunk in chunks.items()]
    new, updates = [], []
    for sequence, _, _ in parts:
        if not sequence.announced:
            sequence.announced = True
            request = sequence.request
            new.append(NewSequence(sequence.id, tuple(sequence.tokens), sequence.num_prompt, request.sampling))
        if sequence.num_table_sent < len(sequence.block_table):
            blocks = tuple(sequence.block_table[sequence.num_table_sent :])
            updates.append(BlockUpdate(sequence.id, sequence.num_table_sent, blocks))
            sequence.num_table_sent = len(sequence.block_table)
    plan = StepPlan(step_id, tuple(chunks.values()), tuple(new), tuple(updates), released, transfers=transfers)
    return plan, parts


def counted(parts: list[Part]) -> list[tuple[Sequence, Chunk, bool]]:
    """Parts of a step that ended, and whether each still counts: not where its sequence has ended or was preempted
    meanwhile, for then the blocks are gone, and so is what was computed into them."""
    running = Status.RUNNING
    return [(sequence, chunk, sequence.status is running and sequence.epoch == then) for sequence, chunk, then in parts]
