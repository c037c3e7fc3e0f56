"""The probe of an accelerator, run on the CPU in its place, and what is said where there is none."""

from __future__ import annotations

import pytest
import torch

from pellucid.core.errors import ConfigError
from pellucid.planner.profile import profile_from
from pellucid.runtime.measure_gpu import Cuda, measure_accelerator


class Processor:
    """The CPU as a device that is done when the call returns. It counts how often it was waited for."""

    name, title = "cpu", "a processor"

    def __init__(self) -> None:
        self.num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1

    def memory(self) -> tuple[int, int]:
        return 3 << 30, 4 << 30


def test_every_figure_of_a_profile_is_measured() -> None:
    device, seen = Processor(), []
    row = measure_accelerator(
        device,
        progress=seen.append,
        seconds_each=0.01,
        sizes=(1 << 16, 1 << 20),
        matrix=64,
        copy_bytes=1 << 20,
    )
    profile = profile_from({**row, "measured_at": "now", "versions": {}})
    assert (profile.machine, profile.accelerator) == ("a processor", "cpu")
    assert (profile.memory_bytes, profile.process_bytes) == (4 << 30, 1 << 30)
    assert [read.size_bytes for read in profile.read_bandwidth] == [1 << 16, 1 << 20]
    assert {"fp32", "bf16"} <= {peak.format for peak in profile.matrix_peak}
    rates = (*profile.read_bandwidth, *profile.matrix_peak, profile.host_copy, profile.disk_read)
    assert all(rate is not None and rate.rate > 0 for rate in rates)
    assert 0 < profile.overheads.step_seconds < 1
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert device.num_waits > 2 * len(seen)
    assert profile.device().flops["bf16"] > 0


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"--device cuda: PyTorch .* sees no GPU; .*--device cpu") as refusal:
        Cuda("cuda")
    assert "\n" not in str(refusal.value)


def test_another_kind_of_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="--device tpu: only cpu and cuda"):
        Cuda("tpu")
