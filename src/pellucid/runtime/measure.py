"""The machine probe: how fast this machine reads, multiplies, copies and loads, whatever model runs on it.

One list of figures, each taken once: by the native loops where they are installed, by PyTorch (or numpy) otherwise, and
the row says by which. A figure is the median of several looks over a fixed time, with their standard deviation over it
as `spread`. The result is plain values under the names of the machine profile; storing and reading them is not the
probe's business. PyTorch is imported only for figures that nothing else can give.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from pellucid.core.errors import ConfigError
from pellucid.kernels.limits import NativeLimits
from pellucid.kernels.processors import physical_cores
from pellucid.runtime.machine import memory_bytes, processor_name
from pellucid.runtime.memory import resident_bytes

# Within a second-level cache, within a large third level, and beyond all caches.
READ_SIZES = (2 << 20, 64 << 20, 512 << 20)
_NUMBER_FORMATS = ("fp32", "bf16", "int8")
_COPY_BYTES = 256 << 20
_DISK_BYTES = 256 << 20
_MATRIX = 2048
_LOOKS = 5

Row = dict[str, Any]
Measurement = Callable[[Row], None]


def measure_machine(
    *,
    progress: Callable[[float], None] = lambda share: None,
    seconds_each: float = 1.5,
    isa: str = "auto",
    whole: bool = True,
) -> Row:
    """The measurements of this machine; `progress` receives the share done. Takes about 11 times `seconds_each`.

    `whole` is all that a profile holds; without it, the rates of memory and arithmetic on all cores, and neither disk
    nor PyTorch is touched where the native loops are. `isa` is their level; "reference" does without them. Raises
    ConfigError for a level that this machine cannot run.
    """
    cores = len(physical_cores())
    row: Row = {
        "machine": f"{processor_name()}, {cores} cores",
        "num_threads": cores,
        "memory_bytes": memory_bytes(),
        "process_bytes": None,
        "read_bandwidth": [],
        "matrix_peak": [],
    }
    steps: list[Measurement] = [_process] if whole else []
    for threads in sorted({1, cores} if whole else {cores}):
        native = None if isa == "reference" else _native(isa, threads)
        sizes = READ_SIZES if whole else (READ_SIZES[0], READ_SIZES[-1])
        steps += [_reading(native, threads, size, seconds_each) for size in sizes]
    steps += [_multiplying(native, name, cores, seconds_each) for name in _NUMBER_FORMATS]
    steps += [_copying(native, seconds_each)]
    steps += [_waiting(native, seconds_each)] if native is not None else []
    steps += [measure_disk] if whole else []
    for index, step in enumerate(steps):
        step(row)
        progress((index + 1) / len(steps))
    return row


def _native(isa: str, threads: int) -> NativeLimits | None:
    """The native loops, or None where they were not built. A level asked for by name must exist."""
    try:
        return NativeLimits(isa=isa, threads=threads)
    except ConfigError:
        if isa != "auto":
            raise
        return None


def _reading(native: NativeLimits | None, threads: int, size: int, seconds: float) -> Measurement:
    def step(row: Row) -> None:
        if native is not None:
            rate, spread = _looks(lambda share: native.read(size, seconds=share), seconds)
        else:
            rate, spread = _torch_reading(threads, size, seconds)
        found = {"threads": threads, "size_bytes": size, "rate": rate, "spread": spread}
        row["read_bandwidth"].append({**found, "implementation": _name(native)})

    return step


def _multiplying(native: NativeLimits | None, name: str, threads: int, seconds: float) -> Measurement:
    def step(row: Row) -> None:
        if native is not None and native.multiply(name, seconds=0.0) is not None:
            rate, spread = _looks(lambda share: native.multiply(name, seconds=share) or 0.0, seconds)
            implementation = _name(native)
        else:
            rate, spread = _torch_product(name, threads, seconds)
            implementation = "torch"
        found = {"format": name, "threads": threads, "rate": rate, "spread": spread}
        row["matrix_peak"].append({**found, "implementation": implementation})

    return step


def _copying(native: NativeLimits | None, seconds: float) -> Measurement:
    def step(row: Row) -> None:
        if native is not None:
            rate, spread = _looks(lambda share: native.copy(_COPY_BYTES, seconds=share), seconds)
        else:
            source = np.ones(_COPY_BYTES, dtype=np.uint8)
            target = np.empty_like(source)
            rate, spread = _runs(lambda: np.copyto(target, source), _COPY_BYTES, seconds)
        row["host_copy"] = {"rate": rate, "spread": spread, "implementation": _name(native, "numpy")}

    return step


def _waiting(native: NativeLimits, seconds: float) -> Measurement:
    def step(row: Row) -> None:
        row["barrier_seconds"] = _looks(lambda share: native.barrier_seconds(seconds=share), seconds / 4)[0]

    return step


def _process(row: Row) -> None:
    """What a serving process holds before weights and cache: the interpreter, and PyTorch with what it brings."""
    import torch  # noqa: F401

    row["process_bytes"] = resident_bytes()


def measure_disk(row: Row) -> None:
    """Add the rate of reading a file that the page cache was told to forget; what the disk's own cache keeps cannot be
    helped."""
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


def _torch_reading(threads: int, size: int, seconds: float) -> tuple[float, float]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        data = torch.ones(size // 4, dtype=torch.float32)
        return _runs(lambda: data.sum(), size, seconds)
    finally:
        torch.set_num_threads(before)


def _torch_product(name: str, threads: int, seconds: float) -> tuple[float, float]:
    """FLOP/s of square matrices: the fastest thing a user of PyTorch gets to see."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}[name]
    square = torch.ones(_MATRIX, _MATRIX, dtype=dtype)
    product = torch._int_mm if name == "int8" else torch.matmul
    try:
        with torch.inference_mode():
            return _runs(lambda: product(square, square), 2 * _MATRIX**3, seconds)
    finally:
        torch.set_num_threads(before)


def _name(native: NativeLimits | None, otherwise: str = "torch") -> str:
    return otherwise if native is None else f"native {native.isa}"


def _looks(rate: Callable[[float], float], seconds: float) -> tuple[float, float]:
    """Several looks through `rate`, which takes the seconds to loop for; half of the time goes into making buffers."""
    return _median(lambda: rate(seconds / 2 / _LOOKS), seconds, most=_LOOKS)


def _runs(work: Callable[[], Any], amount: float, seconds: float) -> tuple[float, float]:
    """The rate of `work`, which does `amount` of something, over repeats; the first run is not counted."""
    work()

    def once() -> float:
        began = perf_counter()
        work()
        return amount / (perf_counter() - began)

    return _median(once, seconds)


def _median(look: Callable[[], float], seconds: float, *, most: int = sys.maxsize) -> tuple[float, float]:
    """Median of what `look` returns, and the spread over it: `most` times, but no more after `seconds`."""
    seen: list[float] = []
    end = perf_counter() + seconds
    while not seen or (len(seen) < most and perf_counter() < end):
        seen.append(look())
    middle = statistics.median(seen)
    return middle, statistics.pstdev(seen) / middle
