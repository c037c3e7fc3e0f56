"""The executor's mirror of the running sequences, and the flat batch of one step made from it.

Tokens and block tables of all sequences stand in two matrices with one line per sequence (`kernels/lines.py`), so that
a step's rows are looked up with a handful of NumPy calls however many sequences and tokens it has: no Python loop runs
over tokens. Native kernels look them up themselves; `build` and `append` are for those that take a batch.

    line      tokens[line]: t0 t1 t2 ...        tables[line]: b0 b1 b2 ...        known[line]: number of tokens known

Invariants: a line belongs to one sequence from `new` to `released`; a row of a batch has a known token and a block.
Both are checked, because a plan that breaks them is a scheduler's bug that must not read as a strange answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pellucid.core.errors import InvariantViolation
from pellucid.core.plan import Chunk, StepPlan
from pellucid.core.request import SamplingParams
from pellucid.kernels.layout import BatchLayout
from pellucid.kernels.lines import SequenceLines
from pellucid.runtime.sampler import rule_of


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step on the host. `token_ids` and `positions` are `[T]`, padded as the kernels wish (with token 0 at
    position 0); `sample_rows` `[R]` and, for the same rows, the sequences they belong to and the position of
    the token that will be sampled."""

    layout: BatchLayout
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    sample_rows: npt.NDArray[np.int64]
    sample_lines: npt.NDArray[np.int64]
    sample_positions: npt.NDArray[np.int64]


class SequenceMirror:
    """What the executor knows of the running sequences, kept up to date by `apply` and `append`."""

    def __init__(self, block_size: int, seed: int = 0) -> None:
        self.lines = SequenceLines(block_size)
        self.line_of: dict[int, int] = {}  # by sequence id
        self._seed = seed
        self._free: list[int] = []
        self._sampling: dict[int, tuple[int, SamplingParams]] = {}

    @property
    def num_sequences(self) -> int:
        """Sequences mirrored at present."""
        return len(self.line_of)

    def sampling(self, line: int) -> tuple[int, SamplingParams]:
        """(sequence id, sampling parameters) of a line."""
        return self._sampling[line]

    def apply(self, plan: StepPlan) -> None:
        """Take in a plan's `released`, `new` and `blocks`, in that order."""
        for seq_id in plan.released:
            self._free.append(self._line(seq_id))
            del self.line_of[seq_id]
        for new in plan.new:
            if new.seq_id in self.line_of:
                raise InvariantViolation(f"step {plan.step_id}: sequence {new.seq_id} is new, and already known")
            line = self.line_of[new.seq_id] = self._take_line()
            self._sampling[line] = (new.seq_id, new.sampling)
            self.lines.write_tokens(line, new.token_ids)
            self.lines.rules[line] = rule_of(new.seq_id, new.sampling, self._seed)
        for update in plan.blocks:
            self.lines.write_blocks(self._line(update.seq_id), update.start, update.blocks)

    def build(self, chunks: Sequence[Chunk], padded_rows: Callable[[int], int]) -> StepBatch:
        """The flat batch of these chunks, `padded_rows(T)` rows long. Raises InvariantViolation for a chunk whose
        tokens or blocks are not known."""
        table = np.array([(self._line(c.seq_id), c.start, c.end, c.samples) for c in chunks], dtype=np.int64)
        lines, starts, ends, samples = np.ascontiguousarray(table.reshape(-1, 4).T)
        known, block_size = self.lines, self.lines.block_size
        bad = (ends > known.known[lines]) | (ends > known.num_blocks[lines] * block_size) | (starts >= ends)
        for i in np.flatnonzero(bad).tolist():
            raise InvariantViolation(known.refusal(chunks[i], int(lines[i])))
        row_starts, row_lines, positions = _rows_of(lines, starts, ends)
        most_blocks = -(-int(ends.max()) // block_size)
        block, offset = np.divmod(positions, block_size)
        layout = BatchLayout(
            row_starts=row_starts,
            starts=starts,
            ends=ends,
            block_tables=known.tables[lines, :most_blocks].astype(np.int64),
            slots=known.tables[row_lines, block] * np.int64(block_size) + offset,
            block_size=block_size,
        )
        sampling = np.flatnonzero(samples)
        num_rows = padded_rows(len(positions))
        return StepBatch(
            layout=layout,
            token_ids=padded(known.tokens[row_lines, positions].astype(np.int64), num_rows),
            positions=padded(positions, num_rows),
            sample_rows=row_starts[sampling + 1] - 1,
            sample_lines=lines[sampling],
            sample_positions=ends[sampling],
        )

    def append(self, batch: StepBatch, tokens: npt.NDArray[np.int64]) -> None:
        """Store the sampled tokens `[R]`, each behind its chunk."""
        if len(tokens) == 0:
            return
        self.lines.tokens[batch.sample_lines, batch.sample_positions] = tokens
        self.lines.known[batch.sample_lines] = batch.sample_positions + 1

    def _line(self, seq_id: int) -> int:
        line = self.line_of.get(seq_id)
        if line is None:
            raise InvariantViolation(f"the plan names sequence {seq_id}, which the executor was never told of")
        return line

    def _take_line(self) -> int:
        if not self._free:
            old = len(self.lines)
            more = max(8, old)
            self._free.extend(reversed(range(old, old + more)))
            self.lines.add(more)
        return self._free.pop()


def padded(values: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """The values `[n]` and zeros behind them, `[count]`."""
    return values if count == len(values) else np.pad(values, (0, count - len(values)))


def _rows_of(
    lines: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The first row of every chunk and the end of the last, and for every row its line and its position."""
    lengths = ends - starts
    row_starts = np.zeros(len(lines) + 1, dtype=np.int64)
    np.cumsum(lengths, out=row_starts[1:])
    num_rows = int(row_starts[-1])
    if num_rows == len(lines):  # a row each, as most steps have
        return row_starts, lines, starts
    return row_starts, np.repeat(lines, lengths), np.arange(num_rows) + np.repeat(starts - row_starts[:-1], lengths)
