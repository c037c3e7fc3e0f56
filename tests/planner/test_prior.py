"""The engine's prior: it says what the roofline with measured kernels says, is slow where nothing was measured, and
prices a request that is alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planner.models import shapes

from pellucid.core.cost import FittedCost, StepFeatures
from pellucid.core.errors import ConfigError
from pellucid.planner.hardware import CUSTOM, Overheads, Overrides, device_by_name
from pellucid.planner.kernel_rates import AttentionRate, KernelRates, LinearRate
from pellucid.planner.named_shapes import bare_shape, shape_by_name
from pellucid.planner.prior import KNOTS, alone, step_time_prior
from pellucid.planner.roofline import Roofline, chunks, decode, prefill
from pellucid.planner.shape import ModelShape

SHAPE = shape_by_name("smollm2-135m")
READ = 1.5e10
LINEAR = [LinearRate("layers", "bf16", rows, 1e-11 * (3 + rows), 0.1) for rows in KNOTS]
HEAD = [LinearRate("head", "bf16", rows, 2e-11 * (3 + rows), 0.1) for rows in (1, 32, 64)]
MEASURED = replace(
    CUSTOM.override(Overrides(flops=1e12, bandwidth=2e10)),
    kernels=KernelRates((*LINEAR, *HEAD), (AttentionRate("bf16", 1e12, READ),)),
    overheads=Overheads(step_seconds=4e-4, sequence_seconds=1e-6),
    sources=("measured once",),
)


def cost(shape: ModelShape = SHAPE, device: object = MEASURED, num_cores: int = 1) -> FittedCost:
    """The engine's model with the prior and no step observed."""
    return FittedCost(step_time_prior(shape, device, num_cores=num_cores).prior)  # type: ignore[arg-type]


@given(batch=st.integers(1, 64), context=st.integers(1, 100_000))
def test_decode_steps_are_priced_as_the_measured_kernels_do(batch: int, context: int) -> None:
    """Exact but for the bytes that new tokens write, which the prior leaves out."""
    step = decode(batch, context)
    written = batch * SHAPE.kv_bytes_per_token() / READ
    expected = Roofline(SHAPE, MEASURED).cost(step).seconds - written
    assert cost().predict(step).seconds == pytest.approx(expected, rel=1e-9)


@given(num_new=st.integers(1, 2048), num_cached=st.integers(0, 50_000))
def test_a_last_chunk_is_priced_as_the_measured_kernels_do(num_new: int, num_cached: int) -> None:
    step = prefill(num_new, num_cached)
    expected = Roofline(SHAPE, MEASURED).cost(step).seconds - num_new * SHAPE.kv_bytes_per_token() / READ
    assert cost().predict(step).seconds == pytest.approx(expected, rel=1e-9)


@given(shape=shapes(), num_cores=st.integers(1, 64), rows=st.integers(1, 4000), context=st.integers(0, 10_000))
def test_without_a_profile_more_work_never_costs_less(
    shape: ModelShape, num_cores: int, rows: int, context: int
) -> None:
    prior = step_time_prior(shape, None, num_cores=num_cores).prior
    assert list(prior.table) == sorted(prior.table)
    assert min(*prior.table, *prior[1:]) > 0, "a price of 0 would never be learnt"
    model, step = FittedCost(prior), prefill(rows, context)
    for more in (prefill(rows + 1, context), prefill(rows, context + 1), step._replace(copied_bytes=4096)):
        assert model.predict(more).seconds > model.predict(step).seconds


def test_a_guess_is_slower_than_the_measured_kernels_and_says_that_it_is_one() -> None:
    unmeasured = replace(MEASURED, kernels=None)
    assert step_time_prior(SHAPE, MEASURED).origin == "measured once"
    assert "no kernels for bf16 weights" in step_time_prior(SHAPE, unmeasured).origin
    assert "no profile describes this engine" in step_time_prior(SHAPE, None).origin
    for step in [decode(1, 100), decode(32, 2000), prefill(512), prefill(512, 8000)]:
        assert cost().predict(step).seconds < cost(device=unmeasured).predict(step).seconds
        assert cost().predict(step).seconds < cost(device=None, num_cores=2).predict(step).seconds


def test_a_format_that_was_not_measured_gets_the_guess() -> None:
    assert "for q4_0 weights" in step_time_prior(SHAPE.stored_as("q4_0"), MEASURED).origin


def test_a_bare_parameter_count_has_no_prior() -> None:
    with pytest.raises(ConfigError, match="need the model's layers"):
        step_time_prior(bare_shape(10**9), device_by_name("h100"))


@given(prompt=st.integers(1, 5000), output=st.integers(1, 300), budget=st.sampled_from([64, 512, 10_000]))
def test_alone_is_the_sum_of_its_steps(prompt: int, output: int, budget: int) -> None:
    model, cached = cost(), prompt // 2
    first = sum(model.predict(s).seconds for s in chunks(prompt - cached, cached, budget))
    rest = sum(model.predict(decode(1, prompt + i)).seconds for i in range(1, output))
    found = alone(model, num_prompt=prompt, num_cached=cached, num_output=output, token_budget=budget)
    assert found.first_token_seconds == pytest.approx(first)
    # The mean context is rounded to a whole token, which is worth half a token's reading a step.
    one_token = model.predict(decode(1, 2)).seconds - model.predict(decode(1, 1)).seconds
    assert found.total_seconds == pytest.approx(first + rest, abs=output * one_token)
    cold = alone(model, num_prompt=prompt, num_cached=0, num_output=output, token_budget=budget)
    assert cold.total_seconds >= found.total_seconds - 1e-12


def test_copies_are_priced_by_the_host_link_where_there_is_one() -> None:
    base, linked = StepFeatures(1, 1, 1, 1, 1), cost(device=replace(MEASURED, host_link=1e9))
    extra = linked.predict(base._replace(copied_bytes=10**6)).seconds - linked.predict(base).seconds
    assert extra == pytest.approx(1e-3)
