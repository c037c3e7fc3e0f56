"""A pool of equal blocks: who holds each one, and in which of four states it is.

    FREE ──allocate──> ACTIVE ──last unref──> CACHED (its tokens are in the prefix tree)  ──uncache──> FREE
                          │                      │
                          │                      └──ref──> ACTIVE
                          └──last unref──> FREE  (its tokens are in no tree)

    any of them ──begin_transfer──> IN_FLIGHT ──end_transfer──> what it would have been

Invariants: every block is in exactly one state; the four counts add up to `num_blocks`; a block's reference count is
the number of block tables that hold it. The pool knows nothing of tokens, sequences or devices: a second tier is a
second pool.
"""

from __future__ import annotations

from enum import Enum


class BlockState(Enum):
    """The state of one block; see the module's drawing."""

    FREE = "free"
    ACTIVE = "active"
    CACHED = "cached"
    IN_FLIGHT = "in_flight"


class BlockPool:
    """`num_blocks` blocks, numbered from 0. All operations are O(1) per block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self._in_tree = [False] * num_blocks
        self._transfers = [0] * num_blocks
        # A stack, lowest id on top: a block freed last is warm in the processor's caches and is reused first.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_cached = 0
        self._num_in_flight = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    @property
    def num_active(self) -> int:
        return self.num_blocks - len(self._free) - self._num_cached - self._num_in_flight

    def state(self, block: int) -> BlockState:
        """The state of `block`."""
        if self._transfers[block]:
            return BlockState.IN_FLIGHT
        if self.refs[block]:
            return BlockState.ACTIVE
        return BlockState.CACHED if self._in_tree[block] else BlockState.FREE

    def in_tree(self, block: int) -> bool:
        """Whether the prefix tree holds `block`, whoever else does."""
        return self._in_tree[block]

    def all_in_tree(self) -> bytes:
        """`in_tree` of every block, a byte each; for those who look at thousands at once."""
        return bytes(self._in_tree)

    def all_in_flight(self) -> bytes:
        """Whether something moves a block, of every block, a byte each."""
        return bytes(map(bool, self._transfers))

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference. The caller has checked `num_free`."""
        if count > len(self._free):
            raise ValueError(f"allocate({count}) with {len(self._free)} blocks free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self.refs[block] = 1
        return taken

    def ref(self, block: int) -> None:
        """One more block table holds `block`, which is ACTIVE or CACHED."""
        if self.refs[block] == 0:
            if not self._in_tree[block]:
                raise ValueError(f"ref of block {block}, which nobody holds")
            if not self._transfers[block]:
                self._num_cached -= 1
        self.refs[block] += 1

    def unref(self, block: int) -> None:
        """One block table less. The last one leaves the block CACHED or FREE."""
        if self.refs[block] <= 0:
            raise ValueError(f"unref of block {block}, which nobody holds")
        self.refs[block] -= 1
        if self.refs[block] == 0 and not self._transfers[block]:
            self._settle(block)

    def cache(self, block: int) -> None:
        """The prefix tree took `block`, which somebody holds."""
        if self.refs[block] == 0 or self._in_tree[block]:
            raise ValueError(f"cache of block {block} in state {self.state(block).value}")
        self._in_tree[block] = True

    def uncache(self, block: int) -> None:
        """The prefix tree let go of `block`; if nobody else holds it, it is free."""
        if not self._in_tree[block]:
            raise ValueError(f"uncache of block {block}, which is in no tree")
        self._in_tree[block] = False
        if self.refs[block] == 0 and not self._transfers[block]:
            self._num_cached -= 1
            self._free.append(block)

    def begin_transfer(self, block: int) -> None:
        """A copy from or to `block` is under way: it is neither reusable nor evictable until `end_transfer`."""
        if self.state(block) is BlockState.FREE:
            raise ValueError(f"transfer of free block {block}")
        if self._transfers[block] == 0:
            self._num_in_flight += 1
            if self.refs[block] == 0:
                self._num_cached -= 1
        self._transfers[block] += 1

    def end_transfer(self, block: int) -> None:
        """A copy begun with `begin_transfer` is done."""
        if self._transfers[block] <= 0:
            raise ValueError(f"end of a transfer of block {block} that never began")
        self._transfers[block] -= 1
        if self._transfers[block] == 0:
            self._num_in_flight -= 1
            if self.refs[block] == 0:
                self._settle(block)

    def _settle(self, block: int) -> None:
        """Nobody holds `block` and nothing moves it: CACHED or FREE."""
        if self._in_tree[block]:
            self._num_cached += 1
        else:
            self._free.append(block)
