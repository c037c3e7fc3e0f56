"""The probe's values have the shape of a machine profile. How large they are is the machine's business."""

from __future__ import annotations

import pytest
import torch

from pellucid.core.errors import ConfigError
from pellucid.kernels.processors import usable_levels
from pellucid.planner.profile import profile_from
from pellucid.runtime import measure


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "READ_SIZES", (1 << 20, 2 << 20))
    monkeypatch.setattr(measure, "_MATRIX", 64)
    monkeypatch.setattr(measure, "_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(measure, "_DISK_BYTES", 1 << 20)


@pytest.mark.parametrize("isa", ["auto", "reference"])
def test_the_probe_yields_a_profile(isa: str) -> None:
    before = torch.get_num_threads()
    shares: list[float] = []
    row = measure.measure_machine(progress=shares.append, seconds_each=0.0, isa=isa)
    profile = profile_from({**row, "measured_at": "now", "versions": {}})
    assert torch.get_num_threads() == before
    assert shares[-1] == 1.0
    assert shares == sorted(shares)
    assert {p.format for p in profile.matrix_peak} == {"fp32", "bf16", "int8"}
    assert all(r.rate > 0 for r in profile.read_bandwidth)
    assert profile.bandwidth.size_bytes == 2 << 20
    assert profile.host_copy is not None
    assert profile.disk_read is not None
    assert profile.process_bytes
    assert profile.device().memory == profile.memory_bytes > 0


def test_nothing_is_measured_twice_and_every_row_says_with_what() -> None:
    row = measure.measure_machine(seconds_each=0.0)
    reads = [(r["threads"], r["size_bytes"]) for r in row["read_bandwidth"]]
    assert len(reads) == len(set(reads))
    assert len({p["format"] for p in row["matrix_peak"]}) == len(row["matrix_peak"])
    measured_with = {r["implementation"] for r in (*row["read_bandwidth"], *row["matrix_peak"], row["host_copy"])}
    level = usable_levels()[-1:]
    native = {f"native {name}" for name in level}
    assert native <= measured_with <= native | {"torch"} | (set() if level else {"numpy"})


def test_plain_pytorch_takes_the_place_of_native_loops() -> None:
    row = measure.measure_machine(seconds_each=0.0, isa="reference", whole=False)
    assert {r["implementation"] for r in (*row["read_bandwidth"], *row["matrix_peak"])} == {"torch"}
    assert row["host_copy"]["implementation"] == "numpy"
    assert "barrier_seconds" not in row
    assert "disk_read" not in row


def test_a_level_that_cannot_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"native kernels|unknown instruction level"):
        measure.measure_machine(seconds_each=0.0, isa="sse9", whole=False)
