"""A machine, measured: the file that `pellucid measure` writes and everything else reads (`machine.json`).

Rates are bytes/s or FLOP/s, `spread` is the standard deviation of the repeats over their median. The file says which
machine, when, and with which versions; a file of another schema is refused. How the numbers were measured is the
probe's business; here they are only data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pellucid.core.errors import ConfigError
from pellucid.planner.hardware import Device, Overheads
from pellucid.planner.kernel_rates import AttentionRate, KernelRates, LinearRate

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Rate:
    """A measured rate per second, its relative spread, and what was measured with."""

    rate: float
    spread: float = 0.0
    implementation: str = ""


@dataclass(frozen=True, slots=True)
class ReadBandwidth:
    """Read bandwidth over a buffer of `size_bytes` with `threads` threads, bytes/s, and what read it."""

    threads: int
    size_bytes: int
    rate: float
    spread: float = 0.0
    implementation: str = ""


@dataclass(frozen=True, slots=True)
class MatrixPeak:
    """The fastest matrix product found in a number format, FLOP/s, and what computed it."""

    format: str
    threads: int
    rate: float
    spread: float = 0.0
    implementation: str = ""


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """One machine's measurements. `accelerator` is the GPU (by PyTorch's name) whose memory and rates these are, None
    for the processor. `linear` and `attention` are the engine's own kernels (empty where it has not been
    measured yet); `process_bytes` is what a serving process holds before weights and cache; `barrier_seconds` is how
    long the native threads take to wait for each other (None without them)."""

    machine: str
    measured_at: str
    versions: Mapping[str, str]
    num_threads: int
    memory_bytes: int
    read_bandwidth: tuple[ReadBandwidth, ...]
    matrix_peak: tuple[MatrixPeak, ...]
    host_copy: Rate | None = None
    disk_read: Rate | None = None
    process_bytes: int | None = None
    barrier_seconds: float | None = None
    overheads: Overheads = field(default_factory=Overheads)
    linear: tuple[LinearRate, ...] = ()
    attention: tuple[AttentionRate, ...] = ()
    accelerator: str | None = None

    @property
    def bandwidth(self) -> ReadBandwidth:
        """Main memory, as weights see it: the largest buffer, at the best number of threads for it."""
        largest = max(r.size_bytes for r in self.read_bandwidth)
        return max((r for r in self.read_bandwidth if r.size_bytes == largest), key=lambda r: r.rate)

    def device(self) -> Device:
        """This machine as a Device called "this-machine"."""
        peaks: dict[str, float] = {}
        for peak in self.matrix_peak:
            peaks[peak.format] = max(peak.rate, peaks.get(peak.format, 0.0))
        return Device(
            name="this-machine",
            title=self.machine,
            flops=peaks,
            bandwidth=self.bandwidth.rate,
            memory=self.memory_bytes,
            host_link=self.host_copy.rate if self.host_copy else None,
            runtime_memory=self.process_bytes,
            overheads=self.overheads,
            kernels=KernelRates(self.linear, self.attention) if self.linear else None,
            sources=(f"measured {self.measured_at}",),
        )


def default_path(environment: Mapping[str, str]) -> Path:
    """`machine.json` in the state directory."""
    return state_directory(environment) / "machine.json"


def state_directory(environment: Mapping[str, str]) -> Path:
    """What outlives a process is kept here: $XDG_STATE_HOME/pellucid, by default ~/.local/state/pellucid."""
    base = environment.get("XDG_STATE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
    return root / "pellucid"


def profile_from(row: Mapping[str, Any]) -> MachineProfile:
    """A profile from plain values under the names of the file. Raises ConfigError for missing or foreign ones."""
    try:
        return _from_row(row)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"not a machine profile: {error!r}") from None


def write_profile(profile: MachineProfile, path: Path) -> None:
    """Write the profile whole or not at all. Raises ConfigError where the directory cannot be written."""
    text = json.dumps({"pellucid_profile": SCHEMA, **asdict(profile)}, indent=1) + "\n"
    partial = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None


def read_profile(path: Path) -> MachineProfile:
    """The profile at `path`. Raises ConfigError where there is none, or it is not one of ours."""
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"this machine has not been measured yet ({path} is missing); run `pellucid measure`"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error}); run `pellucid measure` again") from None
    if not isinstance(row, dict) or row.get("pellucid_profile") != SCHEMA:
        raise ConfigError(f"{path}: not a machine profile of version {SCHEMA}; run `pellucid measure` again")
    try:
        return profile_from(row)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; run `pellucid measure` again") from None


def _from_row(row: Mapping[str, Any]) -> MachineProfile:
    def rate(key: str) -> Rate | None:
        return Rate(**row[key]) if row.get(key) else None

    profile = MachineProfile(
        machine=row["machine"],
        measured_at=row["measured_at"],
        versions=row["versions"],
        num_threads=row["num_threads"],
        memory_bytes=row["memory_bytes"],
        read_bandwidth=tuple(ReadBandwidth(**r) for r in row["read_bandwidth"]),
        matrix_peak=tuple(MatrixPeak(**r) for r in row["matrix_peak"]),
        host_copy=rate("host_copy"),
        disk_read=rate("disk_read"),
        process_bytes=row.get("process_bytes"),
        barrier_seconds=row.get("barrier_seconds"),
        overheads=Overheads(**row.get("overheads", {})),
        linear=tuple(LinearRate(**r) for r in row.get("linear", ())),
        attention=tuple(AttentionRate(**r) for r in row.get("attention", ())),
        accelerator=row.get("accelerator"),
    )
    if not profile.read_bandwidth:
        raise ValueError("no read bandwidth")
    return profile
