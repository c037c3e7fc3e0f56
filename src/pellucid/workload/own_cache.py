"""Pellucid's own block manager, run offline over a trace: the hit rate that this engine's cache policy would reach.

The very code that serves (`core.kv_manager`, `core.radix_tree`) takes one request after the other: match, take the
blocks, publish them, give them back. No two requests overlap, so what this leaves out is only the memory that running
requests hold back from the cache. Partly filled blocks are never published.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pellucid.core.kv_manager import KVManager
from pellucid.core.request import Request
from pellucid.core.sequence import Sequence
from pellucid.workload.prefix import Accesses

_TOKENS_PER_BLOCK = 2
"""The smallest block of which a prompt can end inside: the manager never reuses a prompt's last token."""


def own_mask(accesses: Accesses, num_blocks: int) -> NDArray[np.bool_]:
    """Which uses hit in Pellucid's cache of `num_blocks`. A prompt larger than the cache leaves it as it was."""
    mask = np.zeros(len(accesses.ids), bool)
    if num_blocks < 1 or not len(accesses.ids):
        return mask
    manager = KVManager(num_blocks, _TOKENS_PER_BLOCK)
    full = np.flatnonzero(accesses.full)
    bounds = np.flatnonzero(np.diff(accesses.request[full], prepend=-1, append=-1))
    ids = accesses.ids
    for number, (low, high) in enumerate(zip(bounds.tolist(), bounds[1:].tolist())):
        uses = full[low:high][::-1]
        mask[uses[: _serve(manager, number, tuple(ids[uses].tolist()))]] = True
    return mask


def _serve(manager: KVManager, number: int, keys: tuple[int, ...]) -> int:
    """Pass one prompt through the manager; returns how many of its blocks were cached."""
    num_tokens = len(keys) * _TOKENS_PER_BLOCK + 1
    request = Request(id=str(number), prompt=range(num_tokens), block_keys=keys)
    sequence = Sequence(number, request, _TOKENS_PER_BLOCK, num_tokens + 1)
    match = manager.match(sequence)
    num_hits = match.num_blocks
    manager.attach(sequence, match)
    if manager.reserve(sequence, num_tokens - 1):
        sequence.num_computed = num_tokens - 1
        manager.publish(sequence)
    manager.release(sequence)
    return num_hits
