"""A decoder of the Llama family, written as in the papers: each line is one operation of `kernels`.

    x = embed(tokens)
    for each layer:   x = x + Attention(norm(x));   x = x + FeedForward(norm(x))
    logits = Head(norm(x[rows that sample]))

The residual stream x is float32; what is multiplied with weights is in the compute dtype, that of the embedding table.
All sequences of a step lie in one flat batch of T rows without padding; only attention knows where one ends and the
next begins. Invariants: no gradient, no branch on data, and nothing leaves the device before the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pellucid.kernels import Kernels
from pellucid.kernels.reference import rope_table
from pellucid.models.config import ModelConfig, load_model_config
from pellucid.models.fused import FusedStep
from pellucid.models.layers import (
    AttentionWeights,
    DecoderWeights,
    FeedForwardWeights,
    Progress,
    WeightReader,
    load_weights,
)
from pellucid.models.weights.gguf import GgufFile
from pellucid.models.weights.gguf_source import GgufSource
from pellucid.models.weights.safetensors import SafetensorsSource


class DecoderInput(NamedTuple):
    """A step on the device: `token_ids` and `positions` `[T]`, `sample_rows` `[R]` (rows whose logits are wanted), and
    the attention plan that the same kernels made of the step's layout."""

    token_ids: Tensor
    positions: Tensor
    sample_rows: Tensor
    attention: Any


@dataclass(frozen=True, slots=True)
class Decoder:
    """Weights, rotary tables (`[positions, 1, D]` each) and the kernels they were packed for. `fused` computes the
    whole step where those kernels do."""

    config: ModelConfig
    weights: DecoderWeights
    rope: tuple[Tensor, Tensor]
    kernels: Kernels
    fused: FusedStep | None = None

    def forward(self, batch: DecoderInput, cache: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Compute the step, writing keys and values to `cache` (a pair per layer). Returns logits `[R, V]`, float32."""
        if self.fused is not None:
            return self.fused(batch, cache)
        ops = self.kernels
        cos, sin = (table.index_select(0, batch.positions) for table in self.rope)
        x = ops.embedding(batch.token_ids, self.weights.embedding)
        for layer, layer_cache in zip(self.weights.layers, cache):
            x = self._attend(x, layer.attention, (cos, sin), layer_cache, batch.attention)
            x = self._feed_forward(x, layer.feed_forward)
        wanted = x.index_select(0, batch.sample_rows)
        return ops.logits(self._norm(wanted, self.weights.norm), self.weights.head)

    def _attend(
        self,
        x: Tensor,
        weights: AttentionWeights,
        rope: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        plan: Any,
    ) -> Tensor:
        """x + Attention(norm(x)), for x `[T, C]`."""
        ops, config = self.kernels, self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = ops.linear(self._norm(x, weights.norm), weights.qkv).view(x.shape[0], -1, config.head_dim)
        queries_keys, values = torch.split(qkv, [heads + kv_heads, kv_heads], dim=1)
        if weights.query_norm is not None and weights.key_norm is not None:
            queries, keys = torch.split(queries_keys, [heads, kv_heads], dim=1)
            queries = self._norm(queries, weights.query_norm)
            keys = self._norm(keys, weights.key_norm)
            queries_keys = torch.cat((queries, keys), dim=1)
        queries, keys = torch.split(ops.rotate(queries_keys, *rope), [heads, kv_heads], dim=1)
        ops.write_kv(keys, values, *cache, plan)
        attended = ops.attention(queries, *cache, plan)
        return ops.linear_add_(x, attended, weights.output)

    def _feed_forward(self, x: Tensor, weights: FeedForwardWeights) -> Tensor:
        """x + Down(silu(Gate(norm(x))) * Up(norm(x))), for x `[T, C]`."""
        ops = self.kernels
        gate_up = ops.linear(self._norm(x, weights.norm), weights.gate_up)
        return ops.linear_add_(x, ops.silu_mul(gate_up), weights.down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """norm(x) in the compute dtype, over the last dimension."""
        return self.kernels.rms_norm(x, weight, self.config.norm_eps, self.weights.embedding.dtype)


def load_decoder(
    path: str | Path,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_positions: int,
    progress: Progress | None = None,
) -> Decoder:
    """The model at `path` (a directory with safetensors, or a `.gguf` file), ready to compute in `dtype` on `device`.

    `num_positions` bounds the positions it will be asked for. Files are mapped, read straight into place and let go:
    one copy of the weights is resident afterwards. Raises ModelError, one line, for whatever is wrong with the model.
    """
    path = Path(path)
    config = load_model_config(path)
    with GgufFile(path) if path.is_file() else SafetensorsSource(path) as opened:
        source = GgufSource(opened) if isinstance(opened, GgufFile) else opened
        reader = WeightReader(source, dtype, device)
        weights = load_weights(config, kernels, reader, progress)
    positions = min(num_positions, config.max_context)
    rope = rope_table(positions, config.head_dim, config.rope_theta, config.rope_factors, device)
    fused = None if kernels.team is None else FusedStep(config, weights, rope, kernels.team)
    return Decoder(config, weights, rope, kernels, fused)
