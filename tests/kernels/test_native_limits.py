"""The probe: every rate that the level has is positive, and what cannot be measured is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pellucid.core.errors import ConfigError

pytest.importorskip("pellucid.kernels._native", reason="the native kernels are not built")

from pellucid.kernels.limits import measure


@pytest.mark.parametrize("isa", ["portable", "auto"])
def test_rates_are_positive_where_the_level_has_them(isa: str) -> None:
    limits = measure(isa=isa, threads=1, seconds=0.01)
    assert all(rate > 0 for rate in limits.read_bytes_per_second.values())
    assert limits.copy_bytes_per_second > 0
    assert limits.float32_ops_per_second > 0
    assert limits.barrier_seconds > 0
    has_tiles = limits.isa == "amx"
    assert (limits.int8_ops_per_second > 0) == has_tiles
    assert (limits.bfloat16_ops_per_second > 0) == has_tiles
    assert len(limits.lines()) == 3


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown instruction level"):
        measure(isa="sse9")
    with pytest.raises(ConfigError, match="may use"):
        measure(threads=100_000)


def test_measuring_needs_no_torch() -> None:
    code = (
        "import sys, pellucid.kernels.limits as m; m.measure(threads=1, seconds=0.001); print('torch' in sys.modules)"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    answer = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
    assert answer.stdout.strip() == "False"
