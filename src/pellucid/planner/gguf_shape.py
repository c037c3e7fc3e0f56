"""A GGUF header, read as a ModelShape: geometry from the metadata, exact bytes from the tensor directory.

The header itself is parsed elsewhere; here it is a mapping of metadata and a list of (name, shape, ggml type).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from pellucid.core.errors import ModelError
from pellucid.planner.config_shape import shape_from_config
from pellucid.planner.formats import NumberFormat, number_format
from pellucid.planner.shape import ModelShape, WeightBytes


class TensorEntry(Protocol):
    """One row of the tensor directory; `type` is ggml's number for the element type."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def type(self) -> int: ...


# ggml type number -> our name of the format.
TENSOR_TYPES = {
    0: "fp32",
    1: "fp16",
    2: "q4_0",
    3: "q4_1",
    6: "q5_0",
    7: "q5_1",
    8: "q8_0",
    10: "q2_k",
    11: "q3_k",
    12: "q4_k",
    13: "q5_k",
    14: "q6_k",
    16: "iq2_xxs",
    17: "iq2_xs",
    18: "iq3_xxs",
    19: "iq1_s",
    20: "iq4_nl",
    21: "iq3_s",
    22: "iq2_s",
    23: "iq4_xs",
    29: "iq1_m",
    30: "bf16",
    39: "mxfp4",
}
# GGUF architecture -> the model_type whose rules apply.
_FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "starcoder2": "starcoder2",
}
# GGUF key (after "<architecture>.") -> config.json field.
_FIELDS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
}


def shape_from_gguf(
    metadata: Mapping[str, Any], tensors: Iterable[TensorEntry], *, name: str, origin: str
) -> ModelShape:
    """The shape of a GGUF model, its weights counted byte for byte. `origin` names the file. Raises ModelError."""
    architecture = str(metadata.get("general.architecture"))
    if architecture not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise ModelError(f"{origin}: GGUF architecture {architecture!r} is not known to the planner ({known})")
    directory = tuple(tensors)
    config: dict[str, Any] = {
        field: metadata[f"{architecture}.{key}"]
        for key, field in _FIELDS.items()
        if metadata.get(f"{architecture}.{key}")
    }
    config["model_type"] = _FAMILIES[architecture]
    config["vocab_size"] = metadata.get(f"{architecture}.vocab_size") or _vocab(directory)
    config["tie_word_embeddings"] = all(t.name != "output.weight" for t in directory)
    shape = shape_from_config(config, name=name, origin=origin)
    stored: Counter[NumberFormat] = Counter()
    for tensor in directory:
        if tensor.name.startswith("blk."):
            stored[_format_of(tensor, origin)] += math.prod(tensor.shape)
    layers = stored.most_common(1)[0][0] if stored else shape.weight_format
    tables = [t for t in directory if t.name in ("token_embd.weight", "output.weight")]
    head = _format_of(max(tables, key=lambda t: t.name == "output.weight"), origin) if tables else layers
    stored_bytes = weight_bytes(directory, lambda tensor: _format_of(tensor, origin).element_bytes)
    return replace(shape, weights=stored_bytes, weight_format=layers, head_format=head)


def _vocab(directory: tuple[TensorEntry, ...]) -> int | None:
    """Rows of the embedding table (GGUF lists the fastest dimension first)."""
    return next((t.shape[-1] for t in directory if t.name == "token_embd.weight"), None)


def _format_of(tensor: TensorEntry, origin: str) -> NumberFormat:
    if tensor.type not in TENSOR_TYPES:
        raise ModelError(f"{origin}: tensor {tensor.name} has ggml type {tensor.type}, which the planner does not know")
    return number_format(TENSOR_TYPES[tensor.type])


def weight_bytes(directory: Iterable[TensorEntry], element_bytes: Callable[[TensorEntry], float]) -> WeightBytes:
    """Bytes by role, with so many for each element of a tensor. A file without `output.weight` has tied embeddings: its
    table is the head."""
    roles = {"embedding": 0.0, "head": 0.0, "experts": 0.0, "dense": 0.0}
    for tensor in directory:
        if tensor.name == "token_embd.weight":
            role = "embedding"
        elif tensor.name == "output.weight":
            role = "head"
        else:
            role = "experts" if "_exps." in tensor.name else "dense"
        roles[role] += math.prod(tensor.shape) * element_bytes(tensor)
    if not roles["head"]:
        roles["head"], roles["embedding"] = roles["embedding"], 0.0
    return WeightBytes(**roles)
