"""The tree against a naive model that stores every prefix whole and finds the least recently used leaf by looking."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pellucid.core.events import BlockRemoved, BlockStored
from pellucid.core.radix_tree import RadixTree

KEYS = st.lists(st.sampled_from("ab"), min_size=1, max_size=5)
SPACES = st.sampled_from([b"", b"x"])
Path = tuple[bytes, tuple[str, ...]]


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[object] = []
        self.tree = RadixTree(self.events.append)
        self.blocks: dict[Path, int] = {}
        self.used: dict[Path, int] = {}
        self.pins: list[tuple[Path, object]] = []
        self.clock = 0
        self.next_block = 0

    def touch(self, space: bytes, keys: tuple[str, ...]) -> None:
        self.clock += 1
        for n in range(1, len(keys) + 1):
            self.used[space, keys[:n]] = self.clock

    def longest(self, space: bytes, keys: list[str]) -> tuple[str, ...]:
        n = 0
        while n < len(keys) and (space, tuple(keys[: n + 1])) in self.blocks:
            n += 1
        return tuple(keys[:n])

    @rule(space=SPACES, keys=KEYS)
    def match(self, space, keys):
        found = self.longest(space, keys)
        nodes = self.tree.match(space, keys)
        assert [node.block for node in nodes] == [self.blocks[space, found[:n]] for n in range(1, len(found) + 1)]
        self.touch(space, found)

    @rule(space=SPACES, keys=KEYS)
    def insert_and_pin(self, space, keys):
        """As a sequence does: match, hang the rest below, pin the end."""
        nodes = self.tree.match(space, keys)
        parent = nodes[-1] if nodes else self.tree.root(space)
        self.touch(space, tuple(keys[: len(nodes)]))
        for n in range(len(nodes), len(keys)):
            parent = self.tree.insert(parent, keys[n], self.next_block)
            self.blocks[space, tuple(keys[: n + 1])] = self.next_block
            self.clock += 1
            self.used[space, tuple(keys[: n + 1])] = self.clock
            self.next_block += 1
        self.tree.pin(parent)
        self.pins.append(((space, tuple(keys)), parent))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        (space, keys), node = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.tree.unpin(node)
        self.touch(space, keys)

    @rule()
    def evict(self):
        pinned = {path for path, _ in self.pins}
        leaves = [
            (space, keys)
            for space, keys in self.blocks
            if (space, keys) not in pinned
            and not any(s == space and len(k) == len(keys) + 1 and k[:-1] == keys for s, k in self.blocks)
        ]
        node = self.tree.next_to_evict()
        block = None if node is None else node.block
        if node is not None:
            assert self.tree.leave_device(node) == []
        if not leaves:
            assert block is None
            return
        victim = min(leaves, key=lambda path: self.used[path])
        assert block == self.blocks.pop(victim), "not the least recently used leaf"
        del self.used[victim]

    @invariant()
    def events_tell_the_same(self):
        stored = {e.digest for e in self.events if isinstance(e, BlockStored)}
        assert len({e.digest for e in self.events}) == len(stored)
        alive: dict[bytes, int] = {}
        for event in self.events:
            if isinstance(event, BlockStored):
                assert event.digest not in alive
                alive[event.digest] = event.block
            else:
                assert isinstance(event, BlockRemoved)
                assert alive.pop(event.digest) == event.block
        assert sorted(alive.values()) == sorted(self.blocks.values())
        assert {node.digest for node in self.tree.nodes()} == set(alive)
        assert self.tree.num_blocks == len(self.blocks)

    @invariant()
    def empty_namespaces_are_forgotten(self):
        live = {space for space, _ in self.blocks} | {path[0] for path, _ in self.pins}
        assert set(self.tree.roots()) == live


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestRadixTree = Machine.TestCase


def test_equal_blocks_behind_different_prefixes_have_different_digests():
    tree = RadixTree()
    a = tree.insert(tree.insert(tree.root(b""), "a", 0), "z", 1)
    b = tree.insert(tree.insert(tree.root(b""), "b", 2), "z", 3)
    c = tree.insert(tree.root(b"other"), "a", 4)
    assert len({a.digest, b.digest, c.digest, a.parent.digest}) == 4
    assert all(len(node.digest) == 16 for node in (a, b, c))


def test_a_place_in_the_tree_is_taken_once():
    tree = RadixTree()
    tree.insert(tree.root(b""), "a", 0)
    with pytest.raises(ValueError, match="taken by block 0"):
        tree.insert(tree.root(b""), "a", 1)


def test_the_heap_stays_in_proportion_to_the_tree():
    """A prefix that is hit a million times leaves a million stale entries unless somebody sweeps."""
    tree = RadixTree()
    node = tree.insert(tree.root(b""), "a", 0)
    for _ in range(1000):
        tree.pin(node)
        tree.unpin(node)
        tree.match(b"", ["a"])
    assert len(tree._heaps[""]) <= 64 + 2 * tree.num_blocks + 1
    assert tree.next_to_evict() is node
