"""The device table and users' own; the machine profile; and that unknown stays unknown."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from pellucid.core.errors import ConfigError
from pellucid.planner.hardware import Overrides, device_by_name, devices, devices_in
from pellucid.planner.kernel_rates import AttentionRate, LinearRate
from pellucid.planner.profile import (
    MachineProfile,
    MatrixPeak,
    Rate,
    ReadBandwidth,
    default_path,
    profile_from,
    read_profile,
    write_profile,
)


def test_every_device_names_its_source_and_no_dense_rate_is_a_sparse_one() -> None:
    for device in devices().values():
        assert device.sources, device.name
        for name, rate in device.sparse.items():
            assert rate > device.flops[name], f"{device.name} {name}"


def test_an_unknown_rate_is_refused_and_not_guessed() -> None:
    with pytest.raises(ConfigError, match="a100 has no known fp8 rate"):
        device_by_name("a100").peak("fp8")
    with pytest.raises(ConfigError, match="rtx5090 has no known bf16 rate"):
        device_by_name("rtx5090").peak("bf16")
    with pytest.raises(ConfigError, match="no known memory size"):
        device_by_name("xeon-8480").need_memory()


def test_16_bit_formats_stand_in_for_each_other_and_8_bit_ones_do_not() -> None:
    table = devices()["xeon-8480"]
    assert table.peak("fp16") == table.peak("bf16")
    with pytest.raises(ConfigError):
        table.peak("int8")


def test_names_in_any_spelling_and_the_nearest_of_a_wrong_one() -> None:
    assert device_by_name("H100").name == device_by_name("h100-sxm").name == "h100"
    with pytest.raises(ConfigError, match=r"nearest: h100"):
        device_by_name("h101")


def test_overrides_replace_and_leave_the_rest() -> None:
    base = device_by_name("h100")
    changed = base.override(Overrides(bandwidth=1e12, link=5e10))
    assert (changed.bandwidth, changed.link, changed.host_link) == (1e12, 5e10, 5e10)
    assert (changed.flops, changed.memory) == (base.flops, base.memory)
    assert set(base.override(Overrides(flops=1.0)).flops.values()) == {1.0}


def test_a_file_of_the_users_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[mine]\ntitle = "Mine"\nbandwidth = 1e12\nflops = { bf16 = 2e14 }\nmemory = 8_000_000_000\n')
    device = devices_in(file)["mine"]
    assert (device.title, device.ridge("bf16"), device.memory) == ("Mine", 200, 8_000_000_000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[mine", "not a TOML file"),
        ("mine = 1", "mine is not a table"),
        ("[mine]\nspeed = 3", "unknown field 'speed'"),
        ("[mine]\nbandwidth = -3", "bandwidth is -3"),
        ('[mine]\nflops = { bf16 = "fast" }', "flops.bf16 is 'fast'"),
    ],
)
def test_a_file_that_is_wrong_gets_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        devices_in(file)


PROFILE = MachineProfile(
    machine="a machine",
    measured_at="2026-01-01T00:00:00+00:00",
    versions={"pellucid": "0"},
    num_threads=2,
    memory_bytes=16 * 10**9,
    read_bandwidth=(
        ReadBandwidth(1, 1 << 28, 11e9, 0.02),
        ReadBandwidth(2, 1 << 28, 22e9, 0.03),
        ReadBandwidth(2, 1 << 23, 41e9, 0.05),
    ),
    matrix_peak=(MatrixPeak("bf16", 2, 2e12, 0.2, "amx"), MatrixPeak("bf16", 1, 1e12, 0.1, "amx")),
    host_copy=Rate(9e9, 0.01),
    process_bytes=400_000_000,
    linear=(LinearRate("layers", "bf16", 1, 1e-10), LinearRate("head", "bf16", 1, 2e-10)),
    attention=(AttentionRate("bf16", 1e12, 1e10),),
)


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "state" / "machine.json"
    write_profile(PROFILE, path)
    assert read_profile(path) == PROFILE
    assert [p.name for p in path.parent.iterdir()] == ["machine.json"]


def test_a_profile_becomes_this_machine() -> None:
    device = PROFILE.device()
    assert device.name == "this-machine"
    assert device.bandwidth == 22e9  # the largest buffer, not the fastest cache
    assert device.peak("bf16") == 2e12
    assert device.runtime_memory == 400_000_000
    assert device.kernels is not None
    assert device.kernels.covers("bf16", "bf16", "bf16")
    assert not device.kernels.covers("q4_1", "bf16", "bf16")
    assert device.override(Overrides(bandwidth=1e9)).kernels is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has not been measured yet"),
        ("{", "cannot be read as JSON"),
        ("[]", "not a machine profile of version 1"),
        (json.dumps({"pellucid_profile": 99}), "not a machine profile of version 1"),
        (json.dumps({"pellucid_profile": 1}), "KeyError"),
        (json.dumps({"pellucid_profile": 1, **asdict(PROFILE), "read_bandwidth": []}), "no read bandwidth"),
    ],
)
def test_a_profile_that_is_wrong_says_to_measure(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "machine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_profile(path)
    assert "pellucid measure" in str(error.value)


def test_plain_values_become_a_profile() -> None:
    assert profile_from(json.loads(json.dumps(asdict(PROFILE)))) == PROFILE
    with pytest.raises(ConfigError, match="not a machine profile"):
        profile_from({})


def test_the_profile_lives_in_the_state_directory() -> None:
    assert default_path({"XDG_STATE_HOME": "/s"}) == Path("/s/pellucid/machine.json")
    assert default_path({"XDG_STATE_HOME": "relative"}) == default_path({})
    assert default_path({}) == Path.home() / ".local" / "state" / "pellucid" / "machine.json"
