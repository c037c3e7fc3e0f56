"""Which processors this process may compute on, and at which instruction levels. No torch."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from pellucid.core.errors import ConfigError

# Levels of the native kernels in order: each may use everything that those before it may (csrc/isa.h).
LEVELS = ("portable", "avx2", "avx512", "amx")


def physical_cores() -> list[int]:
    """One logical processor of every core that this process may use, in order. Two threads of one core would share its
    multipliers."""
    chosen: dict[str, int] = {}
    for processor in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
        try:
            core = siblings.read_text(encoding="ascii").strip()
        except OSError:
            core = str(processor)
        chosen.setdefault(core, processor)
    return list(chosen.values())


def native() -> ModuleType | None:
    """The compiled kernels, or None where Pellucid was installed without them."""
    try:
        return import_module("pellucid.kernels._native")
    except ImportError:
        return None


def require_native() -> Any:
    """The compiled kernels. Raises ConfigError where Pellucid was installed without them."""
    module = native()
    if module is None:
        raise ConfigError(
            "the native kernels are not installed: reinstall Pellucid where a C++20 compiler and the Python headers "
            "are, or choose isa reference"
        )
    return module


def open_team(isa: str, threads: int, spin_seconds: float, deterministic: bool) -> Any:
    """A native team of `threads` pinned threads (0: one per physical core) at level `isa`.

    Raises ConfigError where the kernels are not installed, for a level this machine cannot run, or for more threads
    than cores.
    """
    module, cores = require_native(), physical_cores()
    if not 0 <= threads <= len(cores):
        raise ConfigError(f"threads is {threads}, but this process may use {len(cores)} cores; lower it")
    try:
        return module.Cpu(isa, cores[: threads or len(cores)], spin_seconds, deterministic)
    except ValueError as error:
        raise ConfigError(f"isa: {error}") from None


def usable_levels() -> tuple[str, ...]:
    """The levels of the native kernels that this process may use, the best one last. Empty without the kernels."""
    module = native()
    return () if module is None else LEVELS[: LEVELS.index(str(module.best_isa())) + 1]
