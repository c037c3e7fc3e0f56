"""Laws of the arithmetic, over models of every kind; and the formulas once, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planner.models import shapes

from pellucid.core.errors import ConfigError
from pellucid.planner.named_shapes import bare_shape, shape_by_name
from pellucid.planner.shape import Experts, HeadedAttention, LatentAttention, ModelShape, attended

tokens = st.integers(0, 400)


@given(num_new=tokens, num_cached=tokens, window=st.none() | st.integers(1, 300))
def test_attended_is_what_counting_gives(num_new: int, num_cached: int, window: int | None) -> None:
    counted = sum(min(num_cached + i + 1, window or 10**9) for i in range(num_new))
    assert attended(num_new, num_cached, window) == counted


@given(shape=shapes(), first=st.integers(1, 300), second=st.integers(1, 300))
def test_chunking_a_prompt_costs_no_linear_and_no_less_attention(shape: ModelShape, first: int, second: int) -> None:
    whole = shape.prefill_flops(first + second)
    parts = shape.prefill_flops(first) + shape.prefill_flops(second, first)
    assert parts >= whole * (1 - 1e-12)  # latent attention may have to restore what the first chunk left
    if all(isinstance(g.attention, HeadedAttention) for g in shape.groups):
        assert parts == pytest.approx(whole, rel=1e-12)


@given(shape=shapes(), num_input=st.integers(1, 500), num_output=st.integers(1, 60))
def test_decoding_is_the_sum_of_its_steps(shape: ModelShape, num_input: int, num_output: int) -> None:
    flops = read = 0.0
    for step in range(num_output - 1):
        flops += shape.decode_flops(num_input + step, 2)
        read += shape.decode_kv_read_bytes(num_input + step, 2)
    assert shape.decode_flops(num_input, num_output) == pytest.approx(flops, rel=1e-9)
    assert shape.decode_kv_read_bytes(num_input, num_output) == pytest.approx(read, rel=1e-9)


@given(shape=shapes(), context=st.integers(1, 2000))
def test_a_cache_never_holds_more_than_a_token_adds(shape: ModelShape, context: int) -> None:
    assert shape.kv_bytes(context) <= context * shape.kv_bytes_per_token()
    assert shape.kv_bytes(context) <= shape.kv_bytes(context + 1)


@given(shape=shapes())
def test_halving_the_bytes_halves_the_weights_and_not_the_parameters(shape: ModelShape) -> None:
    smaller = shape.stored_as("fp8")
    assert smaller.weights.total == pytest.approx(shape.weights.total / 2)
    assert smaller.num_params == shape.num_params
    assert shape.weights.total == 2 * shape.num_params


@given(shape=shapes(), tp=st.sampled_from([2, 4, 8]))
def test_ranks_hold_at_least_an_even_share(shape: ModelShape, tp: int) -> None:
    try:
        shape.check_tp(tp)
    except ConfigError:
        return
    assert shape.rank_weights(tp).total >= shape.weights.total / tp * (1 - 1e-9)
    assert shape.kv_bytes_per_token(tp) >= shape.kv_bytes_per_token() / tp * (1 - 1e-9)


@given(shape=shapes(), num_tokens=st.integers(1, 5000))
def test_a_step_reads_no_more_than_all_weights(shape: ModelShape, num_tokens: int) -> None:
    touched = shape.touched_weight_bytes(num_tokens, 1)
    assert touched <= shape.weights.total * (1 + 1e-12)
    assert touched <= shape.touched_weight_bytes(num_tokens + 1, 1) * (1 + 1e-12)


def test_kv_heads_limit_what_ranks_divide() -> None:
    shape = shape_by_name("llama-3.1-8b")  # 8 KV heads
    assert shape.kv_bytes_per_token(8) == shape.kv_bytes_per_token() / 8
    assert shape.kv_bytes_per_token(16) == shape.kv_bytes_per_token() / 8


def test_a_latent_cache_is_whole_on_every_rank() -> None:
    shape = shape_by_name("deepseek-v3")
    assert shape.kv_bytes_per_token(8) == shape.kv_bytes_per_token() == 70_272


def test_absorbed_latent_attention_by_hand() -> None:
    attention = LatentAttention(128, 512, 64, 128, 128, 1536)
    assert attention.decode_flops(1000) == 2 * 128 * (2 * 512 + 64) * 1000
    assert attention.flops(1000 * 1001 // 2, 0) == 2 * 128 * (128 + 64 + 128) * 1000 * 1001 // 2


def test_experts_by_hand() -> None:
    experts = Experts(num_experts=8, num_active=2, width=100)
    assert experts.touched(1) == pytest.approx(2)
    assert experts.touched(2) == pytest.approx(8 * (1 - 0.75**2))
    assert experts.touched(10_000) == pytest.approx(8)


def test_a_window_caps_what_layers_keep_and_attend() -> None:
    shape = shape_by_name("gemma-3-27b")  # 52 layers of window 1,024 and 10 that see everything
    per_layer = 2 * 16 * 128 * 2
    assert shape.kv_bytes(100_000) == per_layer * (52 * 1024 + 10 * 100_000)
    assert shape.num_layers == 62


def test_a_bare_count_tells_weights_and_refuses_the_rest() -> None:
    shape = bare_shape(70_000_000_000, "int4")
    assert shape.weights.total == 70e9 * (4 + 20 / 128) / 8
    with pytest.raises(ConfigError, match="--params tells only how many"):
        shape.kv_bytes_per_token()


@pytest.mark.parametrize(
    ("name", "tp"), [("llama-3.1-8b", 3), ("qwen2.5-7b", 8), ("deepseek-v3", 3), ("llama-3.1-8b", 0)]
)
def test_impossible_splits_are_refused(name: str, tp: int) -> None:
    with pytest.raises(ConfigError, match="--tp"):
        shape_by_name(name).check_tp(tp)


def test_kv_heads_that_ranks_cannot_share_are_refused() -> None:
    attention = HeadedAttention(num_heads=12, num_kv_heads=6, head_dim=64)
    with pytest.raises(ConfigError, match="6 KV heads"):
        attention.check_tp(4)
