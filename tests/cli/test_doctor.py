"""`pellucid doctor`: each thing that is off gets its line, a sound machine gets none, and the exit status follows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.planner.test_hardware import PROFILE
from typer.testing import CliRunner, Result

from pellucid.cli import doctor as command
from pellucid.cli.diagnosis import Facts, findings
from pellucid.core.errors import ModelError
from pellucid.planner.profile import write_profile
from pellucid.runtime.machine import Machine

SOUND = Machine(
    processor="a processor",
    num_cores=4,
    num_processors=8,
    num_installed=8,
    levels=("portable", "avx2", "avx512", "amx"),
    cpu_quota=None,
    busy_processors=0.0,
    memory_bytes=16 << 30,
    available_bytes=12 << 30,
)
FACTS = Facts(
    machine=SOUND, isa="auto", threads=0, kv_bytes=2 << 30, weight_bytes=1e9, bandwidth=2e10, profile_bandwidth=2.2e10
)


def test_a_sound_machine_has_no_findings() -> None:
    assert findings(FACTS) == []


CHANGED_MACHINES: list[tuple[dict[str, Any], str]] = [
    ({"busy_processors": 1.5}, "keep 1.5 of 8 processors busy.*nice -n 15"),
    ({"cpu_quota": 1.5}, "quota is 1.5 processors and 4 threads.*--threads 1"),
    ({"num_installed": 64}, "bound to 8 of 64 processors"),
]
CHANGED_FACTS: list[tuple[dict[str, Any], str]] = [
    ({"missing": "no C++ compiler is installed"}, "no C[+][+] compiler is installed.*reinstall"),
    ({"obstacle": "they compute in bfloat16, not in float32"}, "--dtype bfloat16"),
    ({"obstacle": "a head dimension of 20 is no multiple of 32"}, "head dimension of 20.*another model"),
    ({"isa": "avx2"}, "--isa forces the level avx2, and this machine can run amx"),
    ({"isa": "reference", "environment": {"PELLUCID_ISA": "reference"}}, "PELLUCID_ISA forces plain PyTorch"),
    ({"threads": 6}, "6 threads share 4 cores.*--threads 4"),
    ({"environment": {"OMP_NUM_THREADS": "8"}}, "OMP_NUM_THREADS is set and has no effect"),
    ({"bandwidth": 1e10}, "reads at 10 GB/s, and at 22 GB/s"),
    ({"profile_bandwidth": None}, "pellucid measure"),
    ({"unwritable": ("/state",)}, "/state cannot be written"),
]


@pytest.mark.parametrize(("change", "text"), CHANGED_MACHINES)
def test_each_thing_about_the_machine_gets_one_line(change: dict[str, Any], text: str) -> None:
    check(replace(FACTS, machine=replace(SOUND, **change)), "warning", text)


@pytest.mark.parametrize(("change", "text"), CHANGED_FACTS)
def test_each_thing_about_the_installation_gets_one_line(change: dict[str, Any], text: str) -> None:
    check(replace(FACTS, **change), "warning", text)


def test_tiles_that_are_not_granted_and_openmp_that_spins() -> None:
    tileless = replace(SOUND, levels=("portable", "avx2", "avx512"))
    check(replace(FACTS, machine=tileless, flags=frozenset({"amx_tile", "amx_int8", "amx_bf16"})), "warning", "granted")
    assert findings(replace(FACTS, machine=tileless, flags=frozenset({"avx512f"}))) == []
    spinning = replace(FACTS, environment={"OMP_WAIT_POLICY": "ACTIVE"})
    assert findings(spinning) == []  # the native threads are no OpenMP's
    assert any("spin" in f.text for f in findings(replace(spinning, missing="no compiler")))


def test_what_makes_serving_impossible_is_an_error_and_comes_first() -> None:
    check(replace(FACTS, kv_bytes=32 << 30), "error", "exceed the memory of 17.18 GB.*--kv-memory")
    check(
        replace(FACTS, machine=replace(SOUND, available_bytes=2 << 30)),
        "error",
        "exceed the 2.147 GB that are free now.*--kv-memory 684MiB",
    )
    check(replace(FACTS, kv_bytes=1, weight_bytes=1e12), "error", "smaller model")
    both = findings(replace(FACTS, refusals=("no such model",), environment={"MKL_NUM_THREADS": "2"}))
    assert [f.severity for f in both] == ["error", "warning"]


def check(facts: Facts, severity: str, text: str) -> None:
    (found,) = findings(facts)
    assert found.severity == severity
    assert re.search(text, found.text), found.text
    assert "\n" not in found.text


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of the test's own; SOUND for the machine; PROFILE for what is measured of it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("PELLUCID_ISA", "PELLUCID_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(command, "look", lambda: SOUND)
    monkeypatch.setattr(command, "missing_for_native", lambda: None)
    monkeypatch.setattr(command, "_measure", lambda isa: PROFILE)
    path = tmp_path / "pellucid" / "machine.json"
    write_profile(PROFILE, path)
    return path


def run(line: str) -> Result:
    app = typer.Typer()
    app.command()(command.doctor)
    return CliRunner().invoke(app, line.split())


def choose(monkeypatch: pytest.MonkeyPatch, choice: command.Choice) -> None:
    monkeypatch.setattr(command, "_choose", lambda runtime, model: choice)


def test_the_report(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, command.Choice("native kernels (amx, weights auto)"))
    result = run("")
    assert result.exit_code == 0, result.exception
    assert "native kernels (amx, weights auto) (the best that fits)" in result.stdout
    assert "22 GB/s" in result.stdout
    assert str(machine) in result.stdout
    assert "nothing to change" in result.stdout
    row = json.loads(run("--json").stdout)
    assert row["can_serve"] is True
    assert row["findings"] == []
    assert row["kernels"]["kernels"] == "native kernels (amx, weights auto)"
    assert row["machine"]["levels"][-1] == "amx"
    assert row["measured"]["read_bandwidth"][0]["rate"] > 0
    assert row["paths"]["profile"] == str(machine)


def test_a_refusal_is_reported_with_everything_else_and_exits_with_2(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, command.Choice(None, refusal="this machine cannot run amx"))
    result = run("--threads 2")
    assert result.exit_code == 2
    assert "error: this machine cannot run amx" in result.stdout
    assert "a processor: 4 cores" in result.stdout


def test_a_model_that_cannot_be_read_is_a_finding(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: str) -> None:
        raise ModelError(f"there is no file {model}")

    choose(monkeypatch, command.Choice("reference"))
    monkeypatch.setattr(command, "resolve", refuse)
    result = run("nowhere.gguf --json")
    assert result.exit_code == 2
    assert {"severity": "error", "text": "there is no file nowhere.gguf"} in json.loads(result.stdout)["findings"]


def test_the_engine_is_asked_which_kernels_it_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = command.EngineSettings(isa="reference", threads=1)
    plain = command._choose(settings.runtime(), command._ANY_MODEL)
    assert plain.kernels is not None
    assert "native" not in plain.kernels
    refused = command._choose(command.EngineSettings(isa="sse9").runtime(), command._ANY_MODEL)
    assert refused.kernels is None
    assert refused.refusal is not None
    assert "sse9" in refused.refusal
