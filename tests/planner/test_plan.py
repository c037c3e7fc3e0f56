"""Plans, fleets, comparisons, advice: the numbers behind the tables, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planner.models import shapes

from pellucid.core.errors import ConfigError
from pellucid.planner.compare import compare, paradox
from pellucid.planner.figures import figures, fleet_figures
from pellucid.planner.fit import fit_serve
from pellucid.planner.fleet import Demand, size_fleet
from pellucid.planner.hardware import CUSTOM, Device, Overrides, device_by_name
from pellucid.planner.memory import Batching, plan_memory
from pellucid.planner.named_shapes import bare_shape, shape_by_name
from pellucid.planner.plan import Plan, Scenario
from pellucid.planner.roofline import decode
from pellucid.planner.shape import ModelShape
from pellucid.planner.stages import stages

EIGHT_B = shape_by_name("llama-3.1-8b")
H100 = device_by_name("h100")


def plan(**changes: Any) -> Plan:
    return Plan(Scenario(**{"shape": EIGHT_B, "device": H100, **changes}))


@settings(max_examples=50)
@given(shape=shapes(), context=st.integers(1, 9000), memory=st.integers(10**9, 10**12))
def test_what_fits_fits_and_one_more_does_not(shape: ModelShape, context: int, memory: int) -> None:
    budget = plan_memory(shape, Device("d", "d", memory=memory))
    padded = -(-context // 16) * 16
    most = budget.max_sequences(context)
    assert most * shape.kv_bytes(padded) <= max(budget.kv_bytes, 0)
    assert (most + 1) * shape.kv_bytes(padded) > budget.kv_bytes
    assert budget.kv_tokens(context) % 16 == 0
    assert sum(t.num_bytes for t in budget.terms) + budget.kv_bytes == pytest.approx(memory)


def test_a_pool_wastes_nothing_but_the_last_block() -> None:
    budget = plan_memory(EIGHT_B, H100)
    context = 1000  # 62.5 blocks
    held = budget.max_sequences(context) * context
    assert held / budget.kv_tokens(context) > 0.95


def test_a_model_too_large_is_said_to_be_short_of_memory() -> None:
    answer = plan(shape=shape_by_name("llama-3.1-70b"))
    assert answer.max_sequences == 0
    assert not answer.batches
    assert any("short" in f.value for f in figures(answer))


def test_a_prefix_hit_spares_prefill_and_leaves_decode_alone() -> None:
    cold, warm = plan(prompt=4000), plan(prompt=4000, prefix_hit=0.9)
    assert warm.scenario.num_cached == 3600
    assert warm.prefill_seconds is not None
    assert cold.prefill_seconds is not None
    assert warm.prefill_seconds < 0.2 * cold.prefill_seconds
    assert warm.prefill_seconds * H100.flops["bf16"] >= EIGHT_B.linear_flops(400)
    assert warm.decode_seconds_per_token == cold.decode_seconds_per_token
    assert plan(prompt=100, prefix_hit=1.0).scenario.num_cached == 99


def test_chunks_read_the_weights_again() -> None:
    whole, chunked = plan(prompt=4096), plan(prompt=4096, chunk=64)
    assert len(chunked.prefill) == 64
    assert (chunked.prefill_seconds or 0) > (whole.prefill_seconds or 0)


@pytest.mark.parametrize("context", [128, 1024, 8192])
def test_the_batch_where_compute_binds_is_the_first(context: int) -> None:
    answer = plan(prompt=64, context=context)
    batch = answer.compute_bound_from
    if batch is None:
        cost = answer.roofline.cost(decode(1 << 20, context))
        assert (cost.compute_seconds or 0) <= (cost.memory_seconds or 0)
        return
    for size, binds in ((batch - 1, False), (batch, True)):
        cost = answer.roofline.cost(decode(size, context))
        assert ((cost.compute_seconds or 0) > (cost.memory_seconds or 0)) is binds


def test_weights_alone_bind_until_about_the_ridge_in_16_bits() -> None:
    assert plan().weights_compute_bound_from == pytest.approx(H100.ridge("bf16"), rel=0.01)


def test_objectives() -> None:
    answer = plan(slo_itl_seconds=0.02, slo_ttft_seconds=1.0)
    batch = answer.slo_batch
    assert batch is not None
    assert answer.decode_at(batch).cost.seconds <= 0.02
    assert batch == answer.max_sequences or answer.decode_at(batch + 1).cost.seconds > 0.02
    assert answer.ttft_met is True
    assert plan(slo_itl_seconds=1e-4).slo_batch == 0
    assert plan(slo_ttft_seconds=1e-4).ttft_met is False
    assert plan().slo_batch is plan().ttft_met is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": 0}, "--prompt is 0"),
        ({"prefix_hit": 1.5}, "--prefix-hit is 1.5"),
        ({"slo_itl_seconds": 0.0}, "--slo-itl must be more than 0"),
        ({"tp": 3}, "--tp 3 does not divide"),
    ],
)
def test_impossible_scenarios_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**changes)


@given(users=st.integers(1, 5000), think=st.floats(0, 600))
def test_a_fleet_serves_its_users_and_one_replica_fewer_does_not(users: int, think: float) -> None:
    fleet = size_fleet(plan(), Demand(users, think, 2.5))
    assert fleet.replicas_needed * fleet.users_per_replica >= users
    assert (fleet.replicas_needed - 1) * fleet.users_per_replica < users
    assert fleet.replicas == fleet.replicas_needed + 1
    # Little's law over the whole loop: users = rate x (time in service + time thinking).
    residence = fleet.batch / fleet.requests_per_second_per_replica
    assert fleet.requests_per_second * (residence + think) == pytest.approx(users)


def test_the_bill_at_full_load_is_all_spent_on_tokens() -> None:
    fleet = size_fleet(plan(tp=2), Demand(10_000, 0.0, 3.0))
    assert fleet.dollars_per_million_input is not None
    assert fleet.dollars_per_million_output is not None
    rate = fleet.requests_per_second_per_replica
    spent = rate * (fleet.dollars_per_million_input * 1024 + fleet.dollars_per_million_output * 256) / 1e6
    assert spent * 3600 == pytest.approx(2 * 3.0)
    assert len(fleet_figures(fleet)) == 9


def test_objectives_shrink_the_batch_of_a_replica() -> None:
    free, strict = size_fleet(plan(), Demand(1000)), size_fleet(plan(slo_itl_seconds=0.015), Demand(1000))
    assert strict.gap_seconds <= 0.015
    assert strict.batch < free.batch
    assert free.dollars_per_hour is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": bare_shape(7_000_000_000)}, "known layers"),
        ({"shape": shape_by_name("llama-3.1-70b")}, "not one sequence of 1280 tokens fits"),
        ({"slo_ttft_seconds": 1e-3}, "a prompt alone takes"),
        ({"slo_itl_seconds": 1e-3}, "no batch keeps 0.001 s"),
    ],
)
def test_fleets_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        size_fleet(plan(**changes), Demand(10))


def test_the_compute_paradox() -> None:
    names = ("h100", "h200", "h20", "b200", "l40s", "rtx4090", "mi300x")
    rows = compare(plan().scenario, [device_by_name(n) for n in names])
    h100, h20 = rows[0], rows[2]
    assert (h20.flops or 0) < (h100.flops or 0) / 6
    assert h20.single_stream_tokens_per_second > h100.single_stream_tokens_per_second
    assert (h20.prefill_seconds or 0) > 6 * (h100.prefill_seconds or 0)
    sentence = paradox(rows[:3:2])
    assert sentence is not None
    assert sentence.startswith("h100 has 6.7 x the FLOP/s of h20, but a single stream runs at 0.84 x")
    assert paradox(rows[:1]) is None


def test_stages_put_both_bounds_side_by_side() -> None:
    rows = {row.name: (row.prefill, row.decode) for row in stages(plan(prompt=4000))}
    assert rows["bound by"] == ("compute", "memory bandwidth")
    assert rows["operation"][0].startswith("GEMM")
    assert rows["operation"][1].startswith("GEMV")


def test_every_figure_has_a_formula_and_a_name_of_its_own() -> None:
    full = figures(plan(tp=2, prefix_hit=0.5, slo_ttft_seconds=1.0, slo_itl_seconds=0.1, concurrency=8))
    assert len({f.name for f in full}) == len(full)
    assert all(f.formula and f.value for f in full)
    bare = figures(Plan(Scenario(bare_shape(7_000_000_000), CUSTOM.override(Overrides(bandwidth=1e12)))))
    assert {f.section for f in bare} == {"memory", "decode"}


@settings(max_examples=50)
@given(memory=st.integers(10**9, 64 * 10**9), context=st.none() | st.integers(16, 20_000))
def test_advice_stays_within_the_memory(memory: int, context: int | None) -> None:
    shape, batching = shape_by_name("smollm2-135m"), Batching(512, 64, 16, 1.0)
    host = Device("host", "host", memory=memory)
    try:
        advice = fit_serve(shape, "m", host, context=context)
    except ConfigError:
        # Refused: then the least that was asked for (one block, or the whole context) really is too much.
        assert plan_memory(shape, host, batching=batching).kv_bytes < shape.kv_bytes((context or 0) + 16) + 2**20
        return
    spent = sum(t.num_bytes for t in plan_memory(shape, host, batching=batching).terms)
    assert advice.kv_memory_bytes + spent <= memory
    assert advice.kv_tokens * shape.kv_bytes_per_token() <= advice.kv_memory_bytes
    assert advice.full_length_sequences * advice.max_context <= advice.kv_tokens
    assert advice.command[:3] == ("pellucid", "serve", "m")


def test_advice_for_a_given_cache_and_against_too_little() -> None:
    host = Device("host", "host", memory=10**9)
    advice = fit_serve(EIGHT_B, "m", host, kv_bytes=2**30)
    assert "1024MiB" in advice.command
    with pytest.raises(ConfigError, match="do not hold"):
        fit_serve(EIGHT_B, "m", host)


def test_advice_for_an_int8_cache_asks_for_it_and_counts_its_tokens() -> None:
    host = Device("host", "host", memory=2**40)
    advice = fit_serve(EIGHT_B.cached_as("int8"), "m", host, kv_bytes=2**30)
    assert advice.command[-2:] == ("--kv-dtype", "int8")
    assert advice.kv_tokens == 2**30 // (32 * 2 * 8 * (128 + 4)) // 16 * 16
    assert "--kv-dtype" not in fit_serve(EIGHT_B, "m", host, kv_bytes=2**30).command


def test_the_page_for_newcomers_says_what_the_plan_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "roofline.md").read_text()
    answer = plan(prompt=4000)
    for row in stages(answer):
        if "in use" not in row.name:
            assert f"| {row.name} | {row.prefill} | {row.decode} |" in page
    assert f"says {answer.weights_compute_bound_from} counting weights alone" in page
    assert answer.compute_bound_from is None
    assert sum(c.attention_flops for c in answer.prefill) / sum(c.flops for c in answer.prefill) == pytest.approx(
        0.07, abs=0.005
    )
