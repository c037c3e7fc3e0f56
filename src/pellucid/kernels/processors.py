"""Which processors this process may compute on: one per physical core. No torch."""

from __future__ import annotations

import os
from pathlib import Path


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
