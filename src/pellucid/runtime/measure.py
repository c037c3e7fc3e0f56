"""The machine probe: how fast this machine reads, multiplies, copies and loads, whatever model runs on it.

Every figure is the median of repeats over a fixed time, with their standard deviation over it as `spread`. The result
is plain values under the names of the machine profile; storing and reading them is not the probe's business. Products
are timed through PyTorch on square matrices, which is the fastest thing a user of PyTorch gets to see.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from pellucid.runtime.config import physical_cores
from pellucid.runtime.memory import resident_bytes

READ_SIZES = (8 << 20, 64 << 20, 512 << 20)
_COPY_BYTES = 256 << 20
_DISK_BYTES = 256 << 20
_MATRIX = 2048
_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure_machine(
    *, progress: Callable[[float], None] = lambda share: None, seconds_each: float = 1.5
) -> dict[str, Any]:
    """All measurements of this machine; `progress` receives the share done. Leaves PyTorch's thread count as it was.

    `seconds_each` is spent on each figure, so the whole takes about 15 times that.
    """
    before = torch.get_num_threads()
    cores = physical_cores()
    threads = sorted({1, cores})
    process_bytes = resident_bytes()
    steps: list[Callable[[dict[str, Any]], None]] = []
    for count in threads:
        steps += [_reading(count, size, seconds_each) for size in READ_SIZES]
    steps += [_multiplying(name, cores, seconds_each) for name in (*_FORMATS, "int8")]
    steps += [_copying(seconds_each), _loading]
    row: dict[str, Any] = {
        "machine": f"{_processor()}, {cores} cores",
        "num_threads": cores,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "process_bytes": process_bytes,
        "read_bandwidth": [],
        "matrix_peak": [],
    }
    try:
        for index, step in enumerate(steps):
            step(row)
            progress((index + 1) / len(steps))
    finally:
        torch.set_num_threads(before)
    return row


def _reading(threads: int, size: int, seconds: float) -> Callable[[dict[str, Any]], None]:
    def step(row: dict[str, Any]) -> None:
        torch.set_num_threads(threads)
        data = torch.ones(size // 4, dtype=torch.float32)
        rate, spread = _rate(lambda: data.sum(), size, seconds)
        row["read_bandwidth"].append({"threads": threads, "size_bytes": size, "rate": rate, "spread": spread})

    return step


def _multiplying(name: str, threads: int, seconds: float) -> Callable[[dict[str, Any]], None]:
    def step(row: dict[str, Any]) -> None:
        torch.set_num_threads(threads)
        if name == "int8":
            left = torch.ones(_MATRIX, _MATRIX, dtype=torch.int8)
            product: Callable[[], Any] = lambda: torch._int_mm(left, left)  # noqa: E731
        else:
            square = torch.ones(_MATRIX, _MATRIX, dtype=_FORMATS[name])
            product = lambda: square @ square  # noqa: E731
        with torch.inference_mode():
            rate, spread = _rate(product, 2 * _MATRIX**3, seconds)
        peak = {"format": name, "threads": threads, "rate": rate, "spread": spread, "implementation": "torch"}
        row["matrix_peak"].append(peak)

    return step


def _copying(seconds: float) -> Callable[[dict[str, Any]], None]:
    def step(row: dict[str, Any]) -> None:
        source = np.ones(_COPY_BYTES, dtype=np.uint8)
        target = np.empty_like(source)
        rate, spread = _rate(lambda: np.copyto(target, source), _COPY_BYTES, seconds)
        row["host_copy"] = {"rate": rate, "spread": spread}

    return step


def _loading(row: dict[str, Any]) -> None:
    """Reads a file that the page cache was told to forget; what the disk's own cache keeps cannot be helped."""
    rates = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe"
        path.write_bytes(os.urandom(1 << 20) * (_DISK_BYTES >> 20))
        for _ in range(3):
            with path.open("rb", buffering=0) as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                began = perf_counter()
                while file.read(8 << 20):
                    pass
                rates.append(_DISK_BYTES / (perf_counter() - began))
    middle = statistics.median(rates)
    row["disk_read"] = {"rate": middle, "spread": statistics.pstdev(rates) / middle}


def _rate(work: Callable[[], Any], amount: float, seconds: float) -> tuple[float, float]:
    """Median rate of repeating `work` for `seconds` (three times at least, and once before), and its spread."""
    work()
    rates: list[float] = []
    end = perf_counter() + seconds
    while len(rates) < 3 or perf_counter() < end:
        began = perf_counter()
        work()
        rates.append(amount / (perf_counter() - began))
    middle = statistics.median(rates)
    return middle, statistics.pstdev(rates) / middle


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
