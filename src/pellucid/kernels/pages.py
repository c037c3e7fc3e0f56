"""Tensors on huge pages, for memory that a step touches here and there: the KV cache, the logits.

With pages of 4 KiB nearly every block of the cache costs a walk of the page table beside its own cache misses:
attention of 32 decodes at 1,000 tokens took twice as long. Linux gives huge pages where
/sys/kernel/mm/transparent_hugepage/enabled says "madvise" or "always"; elsewhere these are ordinary tensors.
"""

from __future__ import annotations

import mmap
from math import prod

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """`torch.zeros` on the CPU, from the start of a huge page on and resident, unless it is smaller than one."""
    num_bytes = prod(shape) * dtype.itemsize
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or num_bytes < HUGE_PAGE_BYTES:
        return torch.zeros(shape, dtype=dtype)
    region = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(advice)  # before it is touched
    memory = torch.frombuffer(region, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE_BYTES
    return memory[start : start + num_bytes].view(dtype).view(shape).zero_()
