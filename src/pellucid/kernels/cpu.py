"""The native CPU kernels behind a face that checks shapes: packed weights, and the reference's operations on them.

The work is done by `pellucid.kernels._native` (csrc/), compiled for four instruction levels of which the best that the
processor and the operating system allow is chosen when a `CpuKernels` is made. Tensors cross as addresses, so all
that the native side assumes (dtype, contiguity, sizes) is checked here, once.

Invariants: weights are packed once and never inflated afterwards; the cache of a layer is two tensors of the
reference's shape (`[blocks, G, block_size, D]` in bfloat16, D + 4 wide in int8), whose blocks are arranged inside as
the kernels want them (csrc/kernels.h), so copying whole blocks stays valid and reading single tokens through PyTorch
does not.

Sizes in shapes: T rows of a step, S sequences, H query heads, G key/value heads, D head dimension, K and N a weight's
inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pellucid.core.errors import ConfigError, ModelError
from pellucid.kernels.gguf_types import GGUF_TYPES
from pellucid.kernels.layout import SAMPLE_ROW, SCALE_BYTES
from pellucid.kernels.processors import open_team, require_native

Isa = Literal["auto", "portable", "avx2", "avx512", "amx"]
WeightFormat = Literal["bf16", "int8", "q8", "q4"]

BLOCK_COLUMNS = 16  # columns of a packed block: parts of a fused weight begin on one
SECTION_COLUMNS = 32  # a section is made of pairs of blocks
TOKENS_PER_TILE = 16
# Scratch of a thread holds 64 unpacked columns in bfloat16, or a row in float32.
MAX_INPUTS = 65536
MAX_HEAD_DIM = 256
MAX_VOCABULARY = 1 << 19
_FLOAT_FORMATS = {"bf16": "bf16", "int8": "int8", "q8": "q8", "q4": "q4_min"}


class GgufRows(NamedTuple):
    """Rows of one GGUF matrix as they lie in the file: its type name and `[rows, bytes per row]`."""

    storage: str
    rows: npt.NDArray[np.uint8]

    @property
    def num_inputs(self) -> int:
        """K. Raises ModelError for a type that is not packed directly, or rows that do not divide."""
        if self.storage not in GGUF_TYPES:
            raise ModelError(f"{self.storage} rows cannot be packed as they are; packed are {', '.join(GGUF_TYPES)}")
        stored = GGUF_TYPES[self.storage]
        if self.rows.ndim != 2 or self.rows.shape[1] % stored.block_bytes:
            raise ModelError(
                f"rows of shape {self.rows.shape} do not divide into {self.storage} blocks of {stored.block_bytes} "
                f"bytes"
            )
        return int(self.rows.shape[1]) // stored.block_bytes * stored.block_values


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A linear map `[N, K]` packed for the kernels, and its bias `[N]` in float32 or None.

    Its `sections` stand one below the other, each in one format; only the map to query, key and value of a whole step
    may have several. `gated` marks a gate and an up matrix interleaved block by block: its product is silu(gate) * up,
    N / 2 wide.
    """

    sections: tuple[Any, ...]
    bias: Tensor | None = None
    gated: bool = False

    @property
    def packed(self) -> Any:
        """The only section. Raises ConfigError where there are several."""
        if len(self.sections) != 1:
            raise ConfigError(f"a weight in {len(self.sections)} formats can only be multiplied within a step")
        return self.sections[0]

    @property
    def num_outputs(self) -> int:
        return sum(int(section.n) for section in self.sections)

    @property
    def num_inputs(self) -> int:
        return int(self.sections[0].k)

    @property
    def num_bytes(self) -> int:
        """Memory that the packed weight takes."""
        return sum(int(section.bytes) for section in self.sections)

    @classmethod
    def from_gguf_bytes(
        cls, parts: Sequence[GgufRows], *, bias: Tensor | None = None, gated: bool = False
    ) -> PackedWeight:
        """Stack GGUF matrices of one width to one weight, keeping their bits: neighbours that are packed alike share a
        section. Raises ModelError for parts that do not fit together, or of a gated weight are not packed alike."""
        widths, outputs = [part.num_inputs for part in parts], sum(len(part.rows) for part in parts)
        runs = [(form, list(run)) for form, run in groupby(parts, lambda part: GGUF_TYPES[part.storage].packed_as)]
        if gated and len(runs) > 1:
            raise ModelError(
                f"a gated weight needs parts that are packed alike, not {[part.storage for part in parts]}"
            )
        sections: list[Any] = []
        for form, run in runs:
            sizes = [len(part.rows) for part in run]
            if len(sections) + 1 < len(runs) and sum(sizes) % SECTION_COLUMNS:
                raise ModelError(f"parts of {sizes} outputs end within {SECTION_COLUMNS} columns of one format")
            section = _empty(form, sizes, widths[0], widths, gated)
            for part, placement in zip(run, _placements(sizes, gated)):
                rows = np.ascontiguousarray(part.rows)
                section.pack_gguf(GGUF_TYPES[part.storage].number, rows.ctypes.data, len(rows), *placement)
            sections.append(section)
        return cls(tuple(sections), _float_bias(bias, outputs), gated)

    @classmethod
    def from_tensor(
        cls, parts: Sequence[Tensor], weight_format: WeightFormat, *, bias: Tensor | None = None, gated: bool = False
    ) -> PackedWeight:
        """Stack matrices `[N_i, K]` (float32 or bfloat16) to one weight in `weight_format`.

        bf16 rounds; int8 has one scale per output; q8 and q4 have one per 32 inputs, q4 a minimum too.
        """
        sizes, inputs = [part.shape[0] for part in parts], parts[0].shape[1]
        weight = _empty(_FLOAT_FORMATS[weight_format], sizes, inputs, [part.shape[1] for part in parts], gated)
        for part, placement in zip(parts, _placements(sizes, gated)):
            rows = part.contiguous()
            if rows.dtype not in (torch.float32, torch.bfloat16):
                raise ConfigError(f"weights are {rows.dtype}; pack float32 or bfloat16")
            weight.pack_floats(rows.data_ptr(), rows.dtype == torch.bfloat16, len(rows), *placement)
        return cls((weight,), _float_bias(bias, sum(sizes)), gated)


