"""What memory holds, seen at once: the blocks of a pool, and the heaviest branches of the prefix tree.

Reading changes nothing. It is made for thousands of blocks between two steps: what can be is done for all of them in
one operation on bytes, and the walk of the tree visits each node once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import NamedTuple

from pellucid.core.block_pool import BlockPool
from pellucid.core.radix_tree import NOWHERE, Node, RadixTree
from pellucid.core.sequence import Sequence

MOST_BRANCHES = 12
HEAD_TOKENS = 24  # of a branch, where texts may be shown

# A block's flags. None of them: the block is free.
HELD, IN_TREE, SHARED, IN_FLIGHT = 1, 2, 4, 8
_FLAGS_OF_REFS = bytes([0, HELD] + [HELD | SHARED] * 254)


class PoolView(NamedTuple):
    """A pool, a byte a block: `flags` (HELD, IN_TREE, SHARED: by several requests, IN_FLIGHT), and `owners`: 1 + the
    index in `EngineView.tenants` of a tenant whose request holds the block or computed it, or 0. The counts are of its
    states."""

    flags: bytes
    owners: bytes
    num_free: int
    num_active: int
    num_cached: int
    num_in_flight: int


class Branch(NamedTuple):
    """A stretch of the prefix tree without a fork. It starts `start` blocks below its root and has `num_blocks` blocks,
    with everything below it `num_below`, in either tier; `num_hits` requests started from it or from below, `num_users`
    hold it now. `parent` is an index among the branches or -1; `head` holds its first token ids where texts may be
    shown."""

    parent: int
    start: int
    num_blocks: int
    num_below: int
    num_hits: int
    num_users: int
    head: tuple[int, ...]


def read_pool(pool: BlockPool, owners: bytes) -> PoolView:
    """The pool's blocks, all flagged at once: as the bytes of one large number."""
    refs = bytes(pool.refs) if max(pool.refs) < 256 else bytes(map(min, pool.refs, repeat(255)))
    flags = _number(refs.translate(_FLAGS_OF_REFS)) | _number(pool.all_in_tree()) * IN_TREE
    if pool.num_in_flight:
        flags |= _number(pool.all_in_flight()) * IN_FLIGHT
    return PoolView(
        flags.to_bytes(pool.num_blocks, "little"),
        owners,
        pool.num_free,
        pool.num_active,
        pool.num_cached,
        pool.num_in_flight,
    )


def _number(values: bytes) -> int:
    return int.from_bytes(values, "little")


def held_by(owners: bytearray, running: Iterable[Sequence], index_of: Mapping[str, int]) -> bytes:
    """`owners` of the device's blocks, with the blocks that running sequences hold given to their tenants."""
    for sequence in running:
        owner = index_of.get(sequence.request.tenant, 0)
        for block in sequence.block_table:
            owners[block] = owner
    return bytes(owners)


class Stretch:
    """A branch while the tree is walked."""

    __slots__ = ("first", "num_below", "num_blocks", "num_users", "parent", "start")

    def __init__(self, first: Node, parent: int, start: int) -> None:
        self.first = first
        self.parent = parent
        self.start = start
        self.num_blocks = 0
        self.num_below = 0
        self.num_users = 0


class TreeWalk:
    """One walk of the whole tree: `stretches`, parents before their children, and the `owners` of the blocks of both
    tiers by `index_of` their names."""

    def __init__(self, tree: RadixTree, num_blocks: int, num_host_blocks: int, index_of: Mapping[str, int]) -> None:
        self.stretches: list[Stretch] = []
        self.owners, self.host_owners = bytearray(num_blocks), bytearray(num_host_blocks)
        self._index_of = index_of
        ends: list[tuple[Node, int, int]] = [(root, -1, 0) for root in tree.roots().values()]
        for end, parent, start in ends:  # grows while it is walked
            for node in (end.children or {}).values():
                last, length = self._follow(Stretch(node, parent, start))
                if last.children:
                    ends.append((last, len(self.stretches) - 1, start + length))
        for stretch in reversed(self.stretches):
            if stretch.parent >= 0:
                above = self.stretches[stretch.parent]
                above.num_below += stretch.num_below
                above.num_users += stretch.num_users

    def _follow(self, stretch: Stretch) -> tuple[Node, int]:
        """Walk down to where the stretch forks or ends."""
        node, owners, index_of = stretch.first, self.owners, self._index_of
        length = users = 0
        while True:
            length += 1
            users += node.pins
            owner = index_of.get(node.owner, 0)
            if node.block != NOWHERE:
                owners[node.block] = owner
            if node.host != NOWHERE:
                self.host_owners[node.host] = owner
            children = node.children
            if children is None or len(children) != 1:
                break
            (node,) = children.values()
        stretch.num_blocks = stretch.num_below = length
        stretch.num_users = users
        self.stretches.append(stretch)
        return node, length

    def heaviest(self, *, tokens: bool = False) -> tuple[Branch, ...]:
        """The stretches with the most blocks at and below them, the heaviest first."""
        stretches = self.stretches
        # A parent is at least as heavy as its child, and the sort keeps their order: the heaviest are a tree again.
        chosen = sorted(range(len(stretches)), key=lambda i: -stretches[i].num_below)[:MOST_BRANCHES]
        place = {index: i for i, index in enumerate(chosen)}
        return tuple(
            Branch(
                place.get(stretch.parent, -1),
                stretch.start,
                stretch.num_blocks,
                stretch.num_below,
                stretch.first.hits,
                stretch.num_users,
                _token_ids(stretch.first.key)[:HEAD_TOKENS] if tokens else (),
            )
            for stretch in (stretches[index] for index in chosen)
        )


def _token_ids(key: object) -> tuple[int, ...]:
    """The tokens that a live engine's block key spells; none for a key of another kind."""
    return tuple(memoryview(key).cast("i")) if isinstance(key, bytes) else ()
