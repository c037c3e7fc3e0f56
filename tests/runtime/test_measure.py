"""The probe's values have the shape of a machine profile. How large they are is the machine's business."""

from __future__ import annotations

import pytest
import torch

from pellucid.planner.profile import profile_from
from pellucid.runtime import measure


@pytest.mark.parametrize("seconds", [0.0])
def test_the_probe_yields_a_profile(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "READ_SIZES", (1 << 20, 2 << 20))
    monkeypatch.setattr(measure, "_MATRIX", 64)
    monkeypatch.setattr(measure, "_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(measure, "_DISK_BYTES", 1 << 20)
    before = torch.get_num_threads()
    shares: list[float] = []
    row = measure.measure_machine(progress=shares.append, seconds_each=seconds)
    profile = profile_from({**row, "measured_at": "now", "versions": {}})
    assert torch.get_num_threads() == before
    assert shares[-1] == 1.0
    assert shares == sorted(shares)
    assert {p.format for p in profile.matrix_peak} == {"fp32", "bf16", "int8"}
    assert all(r.rate > 0 for r in profile.read_bandwidth)
    assert profile.bandwidth.size_bytes == 2 << 20
    assert profile.host_copy is not None
    assert profile.disk_read is not None
    assert profile.device().memory == profile.memory_bytes > 0
