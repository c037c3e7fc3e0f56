"""The probe of an accelerator: the figures of `measure.py`, taken through PyTorch on one of its devices.

Work on a device is only queued by the call that asks for it, so everything is timed from one `synchronize` to the next,
over enough repeats to hide the calls. All that differs between kinds of devices stands behind `Accelerator`, so the
same code is tested on the CPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from pellucid.core.errors import ConfigError
from pellucid.kernels.processors import physical_cores
from pellucid.runtime.measure import measure_disk

Row = dict[str, Any]

READ_SIZES = (2 << 20, 64 << 20, 2 << 30)  # within a second-level cache, about its size, and beyond all caches
_FORMATS = ("fp32", "bf16", "fp16", "int8")
_COPY_BYTES = 256 << 20
_MATRIX = 8192
_LOOKS = 5


class Accelerator(Protocol):
    """A device that PyTorch computes on. `name` is PyTorch's ("cuda:0"), `title` the maker's."""

    name: str
    title: str

    def synchronize(self) -> None:
        """Wait until everything queued is done."""
        ...

    def memory(self) -> tuple[int, int]:
        """(bytes of it that are free, all of its bytes), and what PyTorch keeps counts as free."""
        ...


class Cuda:
    """An NVIDIA (or, through ROCm, an AMD) device. Raises ConfigError where PyTorch cannot use it."""

    def __init__(self, name: str) -> None:
        import torch

        if not name.startswith("cuda"):
            raise ConfigError(f"--device {name}: only cpu and cuda (cuda:1, ...) can be measured")
        if not torch.cuda.is_available():
            raise ConfigError(
                f"--device {name}: PyTorch {torch.__version__} sees no GPU; install a build of it for yours, check the "
                f"driver, or measure the processor with --device cpu"
            )
        try:
            self._device = torch.device(name)
            self.title: str = torch.cuda.get_device_properties(self._device).name
        except (RuntimeError, ValueError, AssertionError) as error:
            raise ConfigError(f"--device {name}: {str(error).splitlines()[0]}") from None
        self.name = name

    def synchronize(self) -> None:
        """Wait until everything queued is done."""
        import torch

        torch.cuda.synchronize(self._device)

    def memory(self) -> tuple[int, int]:
        """(free, all) bytes, with what PyTorch keeps counted as free."""
        import torch

        free, total = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device), total


def measure_accelerator(
    device: Accelerator,
    *,
    progress: Callable[[float], None] = lambda share: None,
    seconds_each: float = 1.5,
    sizes: tuple[int, ...] = READ_SIZES,
    matrix: int = _MATRIX,
    copy_bytes: int = _COPY_BYTES,
) -> Row:
    """The measurements of one device, under the names of the machine profile. `progress` receives the share done."""
    free, total = device.memory()
    row: Row = {
        "machine": device.title,
        "accelerator": device.name,
        "num_threads": len(physical_cores()),
        "memory_bytes": total,
        "process_bytes": total - free,
        "read_bandwidth": [],
        "matrix_peak": [],
    }
    steps = [
        *(partial(_read, device, row, size, seconds_each) for size in sizes),
        *(partial(_multiply, device, row, name, matrix, seconds_each) for name in _FORMATS),
        partial(_copy, device, row, copy_bytes, seconds_each),
        partial(_call, device, row, seconds_each),
        partial(measure_disk, row),
    ]
    for index, step in enumerate(steps):
        step()
        progress((index + 1) / len(steps))
    return row


def _read(device: Accelerator, row: Row, size: int, seconds: float) -> None:
    import torch

    data = torch.ones(size // 4, dtype=torch.float32, device=device.name)
    rate, spread = _rate(device, data.sum, size, seconds)
    found = {"threads": 1, "size_bytes": size, "rate": rate, "spread": spread, "implementation": "torch sum"}
    row["read_bandwidth"].append(found)


def _multiply(device: Accelerator, row: Row, name: str, matrix: int, seconds: float) -> None:
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}[name]
    square = torch.ones(matrix, matrix, dtype=dtype, device=device.name)
    product = torch._int_mm if name == "int8" else torch.matmul
    try:
        rate, spread = _rate(device, lambda: product(square, square), 2 * matrix**3, seconds)
    except RuntimeError:
        return  # a format that this device does not multiply has no rate
    row["matrix_peak"].append(
        {"format": name, "threads": 1, "rate": rate, "spread": spread, "implementation": "torch matmul"}
    )


def _copy(device: Accelerator, row: Row, num_bytes: int, seconds: float) -> None:
    """From host memory that cannot be swapped, as transfers between tiers go."""
    import torch

    source = torch.ones(num_bytes, dtype=torch.uint8)
    source = source.pin_memory() if device.name != "cpu" else source
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device.name)
    rate, spread = _rate(device, lambda: target.copy_(source, non_blocking=True), num_bytes, seconds)
    row["host_copy"] = {"rate": rate, "spread": spread, "implementation": "torch copy_"}


def _call(device: Accelerator, row: Row, seconds: float) -> None:
    """What a step cannot be shorter than: one call that computes nothing worth mention, waited for."""
    import torch

    one = torch.zeros(1, device=device.name)
    rate, _ = _rate(device, lambda: one.add_(1), 1, seconds / 4, most=1)
    row["overheads"] = {"step_seconds": 1.0 / rate}


def _rate(
    device: Accelerator, work: Callable[[], Any], amount: float, seconds: float, *, most: int = 1 << 20
) -> tuple[float, float]:
    """Amount per second over several looks, and their spread. A look repeats `work` for its share of `seconds`, `most`
    times at most, and ends when the device is done."""

    def look(repeats: int) -> float:
        device.synchronize()
        began = perf_counter()
        for _ in range(repeats):
            work()
        device.synchronize()
        return perf_counter() - began

    look(1)
    repeats = max(1, min(most, int(seconds / _LOOKS / max(look(1), 1e-7))))
    rates = [repeats * amount / look(repeats) for _ in range(_LOOKS)]
    middle = statistics.median(rates)
    return middle, statistics.pstdev(rates) / middle
