"""The machine's limits, measured: what every efficiency of the kernels is a share of. No torch.

Rates are the best seen in a short time, because on a shared machine a mean measures the neighbours; even so they move
by tens of per cent within seconds, so a figure belongs beside a probe taken in the same run.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pellucid.core.errors import ConfigError
from pellucid.kernels.processors import physical_cores

# Working sets: within the second-level cache, within a large third level, and beyond caches.
READ_SIZES_BYTES = (1 << 20, 16 << 20, 128 << 20, 512 << 20)


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Rates of `num_threads` threads at instruction level `isa`.

    `read_bytes_per_second` is by size of the working set in bytes. Operation rates count a multiply and an add as two;
    `int8` and `bfloat16` are the tiles' and 0 without them.
    """

    isa: str
    num_threads: int
    read_bytes_per_second: dict[int, float]
    copy_bytes_per_second: float
    float32_ops_per_second: float
    bfloat16_ops_per_second: float
    int8_ops_per_second: float
    barrier_seconds: float

    @property
    def memory_bytes_per_second(self) -> float:
        """Reading rate of the largest working set measured."""
        return self.read_bytes_per_second[max(self.read_bytes_per_second)]

    def lines(self) -> list[str]:
        """The figures for people, one per line."""
        reads = ", ".join(f"{size >> 20} MiB {rate / 1e9:.1f}" for size, rate in self.read_bytes_per_second.items())
        return [
            f"kernels: {self.isa}, {self.num_threads} threads, a barrier takes {self.barrier_seconds * 1e6:.2f} us",
            f"reading, GB/s by working set: {reads}; copying {self.copy_bytes_per_second / 1e9:.1f} GB/s",
            f"arithmetic, Top/s: float32 {self.float32_ops_per_second / 1e12:.2f}, "
            f"bfloat16 tiles {self.bfloat16_ops_per_second / 1e12:.2f}, "
            f"int8 tiles {self.int8_ops_per_second / 1e12:.2f}",
        ]


def measure(*, isa: str = "auto", threads: int = 0, seconds: float = 0.15) -> MachineLimits:
    """Measure for about `seconds` per rate, on all physical cores or `threads` of them.

    Raises ConfigError where the native kernels are not installed, for an unknown level, or for too many threads.
    """
    cores = physical_cores()
    if not 0 <= threads <= len(cores):
        raise ConfigError(f"threads is {threads}, but this process may use {len(cores)} cores")
    try:
        native: Any = import_module("pellucid.kernels._native")
        cpu = native.Cpu(isa, cores[: threads or len(cores)], 0.0005, False)
    except ImportError:
        raise ConfigError("measuring needs the native kernels; reinstall where a C++20 compiler is") from None
    except ValueError as error:
        raise ConfigError(f"isa: {error}") from None

    def rate(what: str, num_bytes: int = 0) -> float:
        return float(cpu.probe(what, num_bytes, seconds))

    return MachineLimits(
        isa=str(cpu.isa),
        num_threads=int(cpu.num_threads),
        read_bytes_per_second={size: rate("read", size) for size in READ_SIZES_BYTES},
        copy_bytes_per_second=rate("copy", READ_SIZES_BYTES[2]),
        float32_ops_per_second=rate("f32"),
        bfloat16_ops_per_second=rate("bf16"),
        int8_ops_per_second=rate("int8"),
        barrier_seconds=1.0 / rate("barrier"),
    )
