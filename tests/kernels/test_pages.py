"""Memory on huge pages: zero before it is written, and handing out its pages in the background changes nothing."""

from __future__ import annotations

import gc
import time

import pytest
import torch

from pellucid.kernels import pages
from pellucid.kernels.processors import native
from pellucid.runtime.memory import resident_bytes

needs_native = pytest.mark.skipif(native() is None, reason="the native kernels are not built")
BYTES = 64 << 20


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 1 << 20)])
def test_zeros_are_zeros(shape):
    made = pages.zeros(shape, torch.bfloat16)
    assert made.shape == shape
    assert made.dtype == torch.bfloat16
    assert made.is_contiguous()
    assert not made.any()


def test_pages_come_when_they_are_touched():
    before = resident_bytes()
    made = pages.zeros((BYTES,), torch.uint8)
    assert resident_bytes() - before < BYTES // 4
    made.fill_(1)
    assert resident_bytes() - before > BYTES // 2


@needs_native
def test_populating_keeps_what_is_written_meanwhile():
    before = resident_bytes()
    made = pages.zeros((4, BYTES // 4), torch.uint8)
    handle = pages.populate(made, 4)
    made[1, 5_000_000] = 7
    made[3, -1] = 9
    for _ in range(2000):
        if handle.done or resident_bytes() - before > BYTES * 3 // 4:
            break
        time.sleep(0.005)
    else:
        pytest.skip("this kernel hands out no pages on request (Linux 5.14 or newer does)")
    assert made.sum(dtype=torch.int64) == 16
    assert (made[1, 5_000_000], made[3, -1]) == (7, 9)


@needs_native
def test_populating_stops_with_its_handle():
    """Its thread must not outlive the memory: many stores come and go in one process."""
    for _ in range(20):
        made = pages.zeros((2, BYTES), torch.uint8)
        handle = pages.populate(made, 2)
        made[0, 0] = 1
        del made, handle
    gc.collect()
    assert pages.populate(pages.zeros((16,), torch.uint8), 1) is None
