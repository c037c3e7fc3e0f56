"""The same operations with results that do not depend on what else is in the batch, nor on how a prompt is chunked.

A library picks its matrix kernel, and with it the order in which it sums, by the shape of its arguments. So here every
shape is fixed:

- Rows go through linear maps, norms and activations in tiles of exactly `ROW_TILE` (the batch is padded to a multiple).
- Attention takes queries in tiles of `QUERY_TILE` positions, aligned to absolute positions, so that a token stands in
  the same row of the same tile however its prompt was cut; keys are padded to a multiple of `KEY_SPLIT`, the width in
  which PyTorch's CPU kernel walks them. A split that is wholly masked adds exactly nothing.

What is guaranteed: on one machine, with one PyTorch build and one thread count, on the CPU, the logits of a token are
bit for bit a function of its own sequence. What that rests on: a row's result must not depend on its place in a tile.
`check_row_independence` verifies that when a model is loaded; where it fails, the engine refuses to start instead of
promising. The cost: a decode step computes 32 rows however few are wanted, a long chunk streams the weights once per
tile, and attention is called once per sequence and tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.core.errors import ConfigError
from pellucid.kernels import Kernels, reference
from pellucid.kernels.layout import BatchLayout
from pellucid.kernels.reference import DenseWeight

ROW_TILE = 32
QUERY_TILE = 16
KEY_SPLIT = 512


def kernels() -> Kernels:
    """The reference's record with every shape-dependent operation replaced by its tiled form."""
    return replace(
        reference.kernels(),
        name="plain PyTorch, deterministic",
        padded_rows=padded_rows,
        rms_norm=rms_norm,
        linear=linear,
        linear_add_=linear_add_,
        rotate=rotate,
        silu_mul=silu_mul,
        plan_attention=plan_attention,
        attention=attention,
        logits=logits,
    )


