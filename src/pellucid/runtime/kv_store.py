"""The paged KV cache: for each layer two tensors, keys and values, each `[blocks, G, block_size, D]`; in int8 they are
D + 4 wide, because the scale of each token and head stands in the block as well.

Why this order of dimensions. A layer reads a sequence block by block and head by head, so the tokens of one block and
one KV head lie together: `block_size x D` elements in a row, 2 KiB in bfloat16 at the usual 16 x 64. That is one memory
copy when plain PyTorch gathers a context, one run of cache lines for a native kernel, and a unit whose inside such a
kernel may arrange as its instructions want (key tiles, token pairs) without anybody else noticing. Layers come first:
the layer at work streams through its own memory, and moving a block between tiers is 2 x layers copies of
`G x block_size x D`, long enough for full speed.

A step reads blocks wherever they lie, so on the CPU the cache stands on huge pages (`kernels/pages.py`).

The host tier is a second store of the same shape in main memory; blocks are exchanged between the two.

Invariants: memory is reserved once and is zero until written, so that a masked slot holds a finite number; nobody but
`write_kv`, `copy_block` and `exchange` writes to it. On the CPU the system hands out its pages as they are first
touched, or in the background once `populate` was called: no start waits for gigabytes to be cleared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pellucid.kernels import pages
from pellucid.kernels.cpu import CpuKernels
from pellucid.models.config import CacheSpec


class KVStore:
    """`num_blocks` blocks of `block_size` token slots on a device. `layers` holds a (keys, values) pair per layer.
    `team` are the native kernels, where there are any."""

    def __init__(
        self,
        spec: CacheSpec,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        team: CpuKernels | None = None,
    ) -> None:
        self.num_blocks, self.block_size, self._team = num_blocks, block_size, team
        self._groups: list[Tensor] = []
        self._populating: list[Any] = []
        self.layers: list[tuple[Tensor, Tensor]] = []
        for group in spec.groups:
            shape = (group.num_layers, 2, num_blocks, group.num_kv_heads, block_size, group.width)
            memory = (
                pages.zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
            )
            self._groups.append(memory)
            self.layers.extend((memory[i, 0], memory[i, 1]) for i in range(group.num_layers))

    def populate(self) -> None:
        """Have the memory handed out in the background, the lowest blocks first. On the CPU only; elsewhere it is."""
        self._populating = [
            pages.populate(memory, memory.shape[0] * memory.shape[1])
            for memory in self._groups
            if memory.device.type == "cpu"
        ]

    def begin_step(self) -> None:
        """A step is about to run: what `populate` still has to do is done slowly for the next moment."""
        for pages_to_come in self._populating:
            if pages_to_come is not None:
                pages_to_come.slow_down()

    @property
    def num_bytes(self) -> int:
        """Bytes reserved, over all layers."""
        return sum(memory.numel() * memory.element_size() for memory in self._groups)

    def exchange(self, other: KVStore, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copy blocks of `other`, a store of the same shape, into this one: pairs of (its block, ours)."""
        ids = np.array(pairs, dtype=np.int64)
        for ours, theirs in zip(self._groups, other._groups, strict=True):
            if self._team is not None:
                # Every block has a piece in each layer's keys and in its values.
                planes = np.arange(ours.shape[0] * ours.shape[1])[:, None, None]
                pieces = planes * (theirs.shape[2], ours.shape[2]) + ids
                self._team.copy_blocks(theirs.flatten(0, 2), ours.flatten(0, 2), pieces.reshape(-1, 2))
            else:
                sources, targets = torch.from_numpy(ids.T)
                ours[:, :, targets.to(ours.device)] = theirs[:, :, sources.to(theirs.device)].to(ours.device)

    def copy_block(self, source: int, target: int) -> None:
        """Copy every layer's keys and values of one block onto another."""
        for memory in self._groups:
            memory[:, :, target].copy_(memory[:, :, source])
