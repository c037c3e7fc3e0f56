"""Rates taken apart from timed steps: steps made from known rates give those rates back, and predictions with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.core.cost import StepFeatures
from pellucid.core.errors import ConfigError
from pellucid.planner.hardware import CUSTOM, Overrides
from pellucid.planner.kernel_rates import AttentionRate, KernelRates, LinearRate, TimedStep, attention_work, rates_from
from pellucid.planner.named_shapes import shape_by_name
from pellucid.planner.roofline import Roofline, RooflineCostModel, decode, prefill

SHAPE = shape_by_name("smollm2-135m")
ROWS = (1, 8, 64, 512)


def known(per_param: float, flops: float, read_bytes: float) -> KernelRates:
    """Layers that take half of `per_param` and half of it again for each row; a head twice as slow."""
    layers = [LinearRate("layers", "bf16", rows, per_param * (1 + rows / 2)) for rows in ROWS]
    head = [LinearRate("head", "bf16", rows, 2 * per_param * (1 + rows / 2)) for rows in ROWS[:3]]
    return KernelRates((*layers, *head), (AttentionRate("bf16", flops, read_bytes),))


def time_of(rates: KernelRates, step: StepFeatures) -> TimedStep:
    seconds = rates.linear_seconds("layers", "bf16", step.num_tokens, SHAPE.num_matrix_params)
    seconds += rates.attention_seconds("bf16", *attention_work(SHAPE, step))
    if step.num_samples:
        seconds += rates.linear_seconds("head", "bf16", step.num_samples, SHAPE.hidden * SHAPE.vocab)
    return TimedStep(step, seconds, 0.02)


def steps(rates: KernelRates) -> list[TimedStep]:
    decodes = [decode(rows, 16) for rows in (1, 4, 8, 64)]
    plain = [d._replace(num_samples=0) for d in decodes]
    chunks = [prefill(rows, samples=False) for rows in (128, 512)]
    far = [decode(4, 4096)._replace(num_samples=0), prefill(512, 3584, samples=False)]
    return [time_of(rates, s) for s in (*decodes, *plain, *chunks, *far)]


@given(per_param=st.floats(1e-10, 1e-9), flops=st.floats(1e11, 1e13), read_bytes=st.floats(1e10, 1e12))
def test_known_rates_come_back(per_param: float, flops: float, read_bytes: float) -> None:
    truth = known(per_param, flops, read_bytes)
    found = rates_from(SHAPE, steps(truth))
    assert found.attention[0].flops == pytest.approx(flops, rel=1e-3)
    assert found.attention[0].read_bytes == pytest.approx(read_bytes, rel=1e-3)
    for part, rows in (("layers", 1), ("layers", 64), ("layers", 512), ("head", 1), ("head", 64)):
        expected = truth.linear_seconds(part, "bf16", rows, 1.0)  # type: ignore[arg-type]
        assert found.linear_seconds(part, "bf16", rows, 1.0) == pytest.approx(expected, rel=1e-2)  # type: ignore[arg-type]


def test_predictions_come_from_the_kernels_where_they_cover_the_model() -> None:
    rates = known(1e-10, 1e12, 1e10)
    device = replace(CUSTOM.override(Overrides(flops=1e12, bandwidth=2e10)), kernels=rates)
    roofline = Roofline(SHAPE, device)
    assert roofline.measured
    step = decode(8, 500)
    assert roofline.cost(step).seconds == pytest.approx(time_of(rates, step).seconds, rel=1e-6)
    assert roofline.floor_seconds(step) < roofline.cost(step).seconds
    other = Roofline(SHAPE.stored_as("q4_0"), device)
    assert not other.measured
    assert other.cost(step).seconds == other.floor_seconds(step)


def test_an_int8_cache_is_read_at_the_measured_rate_of_bf16() -> None:
    rates = known(1e-10, 1e12, 1e10)
    assert rates.covers("bf16", "bf16", "int8")
    assert rates.attention_seconds("int8", 1e9, 1e6) == rates.attention_seconds("bf16", 1e9, 1e6)
    both = replace(rates, attention=(*rates.attention, AttentionRate("int8", 2e12, 2e10)))
    assert both.attention_seconds("int8", 1e9, 1e6) < rates.attention_seconds("int8", 1e9, 1e6)
    assert not rates.covers("bf16", "bf16", "fp32")


def test_between_rows_time_is_interpolated_and_beyond_them_it_grows_in_proportion() -> None:
    rates = known(1e-10, 1e12, 1e10)
    at = {rows: rates.linear_seconds("layers", "bf16", rows, 1.0) for rows in (1, 8, 36, 64, 512, 1024)}
    assert at[8] < at[36] < at[64]
    assert at[1024] == pytest.approx(2 * at[512])


def test_noise_that_hides_one_rate_gives_all_to_the_other() -> None:
    timed = steps(known(1e-10, 1e30, 1e10))
    found = rates_from(SHAPE, timed).attention[0]
    assert found.flops > 1e20
    assert found.read_bytes == pytest.approx(1e10, rel=0.01)


def test_reading_is_a_table_over_the_bytes_of_a_step() -> None:
    """What a processor's cache holds (here 23 MB) is read ten times as fast as memory; a step's time shows both."""
    fast, slow = (AttentionRate("bf16", 1e12, rate, at_bytes=at) for rate, at in ((1e11, 2.3e7), (1e10, 4e8)))
    linear = known(1e-10, 1e12, 1e10).linear
    truth = KernelRates(linear, (fast, slow))
    assert truth.attention_seconds("bf16", 0.0, 1.5e7) == pytest.approx(1.5e7 / 1e11)
    assert truth.attention_seconds("bf16", 0.0, 8e8) == pytest.approx(8e8 / 1e10)
    plain = [decode(rows, 16)._replace(num_samples=0) for rows in (1, 4, 64)]
    far = [decode(1, 1024), decode(1, 4096), decode(4, 4096), prefill(512, 3584)]
    timed = [time_of(truth, s._replace(num_samples=0)) for s in (*plain, prefill(512), *far)]
    found = rates_from(SHAPE, timed)
    assert len(found.attention) == 3
    for step in far[:3]:
        work = attention_work(SHAPE, step)
        assert found.attention_seconds("bf16", *work) == pytest.approx(truth.attention_seconds("bf16", *work), rel=0.05)


def test_steps_that_do_not_show_the_cost_of_context_are_refused() -> None:
    with pytest.raises(ConfigError, match="measure again"):
        rates_from(SHAPE, [time_of(known(1e-10, 1e12, 1e10), decode(rows, 16)) for rows in (1, 8)])


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=12))
def test_noise_never_makes_more_rows_cheaper(values: list[float]) -> None:
    plain = {rows: TimedStep(decode(rows, 16)._replace(num_samples=0), s, 0.0) for rows, s in enumerate(values, 1)}
    far = [time_of(known(1e-10, 1e12, 1e10), s) for s in (decode(1, 4096), prefill(512, 3584))]
    base = time_of(known(1e-10, 1e12, 1e10), prefill(512, samples=False))
    longer = [s._replace(features=s.features._replace(num_samples=0), seconds=s.seconds + 1000) for s in far]
    found = rates_from(SHAPE, [*plain.values(), base._replace(seconds=500.0), *longer])
    table = [r.seconds_per_param for r in found.linear if r.part == "layers"]
    assert table == sorted(table)


@given(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4))
def test_decodes_are_predicted_as_measured_whatever_the_noise_of_steps_without_logits(
    noise: list[float],
) -> None:
    truth = known(1e-10, 1e12, 1e10)
    timed = steps(truth)
    disturbed = dict(zip((1, 4, 8, 64), noise))
    near = [s.features.num_context <= 64 * 16 and not s.features.num_samples for s in timed]
    noisy = [
        s._replace(seconds=s.seconds * disturbed.get(s.features.num_tokens, 1.0)) if plain else s
        for s, plain in zip(timed, near, strict=True)
    ]
    found = rates_from(SHAPE, noisy)
    for rows in (1, 4, 8, 64):
        step = decode(rows, 16)
        layers = found.linear_seconds("layers", "bf16", rows, SHAPE.num_matrix_params)
        head = found.linear_seconds("head", "bf16", rows, SHAPE.hidden * SHAPE.vocab)
        attention = found.attention_seconds("bf16", *attention_work(SHAPE, step))
        # Attention's own rates come from the disturbed steps; near the start of a sequence it is a small part.
        assert layers + head + attention == pytest.approx(time_of(truth, step).seconds, rel=0.02)


def test_the_spread_is_that_of_the_nearest_row_count() -> None:
    rates = KernelRates((LinearRate("layers", "bf16", 1, 1e-10, 0.1), LinearRate("layers", "bf16", 64, 1e-9, 0.3)), ())
    assert (rates.spread("bf16", 2), rates.spread("bf16", 60)) == (0.1, 0.3)


def test_the_cost_model_states_the_spread_of_the_kernels() -> None:
    rates = rates_from(SHAPE, steps(known(1e-10, 1e12, 1e10)))
    device = replace(CUSTOM.override(Overrides(flops=1e12, bandwidth=2e10)), kernels=rates)
    seconds, spread = RooflineCostModel(Roofline(SHAPE, device)).predict(decode(8, 500))
    assert spread == pytest.approx(0.02 * seconds)
    assert RooflineCostModel(Roofline(SHAPE, replace(device, kernels=None))).predict(decode(8, 500)).spread == 0.0
