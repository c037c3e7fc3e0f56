"""Which processors this process may compute on, and at which instruction levels. No torch."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from types import ModuleType

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


def usable_levels() -> tuple[str, ...]:
    """The levels of the native kernels that this process may use, the best one last. Empty without the kernels."""
    module = native()
    return () if module is None else LEVELS[: LEVELS.index(str(module.best_isa())) + 1]
