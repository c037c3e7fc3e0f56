"""What is known of the running sequences: tokens, block tables and how they are sampled, a line each, in matrices.

A step's rows are looked up here with a handful of NumPy calls (`runtime/batch.py`) or by the native step itself
(csrc/step_rows.h), which also writes the drawn tokens: nothing is copied from step to step. Invariants: a line has room
for all tokens that its blocks hold and one more; arrays are replaced only when they grow, and then `native` is too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pellucid.core.plan import Chunk
from pellucid.kernels.processors import native

# How a sequence is sampled (csrc/step_rows.h, SampleRule): `layout.SAMPLE_ROW` with a seed in place of a number.
SAMPLE_RULE = np.dtype(
    [("temperature", "f4"), ("top_p", "f4"), ("min_p", "f4"), ("top_k", "i4"), ("seed", "u8")], align=True
)


class SequenceLines:
    """`tokens` and `tables` (block ids) are `[lines, columns]`; of them `known` and `num_blocks` `[lines]` are valid.
    `rules` `[lines]` are SAMPLE_RULE."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tokens: npt.NDArray[np.int32] = np.zeros((0, 0), dtype=np.int32)
        self.tables: npt.NDArray[np.int32] = np.zeros((0, 0), dtype=np.int32)
        self.known: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.num_blocks: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.rules: npt.NDArray[np.void] = np.zeros(0, dtype=SAMPLE_RULE)
        self.native: Any = None  # the same arrays as the native step sees them, where there is one

    def __len__(self) -> int:
        return len(self.known)

    def add(self, count: int) -> None:
        """`count` more lines, with nothing on them."""
        self.tokens, self.tables = (np.pad(matrix, ((0, count), (0, 0))) for matrix in (self.tokens, self.tables))
        self.known, self.num_blocks = (np.pad(column, (0, count)) for column in (self.known, self.num_blocks))
        self.rules = np.concatenate([self.rules, np.zeros(count, dtype=SAMPLE_RULE)])
        self._look()

    def write_tokens(self, line: int, tokens: tuple[int, ...]) -> None:
        """A new sequence on a line: these tokens, and no blocks."""
        self._widen(len(tokens), 0)
        self.tokens[line, : len(tokens)] = tokens
        self.known[line] = len(tokens)
        self.num_blocks[line] = 0

    def write_blocks(self, line: int, start: int, blocks: tuple[int, ...]) -> None:
        """The blocks of a line from `start` on, which end there."""
        end = start + len(blocks)
        self._widen(end * self.block_size + 1, end)
        self.tables[line, start:end] = blocks
        self.num_blocks[line] = end

    def refusal(self, chunk: Chunk, line: int) -> str:
        """Why `chunk` cannot be computed, in words."""
        return (
            f"{chunk} cannot be computed: {self.known[line]} tokens are known and {self.num_blocks[line]} blocks of "
            f"{self.block_size} are assigned, or one of them does not exist"
        )

    def _widen(self, num_tokens: int, num_blocks: int) -> None:
        have = self.tokens.shape[1], self.tables.shape[1]
        self.tokens, self.tables = _with_columns(self.tokens, num_tokens), _with_columns(self.tables, num_blocks)
        if (self.tokens.shape[1], self.tables.shape[1]) != have:
            self._look()

    def _look(self) -> None:
        module = native()
        if module is not None:
            addresses = [a.ctypes.data for a in (self.tokens, self.tables, self.known, self.num_blocks, self.rules)]
            tokens, tables, *columns = addresses
            self.native = module.SequenceLines(
                tokens, self.tokens.shape[1], tables, self.tables.shape[1], *columns, self.block_size
            )


def _with_columns(matrix: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.int32]:
    """The matrix with room for `count` columns, grown by half at least so that growth costs little per token."""
    have = matrix.shape[1]
    return matrix if count <= have else np.pad(matrix, ((0, 0), (0, max(count, have * 3 // 2, 64) - have)))
