"""A Hugging Face `config.json`, read as a ModelShape.

One reader for all families: a family only says what differs from Llama (biases, norms, which layers look through a
window, which have experts). A family that is not listed is refused: guessing a shape is how calculators go wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pellucid.core.errors import ModelError
from pellucid.planner.formats import NumberFormat, number_format
from pellucid.planner.shape import (
    Experts,
    FeedForward,
    HeadedAttention,
    LatentAttention,
    LayerGroup,
    ModelShape,
    WeightBytes,
    weights_in,
)


@dataclass(frozen=True, slots=True)
class Family:
    """What sets a `model_type` apart from Llama: norm vectors of size h per layer, biases and norms of the heads,
    whether embeddings are tied when the config does not say, whether the feed-forward layer is gated, whether every
    matrix has a bias, and whether the router adds one number per expert."""

    num_norms: int = 2
    qkv_bias: bool = False
    head_norms: bool = False
    tied: bool = False
    gated: bool = True
    biased: bool = False
    router_bias: bool = False


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(head_norms=True),
    "qwen3_moe": Family(head_norms=True),
    "gemma": Family(tied=True),
    "gemma2": Family(num_norms=4, tied=True),
    "gemma3": Family(num_norms=4, head_norms=True, tied=True),
    "gemma3_text": Family(num_norms=4, head_norms=True, tied=True),
    "deepseek_v2": Family(),
    "deepseek_v3": Family(router_bias=True),
    # A plain two-matrix feed-forward layer, LayerNorm (weight and bias) and biases everywhere.
    "starcoder2": Family(num_norms=4, gated=False, biased=True, tied=True),
}


def shape_from_config(config: Mapping[str, Any], *, name: str, origin: str) -> ModelShape:
    """The shape that a parsed config.json describes, with the weight format it states. Raises ModelError."""
    fields = _Fields({**config, **config.get("text_config", {})}, origin)
    family = FAMILIES.get(fields.text("model_type"))
    if family is None:
        known = ", ".join(FAMILIES)
        raise ModelError(f"{origin}: model_type {fields.text('model_type')!r} is not known to the planner ({known})")
    hidden = fields.count("hidden_size")
    fmt = number_format(str(fields.get("torch_dtype", "dtype", default="bfloat16")))
    stored = _quantised_format(config.get("quantization_config"), fmt, origin)
    shape = ModelShape(
        name=name,
        origin=origin,
        hidden=hidden,
        vocab=fields.count("vocab_size"),
        tied=bool(fields.get("tie_word_embeddings", default=family.tied)),
        groups=_groups(fields, family, hidden),
        weights=WeightBytes(0, 0, 0, 0),
        weight_format=stored,
        head_format=fmt,
        cache_format=fmt,
        max_context=fields.get("max_position_embeddings", default=None),
    )
    return replace(shape, weights=weights_in(shape, stored, fmt))


class _Fields:
    """A config's fields, with errors that name the field and the file."""

    def __init__(self, config: Mapping[str, Any], origin: str) -> None:
        self._config = config
        self._origin = origin

    def get(self, *names: str, default: Any) -> Any:
        """The first of `names` that is present and not null."""
        return next((self._config[n] for n in names if self._config.get(n) is not None), default)

    def text(self, name: str) -> str:
        return str(self._config.get(name))

    def count(self, *names: str, default: int | None = None) -> int:
        """A positive whole number under the first of `names` that is present. Raises ModelError."""
        value = self.get(*names, default=default)
        if value is None:
            raise ModelError(
                f"{self._origin}: config has no {' or '.join(repr(n) for n in names)}; the planner needs it"
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self._origin}: {names[0]} is {value!r}; it must be a whole number of at least 1")
        return value


def _groups(fields: _Fields, family: Family, hidden: int) -> tuple[LayerGroup, ...]:
    """Equal layers gathered, in order of first appearance."""
    num_layers = fields.count("num_hidden_layers")
    window_of = _windows(fields, num_layers)
    forward_of = _forwards(fields, family)
    kinds: Counter[tuple[int | None, FeedForward | Experts]] = Counter(
        (window_of(i), forward_of(i)) for i in range(num_layers)
    )
    vectors = family.num_norms * hidden
    if family.biased:
        vectors += fields.count("intermediate_size") + hidden
    groups = []
    for (window, forward), count in kinds.items():
        router = forward.num_experts if family.router_bias and isinstance(forward, Experts) else 0
        groups.append(LayerGroup(count, _attention(fields, family, hidden, window), forward, vectors + router))
    return tuple(groups)


