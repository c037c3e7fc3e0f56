"""Random model shapes of every kind the arithmetic knows."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from pellucid.planner.formats import number_format
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


@st.composite
def headed(draw: st.DrawFn, *, windowed: bool = True) -> HeadedAttention:
    num_kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    window = draw(st.none() | st.integers(1, 300)) if windowed else None
    return HeadedAttention(
        num_kv_heads * draw(st.integers(1, 8)), num_kv_heads, draw(st.sampled_from([64, 128])), window
    )


latent = st.builds(
    LatentAttention,
    num_heads=st.sampled_from([8, 16]),
    latent_dim=st.sampled_from([64, 512]),
    rope_dim=st.sampled_from([16, 64]),
    nope_dim=st.sampled_from([64, 128]),
    value_dim=st.sampled_from([64, 128]),
    query_rank=st.none() | st.sampled_from([96, 1536]),
)
forwards = st.builds(FeedForward, st.integers(1, 4000), st.booleans()) | st.builds(
    lambda active, more, width, shared: Experts(active + more, active, width, shared),
    st.integers(1, 4),
    st.integers(1, 60),
    st.integers(1, 1000),
    st.sampled_from([0, 500]),
)


@st.composite
def shapes(draw: st.DrawFn, *, windowed: bool = True) -> ModelShape:
    attention = headed(windowed=windowed) | latent
    groups = draw(st.lists(st.builds(LayerGroup, st.integers(1, 40), attention, forwards), min_size=1, max_size=3))
    bf16 = number_format("bf16")
    shape = ModelShape(
        name="random",
        origin="test",
        hidden=draw(st.sampled_from([64, 576, 4096])),
        vocab=draw(st.integers(100, 150_000)),
        tied=draw(st.booleans()),
        groups=tuple(groups),
        weights=WeightBytes(0, 0, 0, 0),
        weight_format=bf16,
        head_format=bf16,
        cache_format=bf16,
        max_context=8192,
    )
    return replace(shape, weights=weights_in(shape, bf16, bf16))
