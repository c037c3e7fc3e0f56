"""Where each row of a step's flat batch belongs: which sequence, which positions, which cache slots.

A step computes the chunks of S sequences as one flat batch of T rows, without padding:

    rows       0 ............ n0 ...... n0+n1 ... T        chunk i owns rows [row_starts[i], row_starts[i + 1])
    positions  starts[0] .. ends[0] | starts[1] ..         and computes positions [starts[i], ends[i]) of its sequence

The cache that a slot lies in holds floats, or int8 with one float32 scale per token and KV head, whose SCALE_BYTES
stand behind the head's D numbers: value = number * scale.

All arrays are NumPy on the host, built once a step; kernels derive from them, once a step too, what they need on their
device (`Kernels.plan_attention`), so that no layer waits for the device to ask it for a size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The host's view of a step. `block_tables` is `[S, most blocks]`, row i valid up to ceil(ends[i] / block_size);
    what stands behind that is any valid block id. `slots` is `[T]`: block id x block_size + offset, where each row's
    key and value go."""

    row_starts: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    block_tables: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    block_size: int

    @property
    def num_sequences(self) -> int:
        """S: chunks in the step."""
        return len(self.starts)

    @property
    def num_rows(self) -> int:
        """T: tokens computed in the step."""
        return int(self.row_starts[-1])

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Rows per chunk, `[S]`."""
        return np.diff(self.row_starts)


# How one row is sampled (csrc/kernels.h, SampleRow). Temperature 0 is greedy; top-p 1, min-p 0 and top-k 0 are off;
# `uniform` in [0, 1) is the row's random number.
SAMPLE_ROW = np.dtype(
    [("temperature", "f4"), ("top_p", "f4"), ("min_p", "f4"), ("top_k", "i4"), ("uniform", "f8")], align=True
)
