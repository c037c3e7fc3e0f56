"""Every operation in plain PyTorch: the oracle that native kernels are compared with, and what serves without them.

Invariants: no operation asks the device for a value (`.item()`, `.numpy()`), every tensor it makes lives where its
inputs live, and none modifies an input unless its name ends in an underscore or says write. bfloat16 products are
accumulated in float32. The residual stream x, to which every layer adds, is float32 whatever the compute dtype: kept in
bfloat16 it is rounded twice a layer, which made the log-probabilities of a 30-layer model half as wrong again. Sizes in
shapes are named in the package's docstring (T rows, H and G heads, D head dimension).

The cache of a layer is two tensors, keys and values, each `[blocks, G, block_size, D]`: for one head, the tokens of a
block lie together. `runtime/kv_store.py` says why. In int8 it is `[blocks, G, block_size, D + 4]` (`quantised`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.kernels import Kernels, StoredTensor
from pellucid.kernels.layout import SCALE_BYTES, BatchLayout
from pellucid.kernels.sampling import sample

# Chunks longer than this are attended in pieces, which bounds the mask to this many rows.
_CHUNK_ROWS = 1024
# Decodes are attended together, padded to the longest; contexts under this many blocks are never split apart.
_ALWAYS_TOGETHER_BLOCKS = 8


def kernels() -> Kernels:
    """The record of everything below."""
    return Kernels(
        name="plain PyTorch",
        padded_rows=padded_rows,
        pack=pack,
        pack_gated=lambda parts, dtype, device: pack(parts, (), dtype, device),
        table=lambda stored, dtype, device: stack([stored], dtype, device),
        pack_table=DenseWeight,
        embedding=embedding,
        rms_norm=rms_norm,
        linear=linear,
        linear_add_=linear_add_,
        rotate=rotate,
        silu_mul=silu_mul,
        plan_attention=plan_attention,
        write_kv=write_kv,
        attention=attention,
        logits=logits,
        sample=sample,
    )


def padded_rows(num_rows: int, dtype: torch.dtype) -> int:
    """How many rows a batch of `num_rows` is computed with.

    PyTorch compiles a bfloat16 product anew for every number of rows and keeps what it compiled: about 0.6 MB for each
    shape of weight. So rows come in few sizes: 1, 2, 4, multiples of 8 up to 64, then steps of an eighth to a quarter.
    Up to 64 rows the padding costs nothing, since reading the weights takes the time. float32 needs none of this.
    """
    if dtype == torch.float32 or num_rows <= 2:
        return num_rows
    step = 4 if num_rows <= 4 else max(8, 1 << (num_rows - 1).bit_length() - 3)
    return -(-num_rows // step) * step


# --- linear maps -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A linear map as a plain matrix `[out, in]` and a bias `[out]` or None, in the compute dtype."""

    matrix: Tensor
    bias: Tensor | None = None


def pack(
    parts: Sequence[StoredTensor], biases: Sequence[StoredTensor], dtype: torch.dtype, device: torch.device
) -> DenseWeight:
    """Stack stored matrices `[out_i, in]` to one weight of sum(out_i) rows; `biases` are stacked alike, or empty."""
    return DenseWeight(stack(parts, dtype, device), stack(biases, dtype, device) if biases else None)


