"""The figures that anyone can check by hand or against a published number; each is asserted to its last digit."""

from __future__ import annotations

import pytest
from tests.planner import traces

from pellucid.planner.ceilings import TraceCeilings, TraceLoad
from pellucid.planner.hardware import CUSTOM, Overrides, device_by_name
from pellucid.planner.memory import Batching, plan_memory
from pellucid.planner.named_shapes import bare_shape, named_shapes, shape_by_name
from pellucid.planner.plan import Plan, Scenario
from pellucid.planner.quantity import format_bytes, format_ceiling, format_seconds
from pellucid.planner.roofline import Roofline, decode

TOLERANCE = 0.002


def test_the_worked_example_to_the_digit() -> None:
    plan = Plan(Scenario(bare_shape(70_000_000_000), CUSTOM.override(Overrides(bandwidth=2e12))))
    assert format_bytes(plan.weights_bytes) == "140 GB"
    assert format_seconds(plan.decode_seconds_per_token) == "70 ms"
    assert format_ceiling(plan.single_stream_tokens_per_second) == "14.28"
    assert plan.single.cost.binding == "memory bandwidth"


@pytest.mark.parametrize("flops", [10e12, 989e12, 1e18])
def test_no_amount_of_flops_lifts_the_single_stream(flops: float) -> None:
    device = CUSTOM.override(Overrides(bandwidth=2e12, flops=flops))
    assert format_ceiling(Plan(Scenario(bare_shape(70_000_000_000), device)).single_stream_tokens_per_second) == "14.28"


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("llama-2-7b", 524_288),
        ("llama-3.1-8b", 131_072),
        ("llama-3.1-70b", 327_680),
        ("qwen3-0.6b", 114_688),
        ("qwen3-8b", 147_456),
        ("qwen3-32b", 262_144),
        ("deepseek-v3", 70_272),
    ],
)
def test_kv_bytes_per_token(name: str, num_bytes: int) -> None:
    assert shape_by_name(name).kv_bytes_per_token() == num_bytes


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("smollm2-135m", 30 * 2 * 3 * (64 + 4)),
        ("llama-3.1-8b", 32 * 2 * 8 * (128 + 4)),
        ("deepseek-v3", 61 * (576 + 8)),
    ],
)
def test_an_int8_cache_has_a_scale_for_every_vector(name: str, num_bytes: int) -> None:
    shape = shape_by_name(name).cached_as("int8")
    assert shape.kv_bytes_per_token() == num_bytes
    assert shape.kv_bytes(1000) == 1000 * num_bytes
    assert shape.decode_kv_read_bytes(10, 2) == 11 * num_bytes
    step = decode(3, 100)
    assert Roofline(shape, CUSTOM.override(Overrides(bandwidth=1e9))).cost(step).kv_read_bytes == 3 * 100 * num_bytes


