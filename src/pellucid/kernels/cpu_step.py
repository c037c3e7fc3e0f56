"""A whole step of a decoder as one native call: what `models/decoder.py` spells out, without Python in between.

A decode step of a small model takes a few milliseconds and some 250 operations; called one by one from Python their
overhead shows. Here the pointers are prepared once. Numbers differ from the operations called singly only in that the
residual stream stays in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pellucid.core.errors import ConfigError, InvariantViolation
from pellucid.core.plan import Chunk
from pellucid.kernels import pages
from pellucid.kernels.cpu import AttentionBatch, CpuKernels, PackedWeight, RotaryHeads, _check_cache, is_int8
from pellucid.kernels.lines import SequenceLines
from pellucid.kernels.processors import require_native


class LayerPieces(NamedTuple):
    """One layer: norms `[C]` float32, packed maps, and the layer's cache (`cpu.py` says of what shape) twice."""

    attention_norm: Tensor
    qkv: PackedWeight
    output: PackedWeight
    mlp_norm: Tensor
    gate_up: PackedWeight
    down: PackedWeight
    cache: tuple[Tensor, Tensor]
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepRows:
    """A step's `token_ids`, `positions` and `slots`, each `[T]`, and `sample_rows` `[R]`, whose logits are wanted."""

    token_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int64]
    sample_rows: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        for name in ("token_ids", "positions", "slots", "sample_rows"):
            values = getattr(self, name)
            dtype = np.int64 if name == "slots" else np.int32
            if values.dtype != dtype or not values.flags.c_contiguous:
                raise ConfigError(f"{name} is {values.dtype}; a step takes contiguous {np.dtype(dtype).name}")


class CpuDecoder:
    """Layers, embedding and head, ready to be stepped. Everything handed in stays alive with it.

    `heads` gives the shape of a layer's heads and the rotary tables; its norms are the layers' business.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        heads: RotaryHeads,
        *,
        embedding: PackedWeight,
        head: PackedWeight,
        norm: Tensor,
        norm_eps: float,
        layers: list[LayerPieces],
    ) -> None:
        self._kept = (kernels, heads, embedding, head, norm, layers)
        self._num_outputs = head.num_outputs
        self._logits = torch.empty((0, head.num_outputs), dtype=torch.float32)
        blocks = layers[0].cache[0].shape
        self._bounds = (embedding.num_outputs, heads.cos.shape[0], blocks[0] * blocks[2])
        self._cache_dtype = layers[0].cache[0].dtype
        block_size = _check_cache(layers[0].cache, heads.num_kv_heads, heads.head_dim)
        hidden, inner = embedding.num_inputs, layers[0].down.num_inputs
        sizes = [hidden, heads.num_heads, heads.num_kv_heads, heads.head_dim, inner, block_size]
        self._decoder = require_native().Decoder(
            kernels.handle, sizes, norm_eps, embedding.packed, head.packed,
            *map(_address, (norm, heads.cos, heads.sin)), is_int8(layers[0].cache),
        )  # fmt: skip
        self._rows = require_native().StepRows()
        for layer in layers:
            self._add(layer, sizes)

    def _add(self, layer: LayerPieces, sizes: list[int]) -> None:
        hidden, num_heads, num_kv_heads, head_dim, inner, _ = sizes
        _check_cache(layer.cache, num_kv_heads, head_dim)
        if layer.cache[0].dtype != self._cache_dtype:
            raise ConfigError(f"one layer caches in {layer.cache[0].dtype}, another in {self._cache_dtype}")
        expected = {
            "qkv": ((num_heads + 2 * num_kv_heads) * head_dim, hidden, False),
            "output": (hidden, num_heads * head_dim, False),
            "gate_up": (2 * inner, hidden, True),
            "down": (hidden, inner, False),
        }
        for name, shape in expected.items():
            weight: PackedWeight = getattr(layer, name)
            if (weight.num_outputs, weight.num_inputs, weight.gated) != shape:
                raise ConfigError(
                    f"{name} is {weight.num_outputs} x {weight.num_inputs}, expected {shape[0]} x {shape[1]}"
                )
            if weight.bias is not None and name != "qkv":
                raise ConfigError(f"{name} has a bias; the native step knows biases of query, key and value only")
        self._decoder.add_layer(
            _address(layer.attention_norm), layer.qkv.sections, _address(layer.qkv.bias), _address(layer.query_norm),
            _address(layer.key_norm), layer.output.packed, _address(layer.mlp_norm), layer.gate_up.packed,
            layer.down.packed, layer.cache[0].data_ptr(), layer.cache[1].data_ptr(),
        )  # fmt: skip

    def step(self, rows: StepRows, batch: AttentionBatch) -> Tensor:
        """Compute the rows, writing their keys and values to the cache. Returns logits `[R, V]`, float32, which the
        next step overwrites.

        Raises InvariantViolation for a token, position or slot that does not exist: native code would read on.
        """
        for name, bound in zip(("token_ids", "positions", "slots"), self._bounds):
            values = getattr(rows, name)
            # Unsigned, a negative number is too large as well.
            if len(values) != len(rows.slots) or not len(values) or values.view(f"u{values.itemsize}").max() >= bound:
                raise InvariantViolation(f"{name} of a step must be one per row and lie in [0, {bound})")
        logits = self._logits_of(len(rows.sample_rows))
        self._decoder.step(
            len(rows.token_ids), rows.token_ids.ctypes.data, rows.positions.ctypes.data, rows.slots.ctypes.data,
            *batch.arguments, len(rows.sample_rows), rows.sample_rows.ctypes.data, logits.data_ptr(),
        )  # fmt: skip
        return logits

    def draw(
        self, chunks: tuple[Chunk, ...], lines: SequenceLines, line_of: dict[int, int]
    ) -> tuple[tuple[int, ...], ...]:
        """Compute a plan's chunks and draw a token after each that samples: what was drawn, beside the chunks. Tokens,
        blocks and rules are read from the sequences' lines, and drawn tokens written there.

        Raises InvariantViolation for a chunk whose tokens or blocks are not known or do not exist.
        """
        drawn = self._rows.step(self._decoder, chunks, line_of, lines.native, self._bounds)
        if not isinstance(drawn, int):
            return cast("tuple[tuple[int, ...], ...]", drawn)
        chunk = chunks[drawn]
        if chunk.seq_id not in line_of:
            raise InvariantViolation(f"the plan names sequence {chunk.seq_id}, which the executor was never told of")
        raise InvariantViolation(lines.refusal(chunk, line_of[chunk.seq_id]))

    @property
    def sample_seconds(self) -> float:
        """How much of the last step was drawing tokens."""
        return float(self._decoder.sample_seconds)

    def _logits_of(self, num_rows: int) -> Tensor:
        """Room for that many rows, kept from step to step: fresh memory would be handed out page by page inside it."""
        if num_rows > self._logits.shape[0]:
            self._logits = pages.zeros((max(num_rows, 2 * self._logits.shape[0]), self._num_outputs), torch.float32)
        return self._logits[:num_rows]

    def phase_seconds(self) -> dict[str, float]:
        """Where the last step's time went."""
        return dict(self._decoder.phase_seconds())

    def stolen_seconds(self) -> float:
        """How long others kept the last step's threads from their cores."""
        return float(self._decoder.stolen_seconds())


def _address(x: Tensor | None) -> int:
    """Address of a float32 vector or table, 0 for none. Raises ConfigError for another dtype."""
    if x is None:
        return 0
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise ConfigError(f"the native step takes contiguous float32 norms, biases and tables, not {x.dtype}")
    return x.data_ptr()
