"""A scheduler of a few lines that drives an executor by hand: it hands out blocks and says what each step computes.

Tests use it to put the executor through every mode (batched, chunked, shared prefixes, preemption) on demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pellucid.core.plan import BlockUpdate, Chunk, NewSequence, StepPlan
from pellucid.core.request import SamplingParams
from pellucid.engine.executor import Executor

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Running:
    """A sequence as the driver sees it. `told` is False until the executor has been sent it."""

    seq_id: int
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    told: bool = False


class Driver:
    """Owns blocks 0 .. num_blocks - 1 and the running sequences."""

    def __init__(self, executor: Executor, num_blocks: int, block_size: int) -> None:
        self.executor, self.block_size = executor, block_size
        self.free = list(reversed(range(num_blocks)))
        self.running: dict[int, Running] = {}
        self.released: list[int] = []
        self.step_id = 0

    def add(
        self,
        seq_id: int,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        shared: Sequence[int] = (),
    ) -> Running:
        """A new sequence; `shared` are blocks that already hold the head of its prompt."""
        sequence = Running(seq_id, list(prompt), len(prompt), sampling, list(shared), len(shared) * self.block_size)
        self.running[seq_id] = sequence
        return sequence

    def release(self, seq_id: int, *, keep_blocks: bool = False) -> Running:
        """Forget a sequence, as at its end."""
        sequence = self.running.pop(seq_id)
        self.released.append(seq_id)
        if not keep_blocks:
            self.free.extend(sequence.blocks)
        return sequence

    def preempt(self, seq_id: int) -> None:
        """Take the blocks back; the sequence comes anew with all its tokens."""
        sequence = self.release(seq_id)
        again = self.add(seq_id, sequence.tokens, sequence.sampling)
        again.num_prompt = sequence.num_prompt

    def step(self, chunk: int | dict[int, int] = 512, only: Sequence[int] | None = None) -> None:
        """Compute up to `chunk` tokens (or chunk[seq_id]) of each sequence and append what is sampled."""
        chunks, new, updates = [], [], []
        for sequence in self.running.values():
            if only is not None and sequence.seq_id not in only:
                continue
            limit = chunk if isinstance(chunk, int) else chunk.get(sequence.seq_id, 1)
            start = sequence.computed
            end = min(start + limit, len(sequence.tokens))
            if not sequence.told:
                new.append(NewSequence(sequence.seq_id, tuple(sequence.tokens), sequence.num_prompt, sequence.sampling))
            have = len(sequence.blocks) if sequence.told else 0
            while len(sequence.blocks) * self.block_size < end:
                sequence.blocks.append(self.free.pop())
            if len(sequence.blocks) > have:
                updates.append(BlockUpdate(sequence.seq_id, have, tuple(sequence.blocks[have:])))
            sequence.told, sequence.computed = True, end
            chunks.append(Chunk(sequence.seq_id, start, end, end == len(sequence.tokens)))
        plan = StepPlan(self.step_id, tuple(chunks), tuple(new), tuple(updates), tuple(self.released))
        self.step_id, self.released = self.step_id + 1, []
        result = self.executor.collect(self.executor.launch(plan))
        for done, tokens in zip(chunks, result.tokens):
            assert len(tokens) == done.samples
            self.running[done.seq_id].tokens.extend(tokens)

    def generate(self, seq_id: int, count: int, chunk: int = 512) -> list[int]:
        """Run until the sequence has `count` generated tokens, and return them."""
        sequence = self.running[seq_id]
        while len(sequence.tokens) < sequence.num_prompt + count:
            self.step(chunk)
        return sequence.tokens[sequence.num_prompt : sequence.num_prompt + count]
