"""What this machine is and who else is using it: what the system says, before anything is measured. No torch.

Nothing here is worth a failure: a system that does not tell leaves a figure empty (None, or ""), and no guess takes its
place.
"""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

from pellucid.kernels.processors import native, physical_cores, usable_levels

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process may use: `num_cores` physical cores, `num_processors` hardware threads of `num_installed`, and
    the native kernels' instruction `levels`, the best one last (none where they are missing).

    `cpu_quota` is a container's limit in processors, None without one. `busy_processors` of them worked for others in a
    moment's look. `available_bytes` can be had without swapping, within a container's limit.
    """

    processor: str
    num_cores: int
    num_processors: int
    num_installed: int
    levels: tuple[str, ...]
    cpu_quota: float | None
    busy_processors: float | None
    memory_bytes: int
    available_bytes: int | None


def look(*, seconds: float = 0.5) -> Machine:
    """This machine now. Takes `seconds`, to see what other processes do meanwhile."""
    return Machine(
        processor=processor_name(),
        num_cores=len(physical_cores()),
        num_processors=len(os.sched_getaffinity(0)),
        num_installed=os.cpu_count() or 0,
        levels=usable_levels(),
        cpu_quota=_cpu_quota(),
        busy_processors=_busy_processors(seconds),
        memory_bytes=memory_bytes(),
        available_bytes=available_bytes(),
    )


def missing_for_native() -> str | None:
    """What kept the native kernels from being built or loaded, in a phrase; None where they are here."""
    if native() is not None:
        return None
    here = Path(__file__).parents[1] / "kernels"
    built = sorted(path.name for path in here.glob("_native*.so"))
    if built:
        return f"{built[0]} cannot be loaded by this Python ({platform.python_version()}, {platform.machine()})"
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        return "no C++ compiler is installed (g++ 12 or newer)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return f"the headers of Python {platform.python_version()} are not installed (python3-dev)"
    return "they were not built on installation, and a compiler and the Python headers are here now"


def processor_name() -> str:
    """As the processor calls itself, or at least its family."""
    names = (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def memory_bytes() -> int:
    """All memory of the machine, or a container's limit where that is less."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_number("memory.max")
    return installed if limit is None else min(installed, limit)


def available_bytes() -> int | None:
    """Bytes that a new process could use without swapping (MemAvailable), within a container's limit."""
    lines = (line for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:"))
    line = next(lines, None)
    if line is None:
        return None
    limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
    free = int(line.split()[1]) * 1024
    return free if limit is None or used is None else max(0, min(free, limit - used))


def _busy_processors(seconds: float) -> float | None:
    """Processors' worth of work done on those that this process may use, while this process sleeps."""
    before = _processor_times()
    time.sleep(seconds)
    after = _processor_times()
    shares = []
    for name, (idle, total) in after.items():
        was_idle, was_total = before.get(name, (0, 0))
        if total > was_total:
            shares.append(1.0 - (idle - was_idle) / (total - was_total))
    return sum(shares) if shares else None


def _processor_times() -> dict[str, tuple[int, int]]:
    """Processor -> (idle, all) ticks since the machine started. A hypervisor's other guests ("steal") count as work."""
    mine = {f"cpu{index}" for index in os.sched_getaffinity(0)}
    found = {}
    for line in _lines("/proc/stat"):
        name, *ticks = line.split()
        if name in mine:
            counts = [int(tick) for tick in ticks[:8]]  # the guest columns after them are counted in user time already
            found[name] = (counts[3] + counts[4], sum(counts))
    return found


def _cpu_quota() -> float | None:
    """Processors that a container's quota is worth (cgroup v2: "quota period" in cpu.max)."""
    words = " ".join(_lines(_CGROUP / "cpu.max")).split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None


def _cgroup_number(name: str) -> int | None:
    text = " ".join(_lines(_CGROUP / name)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
