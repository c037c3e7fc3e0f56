"""The operations once more, one row at a time in float64: too plain to be wrong, too slow to be used."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from pellucid.kernels.layout import BatchLayout


def attention(
    queries: Tensor, keys: Tensor, values: Tensor, block_table: list[int], block_size: int, start: int
) -> Tensor:
    """Rows `[n, H, D]` of one sequence at positions start, start + 1, ...; caches `[blocks, G, block_size, D]`."""
    num_rows, num_heads, head_dim = queries.shape
    shared = num_heads // keys.shape[1]
    places = [(block_table[p // block_size], p % block_size) for p in range(start + num_rows)]
    past_keys, past_values = (
        torch.stack([cache[block, :, offset] for block, offset in places]).double() for cache in (keys, values)
    )
    out = torch.zeros(num_rows, num_heads, head_dim, dtype=torch.float64)
    for row in range(num_rows):
        seen = start + row + 1
        for head in range(num_heads):
            scores = past_keys[:seen, head // shared] @ queries[row, head].double() / math.sqrt(head_dim)
            out[row, head] = torch.softmax(scores, dim=0) @ past_values[:seen, head // shared]
    return out


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """One head `[D]` turned by its position, pair (i, i + D/2) by position * theta^(-2i/D)."""
    half = len(x) // 2
    out = x.double().clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        a, b = float(x[i]), float(x[i + half])
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def layout_of(chunks: list[tuple[int, int]], tables: list[list[int]], block_size: int) -> BatchLayout:
    """The layout of chunks [start, end) over block tables, spelt out position by position."""
    widest = max(-(-end // block_size) for _, end in chunks)
    slots = [
        table[position // block_size] * block_size + position % block_size
        for (start, end), table in zip(chunks, tables)
        for position in range(start, end)
    ]
    rows = np.cumsum([0] + [end - start for start, end in chunks])
    return BatchLayout(
        row_starts=rows.astype(np.int64),
        starts=np.array([start for start, _ in chunks], dtype=np.int64),
        ends=np.array([end for _, end in chunks], dtype=np.int64),
        block_tables=np.array([(table + [0] * widest)[:widest] for table in tables], dtype=np.int64),
        slots=np.array(slots, dtype=np.int64),
        block_size=block_size,
    )
