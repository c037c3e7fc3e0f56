"""The native probe: every rate that the level has is positive, and what cannot be measured is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pellucid.core.errors import ConfigError

pytest.importorskip("pellucid.kernels._native", reason="the native kernels are not built")

from pellucid.kernels.limits import NativeLimits
from pellucid.kernels.processors import LEVELS, usable_levels


@pytest.mark.parametrize("isa", usable_levels())
def test_rates_are_positive_where_the_level_has_them(isa: str) -> None:
    limits = NativeLimits(isa=isa, threads=1)
    assert (limits.isa, limits.num_threads) == (isa, 1)
    assert limits.read(1 << 20, seconds=0.01) > 0
    assert limits.copy(1 << 20, seconds=0.01) > 0
    assert limits.barrier_seconds(seconds=0.01) > 0
    assert (limits.multiply("fp32", seconds=0.01) or 0) > 0
    for tiles in ("bf16", "int8"):
        assert (limits.multiply(tiles, seconds=0.01) is not None) == (isa == "amx")


def test_levels_are_a_beginning_of_the_list_and_auto_is_their_last() -> None:
    assert usable_levels() == LEVELS[: len(usable_levels())]
    assert NativeLimits(threads=1).isa == usable_levels()[-1]


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown instruction level"):
        NativeLimits(isa="sse9")
    with pytest.raises(ConfigError, match="may use"):
        NativeLimits(threads=100_000)


def test_measuring_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from pellucid.runtime.measure import measure_machine\n"
        "row = measure_machine(seconds_each=0.0, whole=False, isa='amx' if 'amx' in sys.argv else 'auto')\n"
        "print('torch' in sys.modules, len(row['read_bandwidth']))"
    )
    if usable_levels()[-1] != "amx":
        pytest.skip("without tiles, PyTorch measures bfloat16 and int8")
    environment = {"PYTHONPATH": ":".join(sys.path)}
    answer = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
    assert answer.stdout.split() == ["False", "2"]
