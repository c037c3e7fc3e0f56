"""What `/metrics` counts for a step is what the planner says it costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.build import step_work
from pellucid.core.cost import StepFeatures
from pellucid.planner.hardware import Device
from pellucid.planner.named_shapes import shape_by_name
from pellucid.planner.roofline import Roofline

DEVICE = Device("d", "d", flops={"bf16": 1e12, "fp32": 1e12}, bandwidth=1e10)
LLAMA = shape_by_name("llama-3.1-8b")
FEATURES = st.builds(
    StepFeatures,
    num_tokens=st.integers(1, 4096),
    num_attended=st.integers(1, 10**8),
    num_context=st.integers(4096, 10**6),
    num_sequences=st.integers(1, 64),
    num_samples=st.integers(0, 64),
    copied_bytes=st.just(0),
)


@given(FEATURES, st.sampled_from([LLAMA, LLAMA.stored_as("q4_1"), LLAMA.cached_as("fp32")]))
def test_it_is_the_planners_cost(features, shape):
    cost, work = Roofline(shape, DEVICE).cost(features), step_work(shape)
    assert work.flops(features) == pytest.approx(cost.flops)
    assert work.bytes(features) == pytest.approx(cost.bytes)
