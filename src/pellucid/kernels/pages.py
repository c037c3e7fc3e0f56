"""Tensors on huge pages, for memory that a step touches here and there: the KV cache, the logits.

With pages of 4 KiB nearly every block of the cache costs a walk of the page table beside its own cache misses:
attention of 32 decodes at 1,000 tokens took twice as long. Linux gives huge pages where
/sys/kernel/mm/transparent_hugepage/enabled says "madvise" or "always"; elsewhere these are ordinary tensors.
"""

from __future__ import annotations

import mmap
from math import prod
from typing import Any

import torch
from torch import Tensor

from pellucid.kernels.processors import native

HUGE_PAGE_BYTES = 2 << 20


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """`torch.zeros` on the CPU, from the start of a huge page on unless it is smaller than one. The system hands out
    each page, cleared, when it is first touched: two GiB at once took seconds on a virtual machine."""
    num_bytes = prod(shape) * dtype.itemsize
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or num_bytes < HUGE_PAGE_BYTES:
        return torch.zeros(shape, dtype=dtype)
    region = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(advice)  # before it is touched
    memory = torch.frombuffer(region, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE_BYTES
    return memory[start : start + num_bytes].view(dtype).view(shape)


def populate(arrays: Tensor, count: int) -> Any | None:
    """Have the pages of `zeros` handed out in the background: those at the beginning of each of the `count` equal parts
    first, on a thread of the lowest priority, which ends with the returned handle. Its `done` says when all are there;
    `slow_down` tells it that a step runs. None where there is nothing to do or nobody to do it: without native kernels
    a page comes when it is used."""
    num_bytes = arrays.numel() * arrays.element_size()
    module = native()
    if module is None or num_bytes < HUGE_PAGE_BYTES:
        return None
    return module.Populating(arrays, arrays.data_ptr(), count, num_bytes // count)