def _attention(fields: _Fields, family: Family, hidden: int, window: int | None) -> HeadedAttention | LatentAttention:
    num_heads = fields.count("num_attention_heads")
    latent_dim = fields.get("kv_lora_rank", default=None)
    if latent_dim is not None:
        query_rank = fields.get("q_lora_rank", default=None)
        return LatentAttention(
            num_heads=num_heads,
            latent_dim=fields.count("kv_lora_rank"),
            rope_dim=fields.count("qk_rope_head_dim"),
            nope_dim=fields.count("qk_nope_head_dim"),
            value_dim=fields.count("v_head_dim"),
            query_rank=query_rank,
            num_extra_params=latent_dim + (query_rank or 0),
        )
    num_kv_heads = fields.count("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly; check the config")
    if fields.get("head_dim", default=None) is None and hidden % num_heads:
        raise ModelError(f"hidden_size {hidden} is not a multiple of {num_heads} heads and there is no 'head_dim'")
    head_dim = fields.count("head_dim", default=hidden // num_heads)
    qkv = (num_heads + 2 * num_kv_heads) * head_dim
    biased = family.biased or bool(fields.get("attention_bias", default=False))
    extra = qkv + hidden if biased else qkv if family.qkv_bias else 0
    return HeadedAttention(num_heads, num_kv_heads, head_dim, window, extra + 2 * head_dim * family.head_norms)


def _windows(fields: _Fields, num_layers: int) -> Callable[[int], int | None]:
    """Which layers look through a sliding window: listed by kind, by a pattern, from a layer on, or all of them."""
    window = fields.get("sliding_window", default=None)
    kinds = fields.get("layer_types", default=None)
    if window is None or fields.get("use_sliding_window", default=True) is False:
        return lambda i: None
    if kinds is not None:
        if len(kinds) != num_layers:
            raise ModelError(f"layer_types lists {len(kinds)} layers, num_hidden_layers says {num_layers}")
        return lambda i: window if kinds[i] == "sliding_attention" else None
    model_type = fields.text("model_type")
    if model_type.startswith("gemma"):
        pattern = fields.get("sliding_window_pattern", default=2 if model_type == "gemma2" else 6)
        return lambda i: window if (i + 1) % pattern else None
    if model_type.startswith("qwen"):
        first = fields.get("max_window_layers", default=0)
        return lambda i: window if i >= first else None
    return lambda i: window


def _forwards(fields: _Fields, family: Family) -> Callable[[int], FeedForward | Experts]:
    """Each layer's feed-forward part: dense, or experts from some layer on or on every n-th layer."""
    num_experts = fields.get("n_routed_experts", "num_local_experts", "num_experts", default=None)
    if num_experts is None:
        dense = FeedForward(fields.count("intermediate_size"), family.gated)
        return lambda i: dense
    width = fields.count("moe_intermediate_size", "intermediate_size")
    shared = fields.get("n_shared_experts", default=0) * width
    experts = Experts(num_experts, fields.count("num_experts_per_tok"), width, shared)
    dense = FeedForward(fields.count("intermediate_size", "moe_intermediate_size"))
    first = fields.get("first_k_dense_replace", default=0)
    every = fields.get("decoder_sparse_step", "moe_layer_freq", default=1)
    dense_layers = frozenset(fields.get("mlp_only_layers", default=()))
    offset = 1 if fields.get("decoder_sparse_step", default=None) is not None else 0
    return lambda i: dense if i < first or i in dense_layers or (i + offset) % every else experts


def _quantised_format(config: Mapping[str, Any] | None, fmt: NumberFormat, origin: str) -> NumberFormat:
    """The layers' number format under a `quantization_config`: bits, plus the scales of each group."""
    if not config:
        return fmt
    method = str(config.get("quant_method"))
    if method in ("gptq", "awq"):
        return _grouped(method, int(config["bits"]), int(config["group_size"]), scale_bits=16)
    if method == "fp8":
        block = config.get("weight_block_size")
        return NumberFormat("fp8", 1.0 + (4 / math.prod(block) if block else 0.0), "fp8")
    if method == "compressed-tensors":
        weights = next(iter(config["config_groups"].values()))["weights"]
        bits, group = int(weights["num_bits"]), weights.get("group_size")
        if bits == 8 and group is None:
            return number_format("fp8" if weights.get("type") == "float" else "int8")
        return _grouped(method, bits, int(group or 0), scale_bits=16)
    raise ModelError(
        f"{origin}: quantization {method!r} is not known to the planner (gptq, awq, fp8, compressed-tensors)"
    )


def _grouped(method: str, bits: int, group: int, *, scale_bits: int) -> NumberFormat:
    """`bits` an element, and for each group of elements one scale and one zero point of `bits`."""
    scales = (scale_bits + bits) / group if group > 0 else 0.0
    return NumberFormat(f"{method} int{bits}", (bits + scales) / 8, "bf16")
