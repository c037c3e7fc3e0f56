"""What a model is made of, as numbers, and the arithmetic that follows: parameters, bytes in memory, FLOPs, KV bytes.

Nothing here knows a device. Symbols in the formulas: L layers, h hidden size, H query heads, G KV heads, d head size,
f feed-forward width, V vocabulary, q new tokens, c tokens before them. A multiply-add is 2 FLOPs. Two counts keep
apart what is often mixed up:

- *attended* pairs: for each new token the tokens it looks at, itself included: q*c + q*(q+1)/2 (causal; fewer with a
  sliding window). Attention costs 4*H*d FLOPs per pair and layer (QK^T and AV), however few the KV heads.
- *cached* bytes: 2*L*G*(d*b + s) per token, s for the scale of a format that has one per vector. They follow the KV
  heads, never the query heads.

`tp` is the number of tensor-parallel ranks; every figure with a `tp` argument is per rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pellucid.core.errors import ConfigError
from pellucid.planner.formats import NumberFormat, cache_format, number_format


def attended(num_new: int, num_cached: int, window: int | None = None) -> int:
    """Token pairs that `num_new` tokens attend to after `num_cached` others: q*c + q*(q+1)/2, cut at
    `window` a row."""
    if window is None or num_cached + num_new <= window:
        return num_new * num_cached + num_new * (num_new + 1) // 2
    growing = min(num_new, max(0, window - num_cached))
    return growing * num_cached + growing * (growing + 1) // 2 + (num_new - growing) * window


@dataclass(frozen=True, slots=True)
class HeadedAttention:
    """Attention with `num_kv_heads` shared among `num_heads`: MHA when equal, MQA when one, GQA between.

    `window` bounds how far back a token looks (None: everything). `num_extra_params` counts biases and head norms.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    num_extra_params: int = 0

    def num_params(self, hidden: int, tp: int = 1) -> float:
        """Q and O: 2*h*H*d / tp. K and V: 2*h*G*d / min(tp, G)."""
        return 2 * hidden * self.head_dim * (self.num_heads / tp + self.num_kv_heads / min(tp, self.num_kv_heads))

    def cache_elements(self, tp: int = 1) -> float:
        """Elements cached per token and layer: 2*G*d / min(tp, G)."""
        return self.cache_vectors(tp) * self.head_dim

    def cache_vectors(self, tp: int = 1) -> float:
        """Keys and values cached per token and layer: 2*G / min(tp, G)."""
        return 2 * self.num_kv_heads / min(tp, self.num_kv_heads)

    def flops(self, num_attended: float, num_cached: float) -> float:
        """4*H*d per attended pair."""
        return self.decode_flops(num_attended)

    def decode_flops(self, num_attended: float) -> float:
        """4*H*d per attended pair."""
        return 4.0 * self.num_heads * self.head_dim * num_attended

    def check_tp(self, tp: int) -> None:
        """Raises ConfigError where `tp` ranks cannot share the heads evenly."""
        if self.num_heads % tp:
            raise ConfigError(f"--tp {tp} does not divide the {self.num_heads} query heads; use a divisor of them")
        if max(tp, self.num_kv_heads) % min(tp, self.num_kv_heads):
            raise ConfigError(f"--tp {tp} neither divides nor is a multiple of the {self.num_kv_heads} KV heads")


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (MLA): a token caches one vector of `latent_dim` and one key of `rope_dim`.

    It runs in one of two forms. *Expanded* restores keys and values from the latent: 2*H*(d_n + d_r + d_v) FLOPs per
    pair, after 2*d_c*H*(d_n + d_v) for every cached token that has to be restored. *Absorbed* folds the restoring
    matrices into query and output: 2*H*(2*d_c + d_r) per pair and nothing to restore. The cheaper one is charged.
    """

    num_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None = None
    num_extra_params: int = 0

    window = None

    def num_params(self, hidden: int, tp: int = 1) -> float:
        """The down-projections are whole on every rank; what belongs to heads is divided."""
        query_width = self.num_heads * (self.nope_dim + self.rope_dim)
        down = hidden * (self.latent_dim + self.rope_dim)
        if self.query_rank is None:
            query = hidden * query_width
        else:
            down += hidden * self.query_rank
            query = self.query_rank * query_width
        up = self.latent_dim * self.num_heads * (self.nope_dim + self.value_dim)
        return down + (query + up + self.num_heads * self.value_dim * hidden) / tp

    def cache_elements(self, tp: int = 1) -> float:
        """d_c + d_r elements per token and layer, whole on every rank."""
        return float(self.latent_dim + self.rope_dim)

    def cache_vectors(self, tp: int = 1) -> float:
        """The latent and the key."""
        return 2.0

    def flops(self, num_attended: float, num_cached: float) -> float:
        """The cheaper of the two forms."""
        expanded = 2.0 * self.num_heads * (self.nope_dim + self.rope_dim + self.value_dim) * num_attended
        expanded += 2.0 * self.latent_dim * self.num_heads * (self.nope_dim + self.value_dim) * num_cached
        return min(self.decode_flops(num_attended), expanded)

    def decode_flops(self, num_attended: float) -> float:
        """The absorbed form, which decoding uses: 2*H*(2*d_c + d_r) per attended pair."""
        return 2.0 * self.num_heads * (2 * self.latent_dim + self.rope_dim) * num_attended

    def check_tp(self, tp: int) -> None:
        """Raises ConfigError where `tp` ranks cannot share the heads evenly."""
        if self.num_heads % tp:
            raise ConfigError(f"--tp {tp} does not divide the {self.num_heads} query heads; use a divisor of them")


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A dense feed-forward layer: three h*f matrices when `gated` (SwiGLU, GeGLU), two otherwise."""

    width: int
    gated: bool = True

    def num_params(self, hidden: int, tp: int = 1) -> float:
        return (3 if self.gated else 2) * hidden * self.width / tp


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: `num_active` of `num_experts` work on a token, `shared_width` (0: none) on every token."""

    num_experts: int
    num_active: int
    width: int
    shared_width: int = 0
    gated: bool = True

    def num_dense_params(self, hidden: int, tp: int = 1) -> float:
        """Router (whole on every rank) and shared experts: read whatever the routing."""
        return hidden * self.num_experts + FeedForward(self.shared_width, self.gated).num_params(hidden, tp)

    def num_params_per_expert(self, hidden: int, tp: int = 1) -> float:
        return FeedForward(self.width, self.gated).num_params(hidden, tp)

    def touched(self, num_tokens: float) -> float:
        """Expected experts read by `num_tokens` tokens: E*(1 - (1 - k/E)^T), as if routing were uniform."""
        untouched: float = (1.0 - self.num_active / self.num_experts) ** num_tokens
        return self.num_experts * (1.0 - untouched)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """`num_layers` equal layers. Their order in the model does not matter for any figure here."""

    num_layers: int
    attention: HeadedAttention | LatentAttention
    feed_forward: FeedForward | Experts
    num_vector_params: int = 0

    def num_dense_params(self, hidden: int, tp: int = 1) -> float:
        """Parameters of one layer that every step reads (norms and biases included)."""
        forward = self.feed_forward
        mlp = forward.num_dense_params(hidden, tp) if isinstance(forward, Experts) else forward.num_params(hidden, tp)
        extra = self.num_vector_params + self.attention.num_extra_params
        return self.attention.num_params(hidden, tp) + mlp + extra

    def num_expert_params(self, hidden: int, tp: int = 1) -> float:
        """Parameters of one layer's routed experts, all of them."""
        forward = self.feed_forward
        if not isinstance(forward, Experts):
            return 0.0
        return forward.num_experts * forward.num_params_per_expert(hidden, tp)

    def num_matrix_params(self, hidden: int) -> float:
        """Parameters a token is multiplied with in one layer: active experts, no norms, no biases."""
        matrices = self.attention.num_params(hidden)
        forward = self.feed_forward
        if isinstance(forward, Experts):
            active = forward.num_active * forward.num_params_per_expert(hidden)
            return matrices + forward.num_dense_params(hidden) + active
        return matrices + forward.num_params(hidden)


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Resident bytes by when they are read: `dense` and `head` by every step that samples, `experts` as far as touched,
    `embedding` a row a token. With tied embeddings the one table counts as `head` and `embedding` is 0."""

    dense: float
    experts: float
    embedding: float
    head: float

    @property
    def total(self) -> float:
        return self.dense + self.experts + self.embedding + self.head


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's geometry, how its weights are stored, and how its cache is.

    `groups` is empty for a model of which only the number of parameters is known (`num_bare_params`): weights and
    everything per parameter can be told, attention and cache cannot. `origin` says where the numbers come from.
    `weight_format` is that of the layers' matrices, `head_format` that of the table behind the logits.
    """

    name: str
    origin: str
    hidden: int
    vocab: int
    tied: bool
    groups: tuple[LayerGroup, ...]
    weights: WeightBytes
    weight_format: NumberFormat
    head_format: NumberFormat
    cache_format: NumberFormat
    max_context: int | None = None
    num_bare_params: int = 0

    # --- parameters and bytes -----------------------------------------------------------------------------------

    @property
    def has_layers(self) -> bool:
        """Whether the geometry is known, and with it attention and cache."""
        return bool(self.groups)

    @property
    def num_layers(self) -> int:
        return sum(g.num_layers for g in self.groups)

    @property
    def num_params(self) -> int:
        """All parameters: layers, final norm, embedding, and head unless tied."""
        layers = sum(
            g.num_layers * (g.num_dense_params(self.hidden) + g.num_expert_params(self.hidden)) for g in self.groups
        )
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.num_bare_params or round(layers) + self.hidden + tables

    @property
    def num_matrix_params(self) -> float:
        """P: parameters one token is multiplied with in all layers (active experts; no head, no norms)."""
        if not self.has_layers:
            return float(self.num_bare_params)
        return sum(g.num_layers * g.num_matrix_params(self.hidden) for g in self.groups)

    def rank_weights(self, tp: int = 1) -> WeightBytes:
        """Weight bytes of one rank: matrices divided by `tp`, K and V by min(tp, G), routers and norms not at all."""
        if tp == 1:
            return self.weights
        dense, experts = 1.0 / tp, 1.0 / tp
        if self.has_layers:
            parts = [g.num_layers * g.num_dense_params(self.hidden, tp) for g in self.groups]
            whole = [g.num_layers * g.num_dense_params(self.hidden) for g in self.groups]
            dense = sum(parts) / sum(whole)
        stored = self.weights
        return WeightBytes(stored.dense * dense, stored.experts * experts, stored.embedding / tp, stored.head / tp)

    def touched_weight_bytes(self, num_tokens: float, num_samples: float, tp: int = 1) -> float:
        """Weight bytes a step must read: the dense part, the experts its tokens touch, the head if any row samples.
        (The embedding rows of its tokens are the first thing its activations read; see roofline.py.)"""
        weights = self.rank_weights(tp)
        touched = total = 0.0
        for group in self.groups:
            if isinstance(group.feed_forward, Experts):
                total += group.num_layers * group.feed_forward.num_experts
                touched += group.num_layers * group.feed_forward.touched(num_tokens)
        experts = weights.experts * touched / total if total else weights.experts
        return weights.dense + experts + (weights.head if num_samples else 0.0)

    def kv_bytes_per_token(self, tp: int = 1) -> float:
        """Bytes that caching one more token writes: 2*L*G*(d*b + s), MLA L*((d_c + d_r)*b + 2*s)."""
        self._need_layers("KV bytes per token")
        return sum(g.num_layers * self.layer_cache_bytes(g, tp) for g in self.groups)

    def layer_cache_bytes(self, group: LayerGroup, tp: int = 1) -> float:
        """Bytes cached per token by one layer of `group`."""
        fmt, attention = self.cache_format, group.attention
        return attention.cache_elements(tp) * fmt.element_bytes + attention.cache_vectors(tp) * fmt.vector_bytes

    def kv_bytes(self, context: int, tp: int = 1) -> float:
        """Bytes that a sequence of `context` tokens keeps cached: windowed layers keep at most their window."""
        self._need_layers("KV bytes")
        return sum(
            g.num_layers * self.layer_cache_bytes(g, tp) * min(context, g.attention.window or context)
            for g in self.groups
        )

    # --- FLOPs --------------------------------------------------------------------------------------------------

    def linear_flops(self, num_tokens: float) -> float:
        """2*P per token."""
        return 2.0 * self.num_matrix_params * num_tokens

    def head_flops(self, num_samples: float) -> float:
        """2*h*V per sampled row (a bare parameter count has the head inside P)."""
        return 2.0 * self.hidden * self.vocab * num_samples

    def attention_flops(self, num_new: int, num_cached: int = 0) -> float:
        """Attention of `num_new` tokens after `num_cached` others; 0 where the geometry is unknown."""
        return sum(
            g.num_layers * g.attention.flops(attended(num_new, num_cached, g.attention.window), num_cached)
            for g in self.groups
        )

    def prefill_flops(self, num_new: int, num_cached: int = 0) -> float:
        """2*P*q + 4*L*H*d*(q*c + q*(q+1)/2), without the head (see `head_flops`)."""
        return self.linear_flops(num_new) + self.attention_flops(num_new, num_cached)

    def decode_flops(self, num_input: int, num_output: int) -> float:
        """The decode steps of one request, without the head: prefill samples the first token, `num_output - 1` steps
        the others, at contexts num_input + 1, num_input + 2, ..."""
        steps = num_output - 1
        attention = sum(
            g.num_layers * g.attention.decode_flops(attended(steps, num_input, g.attention.window)) for g in self.groups
        )
        return self.linear_flops(steps) + attention

    def decode_kv_read_bytes(self, num_input: int, num_output: int) -> float:
        """KV bytes that the decode steps of one request read, summed over its `num_output - 1` steps."""
        self._need_layers("KV reads")
        return sum(
            g.num_layers * self.layer_cache_bytes(g) * attended(num_output - 1, num_input, g.attention.window)
            for g in self.groups
        )

    # --- variants -----------------------------------------------------------------------------------------------

    def stored_as(self, name: str) -> ModelShape:
        """The same model with every matrix stored in the format `name`."""
        fmt = number_format(name)
        return replace(self, weights=weights_in(self, fmt, fmt), weight_format=fmt, head_format=fmt)

    def cached_as(self, name: str) -> ModelShape:
        """The same model with its KV cache kept in the format `name`."""
        return replace(self, cache_format=cache_format(name))

    def check_tp(self, tp: int) -> None:
        """Raises ConfigError where `tp` ranks cannot hold this model."""
        if tp < 1:
            raise ConfigError(f"--tp is {tp}; it must be at least 1")
        for group in self.groups:
            group.attention.check_tp(tp)

    def _need_layers(self, what: str) -> None:
        if not self.has_layers:
            raise ConfigError(f"{what} need the model's layers and heads; --params tells only how many parameters")


def weights_in(shape: ModelShape, layers: NumberFormat, tables: NumberFormat) -> WeightBytes:
    """Weight bytes with the layers' matrices in one format and embedding and head in another (published quantised
    models usually keep the tables in 16 bits)."""
    if not shape.has_layers:
        return WeightBytes(shape.num_bare_params * layers.element_bytes, 0.0, 0.0, 0.0)
    dense = shape.hidden + sum(g.num_layers * g.num_dense_params(shape.hidden) for g in shape.groups)
    experts = sum(g.num_layers * g.num_expert_params(shape.hidden) for g in shape.groups)
    table = shape.vocab * shape.hidden * tables.element_bytes
    return WeightBytes(
        dense * layers.element_bytes, experts * layers.element_bytes, 0.0 if shape.tied else table, table
    )