@pytest.mark.parametrize(("name", "gigabytes"), [("llama-3.1-70b", 327.68), ("llama-3.1-8b", 131.072)])
def test_a_million_tokens_of_context(name: str, gigabytes: float) -> None:
    assert shape_by_name(name).kv_bytes(1_000_000) == gigabytes * 1e9


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("mistral-7b-v0.1", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gemma-3-1b", 999_885_952),
        ("deepseek-v3", 671_026_419_200),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_parameters_equal_the_published_count(name: str, num_params: int) -> None:
    assert shape_by_name(name).num_params == num_params


def test_every_shipped_model_is_as_large_as_its_name_says() -> None:
    for name in named_shapes():
        size = next((p for p in name.split("-")[1:] if p[-1] in "bm" and p[:-1].replace(".", "").isdigit()), None)
        if size is not None:  # "a3b" and "8x7b" are not sizes
            stated = float(size[:-1]) * (1e9 if size[-1] == "b" else 1e6)
            assert shape_by_name(name).num_params == pytest.approx(stated, rel=0.25), name


def _load(model: str, requests: object) -> tuple[TraceCeilings, TraceLoad]:
    ceilings = TraceCeilings(Roofline(shape_by_name(model), device_by_name("h100")))
    return ceilings, ceilings.load(requests)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("trace", "model", "prefill_flops", "share", "decode_flops", "cold", "cached"),
    [
        ("mooncake_conversation.jsonl", "llama-3.1-8b", 3.265e18, 0.38, 8.57e16, 3393, 2225),
        ("mooncake_conversation.jsonl", "llama-3.1-70b", 2.604e19, 0.24, 7.04e17, 27054, 17548),
        ("mooncake_synthetic.jsonl", "llama-3.1-8b", 1.454e18, 0.41, 1.05e16, 1481, 495),
    ],
)
def test_ceilings_of_the_mooncake_traces(
    trace: str, model: str, prefill_flops: float, share: float, decode_flops: float, cold: float, cached: float
) -> None:
    ceilings, load = _load(model, traces.mooncake(trace, reuse=False))
    assert load.prefill_flops == pytest.approx(prefill_flops, rel=TOLERANCE)
    assert load.attention_share == pytest.approx(share, abs=0.005)
    assert load.decode_flops == pytest.approx(decode_flops, rel=TOLERANCE)
    assert ceilings.compute_seconds(load) == pytest.approx(cold, rel=TOLERANCE)
    _, warm = _load(model, traces.mooncake(trace, reuse=True))
    assert ceilings.compute_seconds(warm) == pytest.approx(cached, rel=TOLERANCE)


def test_ceiling_of_the_azure_trace() -> None:
    ceilings, load = _load("llama-3.1-8b", traces.azure("azure_llm_2023_conv.csv"))
    assert load.prefill_flops == pytest.approx(3.252e17, rel=TOLERANCE)
    assert load.decode_flops == pytest.approx(5.94e16, rel=TOLERANCE)
    assert ceilings.compute_seconds(load) == pytest.approx(393, rel=TOLERANCE)


def test_decode_reads_alone_are_as_tall_as_the_compute_ceiling() -> None:
    _, load = _load("llama-3.1-8b", traces.mooncake("mooncake_conversation.jsonl", reuse=True))
    assert load.kv_read_bytes == pytest.approx(7.07e15, rel=TOLERANCE)
    assert load.kv_read_bytes / 3.35e12 == pytest.approx(2111, rel=TOLERANCE)


def test_kv_tokens_of_a_measured_card() -> None:
    """vLLM 0.19 on an RTX 4090 reported 41,408 tokens for Llama-3.1-8B (budget 2,048 tokens, 256 sequences, 0.9 of the
    memory). Nothing here was fitted to that: every term has a formula or a source of its own."""
    memory = plan_memory(
        shape_by_name("llama-3.1-8b"), device_by_name("rtx4090"), batching=Batching(2048, 256, 16, 0.9)
    )
    assert [t.name for t in memory.terms] == ["kept free", "weights", "activations", "logits", "runtime"]
    assert memory.kv_tokens(2048) == pytest.approx(41_408, rel=0.10)


def test_swap_against_recompute_of_an_8b_on_pcie_5() -> None:
    device = device_by_name("h100").override(Overrides(link=50e9))
    plan = Plan(Scenario(shape_by_name("llama-3.1-8b"), device, prompt=32, context=64))
    shape = plan.shape
    assert shape.linear_flops(1) / 989e12 == pytest.approx(14.1e-6, rel=0.005)
    choice = plan.swap_or_recompute
    assert choice is not None
    assert choice.copy_seconds == pytest.approx(2.62e-6, rel=0.005)
    assert choice.round_trip_seconds == pytest.approx(5.24e-6, rel=0.005)
    assert 50e9 / shape.kv_bytes_per_token() == pytest.approx(381e3, rel=0.005)


@pytest.mark.parametrize(
    ("name", "ridge"),
    [("a100", 153), ("h100", 295), ("h200", 206), ("b200", 292), ("l40s", 419), ("rtx4090", 164), ("mi300x", 247)],
)
def test_ridges_of_the_device_table(name: str, ridge: int) -> None:
    assert round(device_by_name(name).ridge("bf16")) == ridge
