"""How much memory the KV cache may take and what is resident: arithmetic first, then what the system reports. No torch.

bytes per block = block_size x bytes per token (`CacheSpec`)      blocks = floor(KV memory / bytes per block)
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from pellucid.core.errors import ConfigError
from pellucid.models.config import CacheSpec


def blocks_that_fit(kv_bytes: int, spec: CacheSpec, block_size: int) -> int:
    """Blocks that `kv_bytes` hold. Raises ConfigError where not a single one fits."""
    block_bytes = spec.bytes_per_token * block_size
    num_blocks = kv_bytes // block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"{kv_bytes} bytes of KV memory do not hold one block ({block_size} tokens x {spec.bytes_per_token} bytes "
            f"= {block_bytes}); raise --kv-memory or lower --block-size"
        )
    return num_blocks


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes of an executor. `resident_bytes` is the whole process, as the system counts it."""

    weight_bytes: int
    kv_bytes: int
    block_bytes: int
    resident_bytes: int


def resident_bytes() -> int:
    """This process's resident memory (Linux: /proc/self/statm, second field, in pages)."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def return_freed_memory() -> None:
    """Give freed memory back to the system: what loading borrowed would otherwise count as resident for good.

    Does nothing where the C library has no `malloc_trim` (it is glibc's)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