def padded_rows(num_rows: int, dtype: torch.dtype) -> int:
    """The next multiple of ROW_TILE."""
    return -(-num_rows // ROW_TILE) * ROW_TILE


def by_tiles(operation: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """Apply a row-wise operation to tiles of exactly ROW_TILE rows of its arguments; the last tile is padded."""
    num_rows = rows[0].shape[0]
    missing = -num_rows % ROW_TILE
    if missing:
        rows = tuple(F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) for x in rows)
    tiles = [operation(*tile) for tile in zip(*(torch.split(x, ROW_TILE) for x in rows))]
    return torch.cat(tiles)[:num_rows]


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`reference.rms_norm`, by tiles of x `[T, C]` or `[T, heads, D]`."""
    return by_tiles(lambda tile: reference.rms_norm(tile, weight, eps, dtype), x)


def linear(x: Tensor, weight: DenseWeight) -> Tensor:
    """`reference.linear`, by tiles."""
    return by_tiles(lambda tile: reference.linear(tile, weight), x)


def linear_add_(x: Tensor, y: Tensor, weight: DenseWeight) -> Tensor:
    """`reference.linear_add_`, by tiles."""
    return x.copy_(by_tiles(lambda a, b: reference.linear_add_(a.clone(), b, weight), x, y))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`reference.rotate`, by tiles."""
    return by_tiles(reference.rotate, x, cos, sin)


def silu_mul(x: Tensor) -> Tensor:
    """`reference.silu_mul`, by tiles."""
    return by_tiles(reference.silu_mul, x)


def logits(x: Tensor, weight: DenseWeight) -> Tensor:
    """`reference.logits`, by tiles."""
    return by_tiles(lambda tile: reference.logits(tile, weight), x)


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows [row_start, row_end) of the batch stand at rows [offset, ...) of a query tile that sees `num_keys` keys."""

    row_start: int
    row_end: int
    offset: int
    num_keys: int
    mask: Tensor


@dataclass(frozen=True, slots=True)
class TiledSequence:
    """The tiles of one chunk; `blocks` gathers the keys of the last, and so of all."""

    blocks: Tensor
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class TiledPlan:
    """What `write_kv` (the reference's) and `attention` need of a step."""

    num_rows: int
    write_rows: Tensor
    sequences: tuple[TiledSequence, ...]


def plan_attention(layout: BatchLayout, num_kv_heads: int, dtype: torch.dtype, device: torch.device) -> TiledPlan:
    """Cut every chunk at the absolute multiples of QUERY_TILE."""
    sequences = [_plan_sequence(layout, i, num_kv_heads, dtype, device) for i in range(layout.num_sequences)]
    return TiledPlan(layout.num_rows, reference.cache_rows(layout, num_kv_heads, device), tuple(sequences))


def attention(queries: Tensor, cache_keys: Tensor, cache_values: Tensor, plan: TiledPlan) -> Tensor:
    """`reference.attention`, one call per sequence and tile. Rows that pad the batch come out as zeros."""
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = cache_keys.shape[1]
    shared = num_heads // num_kv_heads
    out = torch.zeros_like(queries)
    for sequence in plan.sequences:
        keys, values = (
            reference.gather(cache, sequence.blocks, 1, queries.dtype)[0, :, None].expand(-1, shared, -1, -1)
            for cache in (cache_keys, cache_values)
        )
        for tile in sequence.tiles:
            rows = queries.new_zeros((QUERY_TILE, num_kv_heads, shared, head_dim))
            used = slice(tile.offset, tile.offset + tile.row_end - tile.row_start)
            rows[used] = queries[tile.row_start : tile.row_end].view(-1, num_kv_heads, shared, head_dim)
            attended = F.scaled_dot_product_attention(
                rows.permute(1, 2, 0, 3),
                keys[:, :, : tile.num_keys],
                values[:, :, : tile.num_keys],
                attn_mask=tile.mask,
            )
            out[tile.row_start : tile.row_end] = attended.permute(2, 0, 1, 3)[used].reshape(-1, num_heads, head_dim)
    return out.view(num_rows, -1)


def check_row_independence(weight: DenseWeight) -> None:
    """Raise ConfigError unless a product with this weight, and the activation of its width, give a row the same bits
    in every place of a tile."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    row = torch.randn(1, weight.matrix.shape[1], generator=generator).to(weight.matrix)
    product = reference.linear(row.repeat(ROW_TILE, 1), weight)
    results = [product]
    if product.shape[1] % 2 == 0:
        results.append(reference.silu_mul(product[:1].repeat(ROW_TILE, 1)))
    if any(not torch.equal(result, result[:1].expand_as(result)) for result in results):
        raise ConfigError(
            f"--deterministic cannot be promised here: with {torch.get_num_threads()} threads, PyTorch's product of "
            f"{ROW_TILE} x {weight.matrix.shape[1]} by {weight.matrix.shape[0]} depends on a row's place; "
            f"try --threads 1"
        )


def _plan_sequence(
    layout: BatchLayout, i: int, num_kv_heads: int, dtype: torch.dtype, device: torch.device
) -> TiledSequence:
    row, start, end = int(layout.row_starts[i]), int(layout.starts[i]), int(layout.ends[i])
    tiles = []
    for first in range(start - start % QUERY_TILE, end, QUERY_TILE):
        low, high = max(first, start), min(first + QUERY_TILE, end)
        num_keys = -(-(first + QUERY_TILE) // KEY_SPLIT) * KEY_SPLIT
        positions = torch.arange(first, first + QUERY_TILE, device=device)
        mask = torch.zeros((QUERY_TILE, num_keys), dtype=dtype, device=device)
        mask.masked_fill_(torch.arange(num_keys, device=device) > positions[:, None], -torch.inf)
        tiles.append(Tile(row + low - start, row + high - start, low - first, num_keys, mask))
    table = np.zeros((1, -(-tiles[-1].num_keys // layout.block_size)), dtype=np.int64)
    used = -(-end // layout.block_size)
    table[0, :used] = layout.block_tables[i, :used]
    return TiledSequence(reference.block_pieces(table, num_kv_heads, device), tuple(tiles))