def stack(parts: Sequence[StoredTensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Stored tensors that agree in all but the first dimension, one behind the other, read straight into place."""
    rows = [part.shape[0] for part in parts]
    out = torch.empty((sum(rows), *parts[0].shape[1:]), dtype=dtype, device=device)
    for part, piece in zip(parts, torch.split(out, rows)):
        part.copy_into(piece)
    return out


def linear(x: Tensor, weight: DenseWeight) -> Tensor:
    """x @ W^T + b. x: `[T, in]` -> `[T, out]`."""
    return F.linear(x, weight.matrix, weight.bias)


def linear_add_(x: Tensor, y: Tensor, weight: DenseWeight) -> Tensor:
    """x += y @ W^T, in place. x: `[T, out]`, float32; y: `[T, in]`, compute dtype; returns x."""
    if y.dtype == x.dtype:
        return x.addmm_(y, weight.matrix.t())
    return x.add_(F.linear(y, weight.matrix))


def logits(x: Tensor, weight: DenseWeight) -> Tensor:
    """x @ W^T in float32, whatever the dtype of x. x: `[R, C]` -> `[R, V]`; a head has no bias.

    A bfloat16 product rounds its result to 8 bits, which costs a logit of 16 up to 0.06. So the product is taken a
    second time with the rounded result subtracted in the accumulator: what comes out is the rounding error, small
    enough to survive its own rounding.
    """
    rounded = F.linear(x, weight.matrix)
    if rounded.dtype == torch.float32:
        return rounded
    error = torch.addmm(rounded.neg(), x, weight.matrix.t())
    return rounded.float().add_(error)


# --- rows ------------------------------------------------------------------------------------------------------------


def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """Rows of `table` `[V, C]` by `token_ids` `[T]` -> `[T, C]`, float32: the beginning of the residual stream."""
    return F.embedding(token_ids, table).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467), in float32, returned in `dtype`.
    The weight is float32."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864), halves paired: dimension i turns with i + D/2.

    x: `[T, heads, D]`; cos, sin: `[T, 1, D]` in float32, where sin carries the sign of the first half (see
    `rope_table`). Computed in float32, returned in x's dtype.
    """
    half = x.shape[-1] // 2
    turned = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, turned, sin).to(x.dtype)


def rope_table(
    num_positions: int, head_dim: int, theta: float, factors: Sequence[float] | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(cos, sin) of position x frequency for positions below `num_positions`, each `[num_positions, 1, D]`, float32.

    Frequency i is theta^(-2i/D) / factors[i]; both halves of D carry the same angles, the first half of sin negated.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / (theta**exponents)
    if factors is not None:
        frequencies = frequencies / torch.tensor(factors, dtype=torch.float32, device=device)
    angles = torch.arange(num_positions, dtype=torch.float32, device=device)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]


def silu_mul(x: Tensor) -> Tensor:
    """silu(gate) * up, with x = (gate | up) `[T, 2F]` -> `[T, F]` (SwiGLU, arXiv 2002.05202)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


# --- attention over a paged cache ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decodes:
    """Sequences with one query row each, attended together. `rows` `[B]` are their rows in the batch (None: all, in
    order); `blocks` gathers `[B x G x n]` pieces of a cache viewed as `[blocks x G, block_size x D]`; `mask`
    `[B, 1, 1, n x block_size]` hides what lies behind each sequence's end."""

    rows: Tensor | None
    num_sequences: int
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Consecutive rows [row_start, row_end) of one sequence. `blocks` gathers `[G x n]` pieces; `mask`
    `[rows, n x block_size]` hides the future, None where the rows start at position 0 (plain causal)."""

    row_start: int
    row_end: int
    blocks: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What `write_kv` and `attention` need in every layer of one step. `write_rows` `[T x G]` index a cache viewed as
    `[blocks x G x block_size, D]`."""

    num_rows: int
    write_rows: Tensor
    decodes: tuple[Decodes, ...]
    chunks: tuple[ChunkRows, ...]


def plan_attention(layout: BatchLayout, num_kv_heads: int, dtype: torch.dtype, device: torch.device) -> AttentionPlan:
    """Sort a step's sequences into groups that one call can attend, and put their gather indices and masks on `device`.

    Decodes whose contexts are of similar length form a group; every longer chunk goes by itself.
    """
    lengths = layout.lengths
    single = np.flatnonzero(lengths == 1)
    whole_batch = len(single) == layout.num_sequences
    decodes = []
    for members in _similar(single, -(-layout.ends // layout.block_size)):
        in_order = whole_batch and len(members) == len(single)
        decodes.append(_plan_decodes(layout, single if in_order else members, num_kv_heads, dtype, device, in_order))
    longer = np.flatnonzero(lengths > 1)
    band = _causal_band(layout, longer, dtype, device)
    chunks = [piece for i in longer for piece in _plan_chunk(layout, int(i), num_kv_heads, band, device)]
    return AttentionPlan(
        num_rows=layout.num_rows,
        write_rows=cache_rows(layout, num_kv_heads, device),
        decodes=tuple(decodes),
        chunks=tuple(chunks),
    )


def cache_rows(layout: BatchLayout, num_kv_heads: int, device: torch.device) -> Tensor:
    """`[T x G]`: for every row and KV head, the line of a cache viewed as `[blocks x G x block_size, D]`."""
    block, offset = np.divmod(layout.slots, layout.block_size)
    lines = (block[:, None] * num_kv_heads + np.arange(num_kv_heads)) * layout.block_size + offset[:, None]
    return torch.from_numpy(lines.reshape(-1)).to(device)


def block_pieces(tables: npt.NDArray[np.int64], num_kv_heads: int, device: torch.device) -> Tensor:
    """`[B x G x n]`: for block tables `[B, n]`, the pieces of a cache viewed as `[blocks x G, block_size x D]`."""
    pieces = tables[:, None, :] * num_kv_heads + np.arange(num_kv_heads)[None, :, None]
    return torch.from_numpy(pieces.reshape(-1)).to(device)


def quantised(x: Tensor) -> Tensor:
    """Rows `[..., D]` as int8 `[..., D + 4]`: round(x * 127 / m), where m is the row's largest magnitude, then m / 127
    as the bytes of a float32. Rows whose m is at most 1e-30 become zeros."""
    x = x.float()
    top = x.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(top > 1e-30, 127.0 / top, 0.0)
    return torch.cat(((x * inverse).round().to(torch.int8), (top / 127.0).view(torch.int8)), dim=-1)


def dequantised(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """What `quantised` made, `[..., D + 4]`, as numbers `[..., D]`."""
    numbers, scales = torch.split(packed, [packed.shape[-1] - SCALE_BYTES, SCALE_BYTES], dim=-1)
    return (numbers * scales.clone(memory_format=torch.contiguous_format).view(torch.float32)).to(dtype)


def gather(cache: Tensor, pieces: Tensor, num_sequences: int, dtype: torch.dtype) -> Tensor:
    """Copy the pieces of `num_sequences` sequences out of a cache: `[B, G, n x block_size, D]` in the compute dtype."""
    num_blocks, num_heads, block_size, width = cache.shape
    flat = cache.view(num_blocks * num_heads, block_size * width)
    pieces = flat.index_select(0, pieces).view(num_sequences, num_heads, -1, width)
    return dequantised(pieces, dtype) if cache.dtype == torch.int8 else pieces


def write_kv(keys: Tensor, values: Tensor, cache_keys: Tensor, cache_values: Tensor, plan: AttentionPlan) -> None:
    """Store the step's keys and values `[T, G, D]` in a layer's cache, each row in its slot."""
    for new, cache in ((keys, cache_keys), (values, cache_values)):
        rows = new[: plan.num_rows].reshape(-1, new.shape[-1])
        rows = quantised(rows) if cache.dtype == torch.int8 else rows
        cache.view(-1, cache.shape[-1]).index_copy_(0, plan.write_rows, rows)


def attention(queries: Tensor, cache_keys: Tensor, cache_values: Tensor, plan: AttentionPlan) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, causal, each row over its own sequence's cache. queries `[T, H, D]` -> `[T, H x D]`.

    Query head h reads KV head h // (H / G). The step's own keys and values must have been written before. Rows that pad
    the batch come out as zeros.
    """
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    out[plan.num_rows :] = 0
    for group in plan.decodes:
        attended = _attend_decodes(queries, cache_keys, cache_values, group)
        if group.rows is None:
            out[: plan.num_rows] = attended
        else:
            out.index_copy_(0, group.rows, attended)
    for piece in plan.chunks:
        out[piece.row_start : piece.row_end] = _attend_chunk(queries, cache_keys, cache_values, piece)
    return out.view(queries.shape[0], -1)


def _attend_decodes(queries: Tensor, cache_keys: Tensor, cache_values: Tensor, group: Decodes) -> Tensor:
    """One row per sequence: the H / G query heads that share a KV head stand as its query rows. -> `[B, H, D]`."""
    rows = queries[: group.num_sequences] if group.rows is None else queries.index_select(0, group.rows)
    keys = gather(cache_keys, group.blocks, group.num_sequences, rows.dtype)
    values = gather(cache_values, group.blocks, group.num_sequences, rows.dtype)
    grouped = rows.reshape(group.num_sequences, keys.shape[1], -1, rows.shape[-1])
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask).reshape(rows.shape)


def _attend_chunk(queries: Tensor, cache_keys: Tensor, cache_values: Tensor, piece: ChunkRows) -> Tensor:
    """Many rows of one sequence. KV heads stand as the batch, their query heads share them with stride 0."""
    rows = queries[piece.row_start : piece.row_end]
    num_rows, num_heads, head_dim = rows.shape
    num_kv_heads = cache_keys.shape[1]
    shared = num_heads // num_kv_heads
    grouped = rows.view(num_rows, num_kv_heads, shared, head_dim).permute(1, 2, 0, 3)
    keys, values = (
        gather(cache, piece.blocks, 1, rows.dtype)[0, :, None].expand(-1, shared, -1, -1)
        for cache in (cache_keys, cache_values)
    )
    attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=piece.mask, is_causal=piece.mask is None)
    return attended.permute(2, 0, 1, 3).reshape(rows.shape)


def _similar(members: npt.NDArray[np.int64], num_blocks: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Split sequences into runs of similar context, longest first: none under half of the longest in its run."""
    if len(members) == 0:
        return []
    ordered = members[np.argsort(-num_blocks[members], kind="stable")]
    groups, first = [], 0
    for i, member in enumerate(ordered):
        longest = num_blocks[ordered[first]]
        if longest > _ALWAYS_TOGETHER_BLOCKS and num_blocks[member] * 2 < longest:
            groups.append(ordered[first:i])
            first = i
    return [*groups, ordered[first:]]


def _plan_decodes(
    layout: BatchLayout,
    members: npt.NDArray[np.int64],
    num_kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    in_order: bool,
) -> Decodes:
    ends = layout.ends[members]
    num_blocks = -(-int(ends.max()) // layout.block_size)
    hidden = np.arange(num_blocks * layout.block_size) >= ends[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    mask.masked_fill_(torch.from_numpy(hidden).to(device), -torch.inf)
    return Decodes(
        rows=None if in_order else torch.from_numpy(layout.row_starts[members]).to(device),
        num_sequences=len(members),
        blocks=block_pieces(layout.block_tables[members, :num_blocks], num_kv_heads, device),
        mask=mask[:, None, None],
    )


def _plan_chunk(
    layout: BatchLayout, i: int, num_kv_heads: int, band: Tensor | None, device: torch.device
) -> list[ChunkRows]:
    """One piece from position 0 is plain causal; otherwise pieces of at most `_CHUNK_ROWS` rows, masked by the band."""
    row, start, end = int(layout.row_starts[i]), int(layout.starts[i]), int(layout.ends[i])
    step = end if start == 0 else _CHUNK_ROWS
    pieces = []
    for first in range(start, end, step):
        last = min(first + step, end)
        table = layout.block_tables[i : i + 1, : -(-last // layout.block_size)]
        mask = None
        if start > 0:
            assert band is not None
            shift = band.shape[1] - band.shape[0] - layout.block_size - first
            mask = band[: last - first, shift : shift + table.shape[1] * layout.block_size]
        pieces.append(
            ChunkRows(row + first - start, row + last - start, block_pieces(table, num_kv_heads, device), mask)
        )
    return pieces


def _causal_band(
    layout: BatchLayout, longer: npt.NDArray[np.int64], dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """One strip `[rows, context + rows + block_size]` of which the causal mask of every piece of this step is a view.

    Row i of the strip hides columns beyond `context + i`; a piece that starts at position p takes the columns from
    `context - p` on, so that its row i hides positions beyond p + i.
    """
    later = longer[layout.starts[longer] > 0]
    if len(later) == 0:
        return None
    rows = int(min(_CHUNK_ROWS, (layout.ends - layout.starts)[later].max()))
    context = int(layout.ends[later].max())
    band = torch.zeros((rows, context + rows + layout.block_size), dtype=dtype, device=device)
    return band.masked_fill_(torch.ones_like(band, dtype=torch.bool).triu_(context + 1), -torch.inf)
