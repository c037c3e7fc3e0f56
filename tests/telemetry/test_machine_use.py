"""FLOPs and bytes of steps, beside the machine's limits."""

from __future__ import annotations

import pytest
from tests.telemetry.steps import summary

from pellucid.core.cost import StepFeatures
from pellucid.telemetry.machine_use import LAG_SECONDS, WINDOW_SECONDS, MachineLimits, MachineUse, StepWork

WORK = StepWork(
    flops_per_token=100.0,
    flops_per_attended=1.0,
    flops_per_sample=10.0,
    bytes_per_step=1000.0,
    bytes_per_sampling_step=200.0,
    bytes_per_token=3.0,
    bytes_per_context=2.0,
    bytes_per_sample=4.0,
)
DECODE = StepFeatures(2, 20, 20, 2, 2)  # 240 FLOPs, 1,254 bytes
PREFILL = StepFeatures(64, 2080, 64, 1, 0)  # 8,480 FLOPs, 1,320 bytes


def test_a_step_is_linear_in_its_features():
    assert (WORK.flops(DECODE), WORK.bytes(DECODE)) == (240.0, 1254.0)
    assert (WORK.flops(PREFILL), WORK.bytes(PREFILL)) == (8480.0, 1320.0)
    assert WORK.bytes(PREFILL._replace(copied_bytes=50)) == 1420.0, "a copied byte is read and written"


def test_time_splits_into_what_bound_a_step_and_the_rest():
    use = MachineUse(WORK, MachineLimits(flops=1e6, bandwidth=1e6))
    use.add(summary(0, features=DECODE))  # 12 ms, of them 1.254 for memory
    use.add(summary(1, features=PREFILL))  # 12 ms, of them 8.48 for arithmetic
    assert use.seconds == pytest.approx({"memory": 0.001254, "compute": 0.00848, "other": 0.024 - 0.009734})
    assert (use.flops, use.bytes) == (8720.0, 2574.0)
    assert use.binding(13.0) == "other"
    assert use.rates(13.0) == pytest.approx((872.0, 257.4))


def test_a_limit_measured_too_low_makes_no_time():
    use = MachineUse(WORK, MachineLimits(flops=1.0, bandwidth=1.0))
    use.add(summary(0, features=DECODE))
    assert use.seconds == pytest.approx({"memory": 0.012, "compute": 0.0, "other": 0.0})
    assert use.binding(12.0) == "memory"


def test_the_window_forgets():
    use = MachineUse(WORK, MachineLimits(flops=1e6, bandwidth=1e6))
    use.add(summary(0, features=PREFILL))
    ended = 10.0 + 0.011 + LAG_SECONDS
    assert use.rates(ended - 0.001) == (0.0, 0.0), "what is newer may not be all there is"
    assert use.rates(ended + WINDOW_SECONDS - 0.001)[0] > 0
    assert use.rates(ended + WINDOW_SECONDS + 0.001) == (0.0, 0.0)
    assert use.binding(ended + WINDOW_SECONDS + 0.001) == "idle"
    assert use.flops == 8480.0, "the sums do not"


def test_without_limits_nothing_is_said_to_bind():
    use = MachineUse(WORK)
    use.add(summary(0, features=DECODE))
    assert use.seconds == pytest.approx({"memory": 0.0, "compute": 0.0, "other": 0.012})
