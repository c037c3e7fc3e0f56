"""Laws of a step's cost: one max for a mixed step, floors below predictions, ranks, and the engine's cost model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planner.models import shapes

from pellucid.core.cost import CostModel, StepFeatures, features_of
from pellucid.core.errors import ConfigError
from pellucid.core.plan import Chunk, StepPlan
from pellucid.planner.hardware import CUSTOM, Device, Overheads, Overrides, device_by_name
from pellucid.planner.named_shapes import bare_shape, shape_by_name
from pellucid.planner.roofline import Roofline, RooflineCostModel, chunks, decode, prefill
from pellucid.planner.shape import HeadedAttention, ModelShape

DEVICE = CUSTOM.override(Overrides(flops=1e14, bandwidth=1e12, link=1e11))
lengths = st.integers(1, 3000)


def joined(first: StepFeatures, second: StepFeatures) -> StepFeatures:
    """Both batches in one step."""
    return StepFeatures(*(a + b for a, b in zip(first, second, strict=True)))


@given(shape=shapes(windowed=False), new=lengths, cached=lengths, batch=st.integers(1, 200), context=lengths)
def test_a_mixed_step_costs_less_than_its_parts_and_no_less_than_either(
    shape: ModelShape, new: int, cached: int, batch: int, context: int
) -> None:
    roofline = Roofline(shape, DEVICE)
    chunk, decodes = prefill(new, cached), decode(batch, context)
    both = roofline.floor_seconds(joined(chunk, decodes))
    apart = roofline.floor_seconds(chunk), roofline.floor_seconds(decodes)
    assert both >= max(apart) * (1 - 1e-9)
    if all(isinstance(g.attention, HeadedAttention) for g in shape.groups):  # latent attention picks one form a step
        assert both <= sum(apart) * (1 + 1e-9)


@given(shape=shapes(), new=lengths, cached=lengths)
def test_one_chunk_costs_what_the_shape_says(shape: ModelShape, new: int, cached: int) -> None:
    cost = Roofline(shape, DEVICE).cost(prefill(new, cached, samples=False))
    assert cost.linear_flops + cost.attention_flops == pytest.approx(shape.prefill_flops(new, cached), rel=1e-9)
    assert cost.kv_read_bytes == pytest.approx(shape.kv_bytes(cached + new), rel=1e-9)
    assert cost.kv_write_bytes == pytest.approx(new * shape.kv_bytes_per_token(), rel=1e-9)


@given(shape=shapes(), batch=st.integers(1, 100), context=st.integers(2, 3000))
def test_a_decode_batch_costs_what_the_shape_says(shape: ModelShape, batch: int, context: int) -> None:
    cost = Roofline(shape, DEVICE).cost(decode(batch, context))
    assert cost.kv_read_bytes == pytest.approx(batch * shape.kv_bytes(context), rel=1e-9)
    assert cost.head_flops == 2 * shape.hidden * shape.vocab * batch


@given(shape=shapes(), batch=st.integers(1, 64), context=lengths)
def test_time_never_falls_with_more_work(shape: ModelShape, batch: int, context: int) -> None:
    roofline = Roofline(shape, DEVICE)
    here = roofline.floor_seconds(decode(batch, context))
    assert roofline.floor_seconds(decode(batch + 1, context)) >= here
    assert roofline.floor_seconds(decode(batch, context + 1)) >= here


@given(num_new=lengths, num_cached=lengths, size=st.integers(1, 700))
def test_chunks_cover_the_prompt_once_and_sample_once(num_new: int, num_cached: int, size: int) -> None:
    steps = chunks(num_new, num_cached, size)
    assert sum(s.num_tokens for s in steps) == num_new
    assert sum(s.num_attended for s in steps) == prefill(num_new, num_cached).num_attended
    assert [s.num_samples for s in steps] == [0] * (len(steps) - 1) + [1]


def test_features_of_a_plan_and_of_the_textbook_agree() -> None:
    plan = StepPlan(0, (Chunk(0, 100, 612, True), Chunk(1, 41, 42, True)))
    assert features_of(plan) == joined(prefill(512, 100), decode(1, 42))


def test_the_cost_model_is_one_and_adds_overheads_and_copies() -> None:
    overheads = Overheads(step_seconds=1e-3, layer_seconds=1e-4, sequence_seconds=1e-5)
    shape = shape_by_name("llama-3.1-8b")
    roofline = Roofline(shape, replace(DEVICE, overheads=overheads))
    model: CostModel = RooflineCostModel(roofline, spread=0.1)
    step = decode(8, 100)
    expected = roofline.floor_seconds(step) + 1e-3 + 32 * 1e-4 + 8 * 1e-5
    assert model.predict(step).seconds == pytest.approx(expected)
    assert model.predict(step).spread == pytest.approx(expected / 10)
    moved = step._replace(copied_bytes=10**9)
    assert model.predict(moved).seconds == pytest.approx(expected + 1e9 / 1e11)
    plain = RooflineCostModel(Roofline(shape, replace(DEVICE, host_link=None)))
    assert plain.copy_seconds(10**9) == pytest.approx(2e9 / 1e12)


def test_binding_names_whatever_takes_longest() -> None:
    shape = shape_by_name("llama-3.1-8b")
    assert Roofline(shape, DEVICE).cost(decode(1, 10)).binding == "memory bandwidth"
    assert Roofline(shape, DEVICE).cost(prefill(4000)).binding == "compute"
    slow = replace(DEVICE, all_reduce_seconds=1.0)
    assert Roofline(shape, slow, tp=2).cost(decode(1, 10)).binding == "communication"
    busy = replace(DEVICE, overheads=Overheads(step_seconds=10.0))
    assert Roofline(shape, busy).cost(decode(1, 10)).binding == "overhead"


def test_communication_by_hand() -> None:
    shape = shape_by_name("llama-3.1-70b")
    device = replace(DEVICE, link=450e9, all_reduce_seconds=22e-6)
    reduce = 22e-6 + 2 * 7 / 8 * 8192 * 2 / 450e9
    gather = 22e-6 + 7 / 8 * 128256 * 2 / 450e9
    seconds = Roofline(shape, device, tp=8).communication_seconds(1, 1)
    assert seconds == pytest.approx(160 * reduce + gather)
    assert 3.5e-3 < seconds < 6e-3


def test_ranks_divide_flops_and_weights() -> None:
    shape = shape_by_name("llama-3.1-70b")
    one, four = (Roofline(shape, DEVICE, tp=tp).cost(decode(8, 1000)) for tp in (1, 4))
    assert four.flops == pytest.approx(one.flops / 4)
    assert four.weight_bytes == pytest.approx(one.weight_bytes / 4, rel=1e-3)
    assert four.kv_read_bytes == pytest.approx(one.kv_read_bytes / 4)
    assert four.communication_seconds > 0 == one.communication_seconds


def test_without_a_rate_memory_stands_alone_and_the_other_way_round() -> None:
    shape = bare_shape(70_000_000_000)
    memory = Roofline(shape, CUSTOM.override(Overrides(bandwidth=2e12))).cost(decode(1, 1))
    assert (memory.compute_seconds, memory.seconds, memory.binding) == (None, 0.07, "memory bandwidth")
    compute = Roofline(shape, CUSTOM.override(Overrides(flops=140e9))).cost(decode(1, 1))
    assert (compute.memory_seconds, compute.seconds, compute.binding) == (None, 1.0, "compute")


@pytest.mark.parametrize(
    ("device", "tp", "message"),
    [
        (CUSTOM, 1, "neither rate nor bandwidth"),
        (CUSTOM.override(Overrides(bandwidth=1e12)), 2, "no known link to its peers"),
        (Device("old", "old", flops={"fp32": 1e12}), 1, "no known bf16 rate"),
    ],
)
def test_a_device_too_unknown_is_refused(device: Device, tp: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Roofline(shape_by_name("llama-3.1-8b"), device, tp=tp)


def test_decode_attention_stays_memory_bound_whatever_the_batch() -> None:
    """With a long context per sequence the batch at which compute binds is never reached: intensity tends to H/G."""
    shape = shape_by_name("llama-3.1-8b")
    cost = Roofline(shape, device_by_name("h100")).cost(decode(100_000, 100_000))
    assert cost.attention_flops / cost.kv_read_bytes == pytest.approx(4, rel=1e-6)
    assert cost.binding == "memory bandwidth"
