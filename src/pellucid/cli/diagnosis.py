"""What is off on a machine that is to serve, each with the one thing to change. Pure: facts in, findings out.

An error makes serving impossible as asked; a warning makes it slower, or surprising. A machine on which nothing is off
has no findings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pellucid.planner.quantity import format_bytes, format_rate
from pellucid.runtime.machine import Machine

_BUSY = 0.3  # processors' worth of others' work that a step begins to feel
_SLOWER = 0.6  # of the profile's bandwidth
_GRANULE = 1 << 20


class Finding(NamedTuple):
    """One line: what was found and what to change."""

    severity: Literal["error", "warning"]
    text: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that a finding is made from.

    `isa`, `threads` and `kv_bytes` are what the settings ask for. `missing` says why there are no native kernels at
    all, `obstacle` why they do not serve, `refusals` why nothing does. `bandwidth` and `profile_bandwidth` are bytes/s
    now and when the machine was measured.
    """

    machine: Machine
    isa: str
    threads: int
    kv_bytes: int
    weight_bytes: float = 0.0
    missing: str | None = None
    obstacle: str | None = None
    refusals: tuple[str, ...] = ()
    bandwidth: float | None = None
    profile_bandwidth: float | None = None
    unwritable: tuple[str, ...] = ()
    flags: frozenset[str] = frozenset()
    environment: Mapping[str, str] = field(default_factory=dict)


def findings(facts: Facts) -> list[Finding]:
    """What is off, errors first."""
    found = [Finding("error", refusal) for refusal in facts.refusals]
    for check in (_memory, _kernels, _forced, _tiles, _threads, _others, _environment, _files):
        found += check(facts)
    return sorted(found, key=lambda finding: finding.severity != "error")


def _memory(facts: Facts) -> Iterator[Finding]:
    machine, needed = facts.machine, facts.weight_bytes + facts.kv_bytes
    free = machine.memory_bytes if machine.available_bytes is None else machine.available_bytes
    if needed <= free:
        return
    what = f"a KV pool of {format_bytes(facts.kv_bytes)}"
    what += f" and weights of {format_bytes(facts.weight_bytes)}" if facts.weight_bytes else ""
    room = int(0.8 * free - facts.weight_bytes) // _GRANULE
    remedy = f"pass --kv-memory {room}MiB" if room > 0 else "free memory, or take a smaller model"
    if needed > machine.memory_bytes:
        yield Finding("error", f"{what} exceed the memory of {format_bytes(machine.memory_bytes)}; {remedy}")
    else:
        yield Finding("error", f"{what} exceed the {format_bytes(free)} that are free now; {remedy}")


def _kernels(facts: Facts) -> Iterator[Finding]:
    if facts.isa == "reference" or facts.refusals:
        return
    if facts.missing is not None:
        yield Finding(
            "warning",
            f"plain PyTorch serves, several times slower: the native kernels are missing ({facts.missing}); mend that "
            "and reinstall Pellucid with pip's --force-reinstall --no-deps",
        )
    elif facts.obstacle is not None:
        remedy = "pass --dtype bfloat16" if "bfloat16" in facts.obstacle else "take another model or --block-size"
        yield Finding("warning", f"plain PyTorch serves instead of the native kernels: {facts.obstacle}; {remedy}")


def _forced(facts: Facts) -> Iterator[Finding]:
    levels = facts.machine.levels
    if facts.isa == "auto" or facts.refusals or not levels or facts.isa == levels[-1]:
        return
    by = "PELLUCID_ISA" if facts.environment.get("PELLUCID_ISA") == facts.isa else "--isa"
    kept = "plain PyTorch" if facts.isa == "reference" else f"the level {facts.isa}"
    yield Finding("warning", f"{by} forces {kept}, and this machine can run {levels[-1]}; leave it out")


def _tiles(facts: Facts) -> Iterator[Finding]:
    levels = facts.machine.levels
    if levels and levels[-1] != "amx" and {"amx_tile", "amx_int8", "amx_bf16"} <= facts.flags:
        yield Finding(
            "warning",
            "the processor has AMX tiles that this process is not granted; Linux 5.16 or newer grants them, and a "
            "container's seccomp profile must let arch_prctl pass",
        )


def _threads(facts: Facts) -> Iterator[Finding]:
    machine = facts.machine
    threads = facts.threads or machine.num_cores
    if threads > machine.num_cores and not facts.refusals:
        yield Finding(
            "warning",
            f"{threads} threads share {machine.num_cores} cores, and each step waits for the last of them; "
            f"pass --threads {machine.num_cores}",
        )
    if machine.cpu_quota is not None and machine.cpu_quota < min(threads, machine.num_cores):
        yield Finding(
            "warning",
            f"the container's quota is {machine.cpu_quota:g} processors and {threads} threads compute, so they are "
            f"stopped in the middle of steps; pass --threads {max(1, int(machine.cpu_quota))}, or raise the quota",
        )
    if machine.num_processors < machine.num_installed:
        yield Finding(
            "warning",
            f"this process is bound to {machine.num_processors} of {machine.num_installed} processors (taskset or "
            "cpuset); widen the binding to use the others",
        )


def _others(facts: Facts) -> Iterator[Finding]:
    machine = facts.machine
    if machine.busy_processors is not None and machine.busy_processors >= _BUSY:
        yield Finding(
            "warning",
            f"other processes keep {machine.busy_processors:.1f} of {machine.num_processors} processors busy, and "
            "figures and steps suffer; end them, or run them under nice -n 15",
        )
    if facts.bandwidth is None:
        return
    if facts.profile_bandwidth is None:
        yield Finding("warning", "the machine has not been measured, so no prediction knows it; run `pellucid measure`")
    elif facts.bandwidth < _SLOWER * facts.profile_bandwidth:
        yield Finding(
            "warning",
            f"memory reads at {format_rate(facts.bandwidth)}, and at {format_rate(facts.profile_bandwidth)} when the "
            "machine was measured; look for other load, or run `pellucid measure` again",
        )


def _environment(facts: Facts) -> Iterator[Finding]:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if name in facts.environment:
            yield Finding("warning", f"{name} is set and has no effect here; --threads (PELLUCID_THREADS) decides")
    plain = facts.isa == "reference" or facts.missing is not None or facts.obstacle is not None
    if plain and facts.environment.get("OMP_WAIT_POLICY", "").lower() == "active":
        yield Finding(
            "warning",
            "OMP_WAIT_POLICY=active makes PyTorch's threads spin while they wait, which loses whole time slices to "
            "other processes; unset it",
        )


def _files(facts: Facts) -> Iterator[Finding]:
    for path in facts.unwritable:
        yield Finding("warning", f"{path} cannot be written; make it writable, or set XDG_STATE_HOME or XDG_CACHE_HOME")
