"""The pool's states and counts, driven at random through every legal operation, transfers included."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pellucid.core.block_pool import BlockPool, BlockState

NUM_BLOCKS = 6


class Machine(RuleBasedStateMachine):
    """Keeps its own, naive account of each block: references, in the tree or not, transfers under way."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.refs = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.tree: set[int] = set()
        self.moving = dict.fromkeys(range(NUM_BLOCKS), 0)

    def state(self, block: int) -> BlockState:
        if self.moving[block]:
            return BlockState.IN_FLIGHT
        if self.refs[block]:
            return BlockState.ACTIVE
        return BlockState.CACHED if block in self.tree else BlockState.FREE

    def blocks(self, *states: BlockState) -> list[int]:
        return [block for block in range(NUM_BLOCKS) if self.state(block) in states]

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count):
        if count > len(self.blocks(BlockState.FREE)):
            with pytest.raises(ValueError, match="blocks free"):
                self.pool.allocate(count)
            return
        taken = self.pool.allocate(count)
        assert len(set(taken)) == count
        for block in taken:
            assert self.state(block) is BlockState.FREE
            self.refs[block] = 1

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def ref(self, block):
        if self.refs[block] == 0 and block not in self.tree:
            with pytest.raises(ValueError, match="nobody holds"):
                self.pool.ref(block)
            return
        self.pool.ref(block)
        self.refs[block] += 1

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def unref(self, block):
        if self.refs[block] == 0:
            with pytest.raises(ValueError, match="nobody holds"):
                self.pool.unref(block)
            return
        self.pool.unref(block)
        self.refs[block] -= 1

    @precondition(lambda self: any(self.refs[b] and b not in self.tree for b in self.refs))
    @rule(data=st.data())
    def cache(self, data):
        block = data.draw(st.sampled_from([b for b in self.refs if self.refs[b] and b not in self.tree]))
        self.pool.cache(block)
        self.tree.add(block)

    @precondition(lambda self: self.tree)
    @rule(data=st.data())
    def uncache(self, data):
        block = data.draw(st.sampled_from(sorted(self.tree)))
        self.pool.uncache(block)
        self.tree.remove(block)

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def begin_transfer(self, block):
        if self.state(block) is BlockState.FREE:
            with pytest.raises(ValueError, match="free block"):
                self.pool.begin_transfer(block)
            return
        self.pool.begin_transfer(block)
        self.moving[block] += 1

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def end_transfer(self, block):
        if self.moving[block] == 0:
            with pytest.raises(ValueError, match="never began"):
                self.pool.end_transfer(block)
            return
        self.pool.end_transfer(block)
        self.moving[block] -= 1

    @invariant()
    def conserved(self):
        pool = self.pool
        assert [pool.state(block) for block in range(NUM_BLOCKS)] == [self.state(b) for b in range(NUM_BLOCKS)]
        assert pool.num_free == len(self.blocks(BlockState.FREE))
        assert pool.num_active == len(self.blocks(BlockState.ACTIVE))
        assert pool.num_cached == len(self.blocks(BlockState.CACHED))
        assert pool.num_in_flight == len(self.blocks(BlockState.IN_FLIGHT))


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBlockPool = Machine.TestCase
