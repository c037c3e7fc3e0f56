"""A decoder's step as one native call. Weights, cache and result are those of `decoder.py`, where one can read what the
call does and in which order.

The native side keeps addresses, so the cache must stay where it is from the first step on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pellucid.core.plan import Chunk
from pellucid.kernels.cpu import CpuKernels, RotaryHeads
from pellucid.kernels.cpu_step import CpuDecoder, LayerPieces, StepRows
from pellucid.kernels.lines import SequenceLines
from pellucid.models.config import ModelConfig
from pellucid.models.layers import DecoderWeights, LayerWeights

if TYPE_CHECKING:
    from pellucid.models.decoder import DecoderInput

Cache = Sequence[tuple[Tensor, Tensor]]


class FusedStep:
    """`Decoder.forward` for packed weights. `rope` holds the reference's tables, `[positions, 1, D]` each."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, rope: tuple[Tensor, Tensor], team: CpuKernels
    ) -> None:
        self._config, self._weights, self._team = config, weights, team
        half = config.head_dim // 2
        # The reference keeps both halves, the first half of sin negated; the second halves are the plain tables.
        self._cos, self._sin = (table[:, 0, half:].contiguous() for table in rope)
        self._decoder: CpuDecoder | None = None
        self._cache: Cache | None = None

    def __call__(self, batch: DecoderInput, cache: Cache) -> Tensor:
        """Compute the step, writing keys and values to `cache`. Returns logits `[R, V]`, float32."""
        rows = StepRows(
            token_ids=batch.token_ids.numpy().astype(np.int32),
            positions=batch.positions.numpy().astype(np.int32),
            slots=batch.attention.slots,
            sample_rows=batch.sample_rows.numpy().astype(np.int32),
        )
        return self._decoder_on(cache).step(rows, batch.attention.batch)

    def draw(
        self, chunks: tuple[Chunk, ...], lines: SequenceLines, line_of: dict[int, int], cache: Cache
    ) -> tuple[tuple[int, ...], ...]:
        """Compute a plan's chunks, and the token after each that samples; see `CpuDecoder.draw`."""
        return self._decoder_on(cache).draw(chunks, lines, line_of)

    @property
    def sample_seconds(self) -> float:
        """How much of the last step was drawing tokens."""
        return 0.0 if self._decoder is None else self._decoder.sample_seconds

    def stolen_seconds(self) -> float:
        """How long others kept the last step's threads from their cores; 0 before the first step."""
        return 0.0 if self._decoder is None else self._decoder.stolen_seconds()

    def _decoder_on(self, cache: Cache) -> CpuDecoder:
        if self._decoder is None or self._cache is not cache:
            self._decoder, self._cache = self._prepare(cache), cache
        return self._decoder

    def _prepare(self, cache: Cache) -> CpuDecoder:
        config, weights = self._config, self._weights
        return CpuDecoder(
            self._team,
            RotaryHeads(config.num_heads, config.num_kv_heads, config.head_dim, self._cos, self._sin),
            embedding=weights.embedding,
            head=weights.head,
            norm=_float(weights.norm),
            norm_eps=config.norm_eps,
            layers=[_pieces(layer, pair) for layer, pair in zip(weights.layers, cache)],
        )


def _pieces(layer: LayerWeights, cache: tuple[Tensor, Tensor]) -> LayerPieces:
    attention, feed_forward = layer.attention, layer.feed_forward
    return LayerPieces(
        attention_norm=_float(attention.norm),
        qkv=attention.qkv,
        output=attention.output,
        mlp_norm=_float(feed_forward.norm),
        gate_up=feed_forward.gate_up,
        down=feed_forward.down,
        cache=cache,
        query_norm=None if attention.query_norm is None else _float(attention.query_norm),
        key_norm=None if attention.key_norm is None else _float(attention.key_norm),
    )


def _float(vector: Tensor) -> Tensor:
    return vector.to(torch.float32).contiguous()
