"""The weights of a decoder as plain records, and how they come out of a file.

Tensors go by their Hugging Face names here (`weights/gguf_source.py` translates). Invariants: every tensor that the
configuration calls for is there, has the shape it calls for, and none is left over; matrices that are multiplied with
the same input are stacked into one (query | key | value, gate | up), so that a layer is four products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pellucid.core.errors import ModelError
from pellucid.kernels import Kernels, StoredTensor
from pellucid.kernels.reference import stack
from pellucid.models.config import ModelConfig

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """`qkv` maps C to (H + 2 G) D, `output` H D to C; the norms are `[C]` and, where the family has them, `[D]`."""

    norm: Tensor
    qkv: Any
    output: Any
    query_norm: Tensor | None
    key_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class FeedForwardWeights:
    """`gate_up` maps C to 2 F, `down` F to C."""

    norm: Tensor
    gate_up: Any
    down: Any


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: attention, then feed-forward, each behind its own norm."""

    attention: AttentionWeights
    feed_forward: FeedForwardWeights


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights. With tied embeddings `head` multiplies with the embedding table itself."""

    embedding: Any
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Any


class WeightSource(Protocol):
    """Named tensors of an open model file, or directory of files."""

    location: Path

    def get(self, name: str) -> StoredTensor | None: ...
    def names(self) -> Iterable[str]: ...


class WeightReader:
    """Takes tensors out of a source by name, checks their shapes, and remembers which it took."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self._source, self._dtype, self._device = source, dtype, device
        self._taken: set[str] = set()

    def find(self, name: str, *shape: int) -> StoredTensor:
        """The stored tensor `name`. Raises ModelError where it is missing or has another shape."""
        stored = self._source.get(name)
        if stored is None:
            raise ModelError(f"{self._source.location}: tensor {name} of shape {shape} is missing")
        if stored.shape != shape:
            raise ModelError(f"{self._source.location}: tensor {name} has shape {stored.shape}, expected {shape}")
        self._taken.add(name)
        return stored

    def vector(self, name: str, size: int) -> Tensor:
        """A norm's weight, on the device, float32."""
        return stack([self.find(name, size)], torch.float32, self._device)

    def table(self, kernels: Kernels, name: str, rows: int, columns: int) -> Any:
        """A matrix that is looked up, as the kernels want it."""
        return kernels.table(self.find(name, rows, columns), self._dtype, self._device)

    def packed(self, kernels: Kernels, weights: Sequence[StoredTensor], biases: Sequence[StoredTensor] = ()) -> Any:
        """Matrices stacked to one linear map, as the kernels want it."""
        return kernels.pack(weights, biases, self._dtype, self._device)

    def gated(self, kernels: Kernels, gate: StoredTensor, up: StoredTensor) -> Any:
        """A gate and an up matrix as one linear map."""
        return kernels.pack_gated((gate, up), self._dtype, self._device)

    def ignore(self, name: str) -> None:
        """Let a tensor be there without using it."""
        self._taken.add(name)

    def check_all_taken(self) -> None:
        """Raise ModelError where the source holds tensors that nobody asked for: the model is not what we think."""
        left = sorted(name for name in self._source.names() if name not in self._taken)
        if left:
            raise ModelError(
                f"{self._source.location}: tensor {left[0]} belongs to no part of the supported architectures "
                f"({len(left)} such tensors)"
            )


def load_weights(
    config: ModelConfig, kernels: Kernels, reader: WeightReader, progress: Progress | None = None
) -> DecoderWeights:
    """Read all weights. `progress(done, total)` is called after each layer.

    Raises ModelError naming file, tensor, expected and found where the file is not what the configuration calls for.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = reader.table(kernels, "model.embed_tokens.weight", vocab, hidden)
    layers = []
    for i in range(config.num_layers):
        layers.append(_load_layer(config, kernels, reader, f"model.layers.{i}"))
        reader.ignore(f"model.layers.{i}.self_attn.rotary_emb.inv_freq")
        if progress is not None:
            progress(i + 1, config.num_layers)
    if config.tied_embeddings:
        head = kernels.pack_table(embedding)
        reader.ignore("lm_head.weight")
    else:
        head = reader.packed(kernels, [reader.find("lm_head.weight", vocab, hidden)])
    norm = reader.vector("model.norm.weight", hidden)
    reader.check_all_taken()
    return DecoderWeights(embedding, tuple(layers), norm, head)


def _load_layer(config: ModelConfig, kernels: Kernels, reader: WeightReader, prefix: str) -> LayerWeights:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    widths = {
        "q": config.num_heads * head_dim,
        "k": config.num_kv_heads * head_dim,
        "v": config.num_kv_heads * head_dim,
    }
    attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    biases = [reader.find(f"{attn}.{x}_proj.bias", width) for x, width in widths.items()] if config.qkv_bias else []
    return LayerWeights(
        AttentionWeights(
            norm=reader.vector(f"{prefix}.input_layernorm.weight", hidden),
            qkv=reader.packed(
                kernels, [reader.find(f"{attn}.{x}_proj.weight", width, hidden) for x, width in widths.items()], biases
            ),
            output=reader.packed(kernels, [reader.find(f"{attn}.o_proj.weight", hidden, widths["q"])]),
            query_norm=reader.vector(f"{attn}.q_norm.weight", head_dim) if config.qk_norm else None,
            key_norm=reader.vector(f"{attn}.k_norm.weight", head_dim) if config.qk_norm else None,
        ),
        FeedForwardWeights(
            norm=reader.vector(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=reader.gated(
                kernels, *(reader.find(f"{mlp}.{x}_proj.weight", inner, hidden) for x in ("gate", "up"))
            ),
            down=reader.packed(kernels, [reader.find(f"{mlp}.down_proj.weight", hidden, inner)]),
        ),
    )