def _empty(stored: str, sizes: Sequence[int], inputs: int, widths: Sequence[int], gated: bool) -> Any:
    """A zero weight that the parts fit in. Raises ModelError where they do not fit together."""
    module = require_native()
    if any(width != inputs for width in widths) or not 1 <= inputs <= MAX_INPUTS:
        raise ModelError(
            f"parts of {list(widths)} inputs do not make one weight; they must agree, at most {MAX_INPUTS}"
        )
    if any(size % BLOCK_COLUMNS for size in sizes[:-1]) or (gated and sizes[-1] % BLOCK_COLUMNS):
        raise ModelError(f"parts of {list(sizes)} outputs cannot be fused; all but the last must be multiples of 16")
    if gated and (len(sizes) != 2 or sizes[0] != sizes[1]):
        raise ModelError(f"a gated weight is made of two equal parts, not {list(sizes)}")
    return module.PackedWeight(getattr(module.Format, stored), sum(sizes), inputs)


def _placements(sizes: Sequence[int], gated: bool) -> list[tuple[int, int]]:
    """(first block, stride in blocks) of every part: one behind the other, or two of them taking turns."""
    if gated:
        return [(0, 2), (1, 2)]
    starts = np.cumsum([0, *(size // BLOCK_COLUMNS for size in sizes[:-1])])
    return [(int(start), 1) for start in starts]


def _float_bias(bias: Tensor | None, outputs: int) -> Tensor | None:
    if bias is None:
        return None
    if bias.shape != (outputs,):
        raise ModelError(f"a bias of shape {tuple(bias.shape)} does not fit {outputs} outputs")
    return bias.to(torch.float32).contiguous()


class AttentionBatch:
    """What attention needs to know of a step, for all its layers.

    `rows` `[S, 3]` int64: of each sequence the first row, the number of rows, and the tokens that the last row attends,
    its own included.
    `block_tables` `[S, most blocks]` int32.
    """

    __slots__ = ("block_tables", "rows")

    def __init__(self, rows: npt.NDArray[np.int64], block_tables: npt.NDArray[np.int32]) -> None:
        self.rows = np.ascontiguousarray(rows, dtype=np.int64)
        self.block_tables = np.ascontiguousarray(block_tables, dtype=np.int32)
        if self.rows.shape != (len(self.block_tables), 3):
            raise ConfigError(f"rows {self.rows.shape} do not match block tables {self.block_tables.shape}")

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """Addresses and sizes as the native side takes them."""
        return self.rows.ctypes.data, len(self.rows), self.block_tables.ctypes.data, self.block_tables.shape[1]


class RotaryHeads(NamedTuple):
    """The query, key and value heads in a product, and what turns them. Tables `[positions, D / 2]` float32."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    cos: Tensor
    sin: Tensor
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    norm_eps: float = 0.0


class CpuKernels:
    """The operations, on one team of pinned threads. Not for use from two threads at once (calls wait for each other).

    `isa` forces an instruction level; "auto" takes the best. With `deterministic` every row's result is independent of
    the batch: grouped weights then take one path whatever the number of rows. `spin_seconds` is how long the threads
    stay awake after a call. Raises ConfigError for a level this machine cannot run, or more threads than cores.
    """

    def __init__(
        self, *, isa: str = "auto", threads: int = 0, deterministic: bool = False, spin_seconds: float = 0.0005
    ) -> None:
        self._cpu = open_team(isa, threads, spin_seconds, deterministic)

    @property
    def handle(self) -> Any:
        """The native object, for those in this package that hand it further down."""
        return self._cpu

    @property
    def isa(self) -> str:
        """The instruction level in use."""
        return str(self._cpu.isa)

    @property
    def num_threads(self) -> int:
        return int(self._cpu.num_threads)

    def linear(self, x: Tensor, weight: PackedWeight, *, dtype: torch.dtype | None = None) -> Tensor:
        """x @ W^T + b in float32 accumulation. x: `[T, K]` float32 or bfloat16 -> `[T, N]` in `dtype` (default x's).

        A gated weight gives silu(gate) * up, `[T, N / 2]`, always float32.
        """
        x = _floats(x, weight.num_inputs)
        dtype = torch.float32 if weight.gated else dtype or x.dtype
        width = weight.num_outputs // 2 if weight.gated else weight.num_outputs
        y = torch.empty((x.shape[0], width), dtype=dtype)
        if x.shape[0]:
            bias = 0 if weight.bias is None else weight.bias.data_ptr()
            y_bf16 = dtype == torch.bfloat16
            self._cpu.linear(
                weight.packed, x.data_ptr(), _is_bf16(x), x.shape[0], y.data_ptr(), y_bf16, bias, weight.gated
            )
        return y

    def logits(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """`linear` with a float32 result, whatever the dtype of x."""
        return self.linear(x, weight, dtype=torch.float32)

    def embedding(self, token_ids: Tensor, table: PackedWeight) -> Tensor:
        """Rows of a packed table `[V, K]` by `token_ids` `[T]` int64 -> `[T, K]` float32."""
        tokens = token_ids.to(torch.int64).contiguous()
        out = torch.empty((len(tokens), table.num_inputs), dtype=torch.float32)
        self._cpu.dequantize_rows(table.packed, tokens.data_ptr(), len(tokens), out.data_ptr())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension. x: `[..., C]`, weight `[C]` float32."""
        x = _floats(x, weight.shape[0])
        y = torch.empty_like(x)
        rows = x.numel() // x.shape[-1]
        self._cpu.rms_norm(x.data_ptr(), _is_bf16(x), rows, x.shape[-1], _vector(weight), eps, y.data_ptr())
        return y

    def silu_mul(self, x: Tensor) -> Tensor:
        """silu(gate) * up, with x = (gate | up) `[T, 2F]` -> `[T, F]`."""
        x = _floats(x, x.shape[-1])
        y = torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype)
        self._cpu.silu_mul(x.data_ptr(), _is_bf16(x), x.shape[0], y.shape[1], y.data_ptr())
        return y

    def rotate_and_write(
        self, qkv: Tensor, heads: RotaryHeads, positions: Tensor, slots: Tensor, cache: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Turn query and key heads by their positions, write keys and values to their slots, return the queries.

        qkv: `[T, (H + 2 G) D]` float32; positions `[T]` int32, slots `[T]` int64. -> `[T, H, D]` bfloat16.
        """
        rows = qkv.shape[0]
        if qkv.dtype != torch.float32 or qkv.shape[1] != (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim:
            raise ConfigError(f"qkv is {tuple(qkv.shape)} {qkv.dtype}; it must be float32 and hold every head")
        block_size = _check_cache(cache, heads.num_kv_heads, heads.head_dim)
        queries = torch.empty((rows, heads.num_heads, heads.head_dim), dtype=torch.bfloat16)
        qkv, slots = qkv.contiguous(), slots.to(torch.int64).contiguous()
        positions = positions.to(torch.int32).contiguous()
        norms = [0 if norm is None else _vector(norm) for norm in (heads.query_norm, heads.key_norm)]
        self._cpu.rope(
            qkv.data_ptr(), rows, heads.num_heads, heads.num_kv_heads, heads.head_dim, *norms, heads.norm_eps,
            heads.cos.data_ptr(), heads.sin.data_ptr(), positions.data_ptr(), slots.data_ptr(), queries.data_ptr(),
            cache[0].data_ptr(), cache[1].data_ptr(), is_int8(cache), block_size,
        )  # fmt: skip
        return queries

    def attention(self, queries: Tensor, cache: tuple[Tensor, Tensor], batch: AttentionBatch) -> Tensor:
        """softmax(q k^T / sqrt(D)) v, causal, each row over its own sequence's cache. queries: `[T, H, D]` bfloat16 ->
        `[T, H D]` float32. The step's own keys and values must have been written before."""
        rows, num_heads, head_dim = queries.shape
        num_kv_heads = cache[0].shape[1]
        block_size = _check_cache(cache, num_kv_heads, head_dim)
        if queries.dtype != torch.bfloat16 or num_heads % num_kv_heads:
            raise ConfigError(
                f"{num_heads} query heads in {queries.dtype} do not fit {num_kv_heads} KV heads; they must be bfloat16"
            )
        queries = queries.contiguous()
        out = torch.empty((rows, num_heads * head_dim), dtype=torch.float32)
        self._cpu.attention(
            queries.data_ptr(), cache[0].data_ptr(), cache[1].data_ptr(), is_int8(cache), num_heads, num_kv_heads,
            head_dim, block_size, head_dim**-0.5, *batch.arguments, out.data_ptr(),
        )  # fmt: skip
        return out

    def sample(self, scores: Tensor, rows: npt.NDArray[np.void]) -> Tensor:
        """The next token of every row, as `sampling.sample` but without sorting: scores `[R, V]`, rows `[R]` of
        `SAMPLE_ROW` -> `[R]` int64."""
        if rows.dtype != SAMPLE_ROW or rows.shape != scores.shape[:1] or scores.shape[1] > MAX_VOCABULARY:
            raise ConfigError(f"rows {rows.shape} do not sample scores of shape {tuple(scores.shape)}")
        scores, rows = scores.to(torch.float32).contiguous(), np.ascontiguousarray(rows)
        out = torch.empty(scores.shape[0], dtype=torch.int64)
        self._cpu.sample(scores.data_ptr(), *scores.shape, rows.ctypes.data, out.data_ptr())
        return out

    def copy_blocks(self, source: Tensor, target: Tensor, pairs: npt.NDArray[np.int64]) -> None:
        """target[to] = source[from] for every (from, to) of `pairs` `[n, 2]`, over the first dimension."""
        pairs = np.ascontiguousarray(pairs, dtype=np.int64)
        if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
            raise ConfigError(f"blocks of shape {tuple(source.shape[1:])} do not fit {tuple(target.shape[1:])}")
        if not (source.is_contiguous() and target.is_contiguous()):
            raise ConfigError("blocks to copy must lie one behind the other")
        if len(pairs) and (pairs.min() < 0 or (pairs.max(axis=0) >= (len(source), len(target))).any()):
            raise ConfigError(f"block ids up to {pairs.max(axis=0)} exceed pools of {len(source)} and {len(target)}")
        piece = source[0].numel() * source.element_size()
        self._cpu.copy_blocks(source.data_ptr(), target.data_ptr(), pairs.ctypes.data, len(pairs), piece)

    def probe(self, what: str, *, num_bytes: int = 0, seconds: float = 0.2) -> float:
        """The best rate of this machine seen within `seconds`; `limits.py` names what can be measured."""
        return float(self._cpu.probe(what, num_bytes, seconds))


def supports(head_dim: int, block_size: int) -> bool:
    """Whether the cache layout of these kernels exists for a model: whole tiles of dimensions and of tokens."""
    return head_dim % 32 == 0 and head_dim <= MAX_HEAD_DIM and block_size % TOKENS_PER_TILE == 0


def _check_cache(cache: tuple[Tensor, Tensor], num_kv_heads: int, head_dim: int) -> int:
    """The block size of a cache. Raises ConfigError unless both halves are what the kernels read."""
    keys, values = cache
    block_size = keys.shape[2]
    width = {torch.bfloat16: head_dim, torch.int8: head_dim + SCALE_BYTES}.get(keys.dtype)
    if keys.shape != values.shape or keys.dtype != values.dtype or keys.shape[1::2] != (num_kv_heads, width):
        raise ConfigError(
            f"a cache of shape {tuple(keys.shape)}, {keys.dtype} does not fit {num_kv_heads} x {head_dim}"
        )
    if not supports(head_dim, block_size) or not (keys.is_contiguous() and values.is_contiguous()):
        raise ConfigError(
            f"head dimension {head_dim} with blocks of {block_size} has no native layout: the first must be a multiple "
            f"of 32 up to {MAX_HEAD_DIM}, the second of {TOKENS_PER_TILE}"
        )
    return block_size


def is_int8(cache: tuple[Tensor, Tensor]) -> bool:
    """Whether keys and values are int8 with scales; otherwise they are bfloat16."""
    return cache[0].dtype == torch.int8


def _floats(x: Tensor, width: int) -> Tensor:
    """x, contiguous. Raises ConfigError unless it is float32 or bfloat16 and `width` wide."""
    if x.dtype not in (torch.float32, torch.bfloat16) or x.shape[-1] != width or x.device.type != "cpu":
        raise ConfigError(f"a {x.dtype} tensor of shape {tuple(x.shape)} does not fit a kernel of width {width}")
    return x.contiguous()


def _is_bf16(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def _vector(x: Tensor) -> int:
    """Address of a float32 vector. Raises ConfigError for anything else."""
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise ConfigError(f"norm weights are {x.dtype}; the native kernels take float32")
    return x.data_ptr()
