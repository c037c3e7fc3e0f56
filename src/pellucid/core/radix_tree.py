"""Which prefixes are in the pool: a tree with one full block per edge, and eviction of the least recently used leaf.

A path from a namespace's root spells token blocks; keys are compared exactly, never by a digest alone, so a false hit
is impossible. Keys are opaque hashables (token bytes in a live engine, a trace's hash ids in a simulator), so one edge
per block costs one dictionary look-up and there is nothing to split.

Invariants: a node holds exactly one block of the pool; only leaves are evicted, so a cached block's prefix is always
cached too; a pin on a node protects the whole path above it (inner nodes are never evicted) and nothing below it.

Recency is a logical clock (`touch` count), not time. A node's last use is at least that of its descendants: `match`
touches the path it walks, and an evicted child hands its last use on to its parent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush

from pellucid.core.events import BlockEvent, BlockRemoved, BlockStored

ROOT_BLOCK = -1


class Node:
    """One cached block. `pins` counts the sequences whose deepest published block this is."""

    __slots__ = ("_digest", "block", "children", "key", "last_use", "parent", "pins", "uid")

    def __init__(self, uid: int, key: Hashable, block: int, parent: Node | None) -> None:
        self.uid = uid
        self.key = key
        self.block = block
        self.parent = parent
        self.children: dict[Hashable, Node] | None = None
        self.pins = 0
        self.last_use = 0
        self._digest: bytes | None = None

    @property
    def digest(self) -> bytes:
        """128 bits that name this block and all before it, for routing, recording and a disk tier; made when asked."""
        chain: list[Node] = []
        node: Node | None = self
        while node is not None and node._digest is None:
            chain.append(node)
            node = node.parent
        digest = b"" if node is None or node._digest is None else node._digest
        for item in reversed(chain):
            key = item.key if isinstance(item.key, bytes) else repr(item.key).encode()
            digest = item._digest = hashlib.blake2b(key, digest_size=16, key=digest).digest()
        return digest

    def path(self) -> list[Node]:
        """The nodes from the first block to this one; empty for a root."""
        nodes: list[Node] = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class RadixTree:
    """Cached prefixes of every namespace. Does not touch the pool: `KVManager` keeps the two in step."""

    def __init__(self, on_event: Callable[[BlockEvent], None] | None = None) -> None:
        self._roots: dict[bytes, Node] = {}
        self._heap: list[tuple[int, int, Node]] = []
        self._clock = 0
        self._next_uid = 0
        self._on_event = on_event
        self.num_blocks = 0

    def root(self, namespace: bytes) -> Node:
        """The root of `namespace`, made when first asked for."""
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = Node(self._uid(), namespace, ROOT_BLOCK, None)
        return node

    def match(self, namespace: bytes, keys: Iterable[Hashable]) -> list[Node]:
        """Nodes of the longest cached prefix of `keys`, in order, and touch them. O(1) per block."""
        node = self._roots.get(namespace)
        if node is None:
            return []
        self._clock += 1
        clock = self._clock
        path: list[Node] = []
        for key in keys:
            children = node.children
            if children is None:
                break
            child = children.get(key)
            if child is None:
                break
            child.last_use = clock
            path.append(child)
            node = child
        # A leaf touched here may still be evictable; its old heap entry is stale now, so it needs a new one.
        if path:
            self._offer(path[-1])
        return path

    def child(self, parent: Node, key: Hashable) -> Node | None:
        """The cached block that follows `parent` under `key`."""
        return None if parent.children is None else parent.children.get(key)

    def insert(self, parent: Node, key: Hashable, block: int) -> Node:
        """Hang `block` below `parent`, where nothing is yet under `key`.

        The caller pins the new node, or hangs the next one below it, before it evicts: until the first unpin the node
        is not up for eviction.
        """
        if parent.children is None:
            parent.children = {}
        if key in parent.children:
            raise ValueError(f"block {block}: its place in the tree is taken by block {parent.children[key].block}")
        self._clock += 1
        node = Node(self._uid(), key, block, parent)
        node.last_use = self._clock
        parent.children[key] = node
        self.num_blocks += 1
        if self._on_event is not None:
            self._on_event(BlockStored(node.digest, parent.digest, block))
        return node

    def pin(self, node: Node) -> None:
        """Protect `node` and everything above it from eviction."""
        node.pins += 1

    def unpin(self, node: Node) -> None:
        """Give one pin back; the node counts as used now."""
        if node.pins <= 0:
            raise ValueError(f"unpin of block {node.block}, which is not pinned")
        node.pins -= 1
        self._clock += 1
        node.last_use = self._clock
        self._offer(node)
        self._drop_empty_root(node)

    def evict(self) -> int | None:
        """Remove the least recently used leaf that nobody pins and return its block; None if there is none.

        O(log n) amortised: the heap holds an entry for every time a node became evictable, stale ones are skipped.
        """
        while self._heap:
            last_use, _, node = heappop(self._heap)
            if node.last_use != last_use or not _evictable(node):
                continue
            parent = node.parent
            assert parent is not None
            assert parent.children is not None
            del parent.children[node.key]
            parent.last_use = max(parent.last_use, node.last_use)
            if not parent.children:
                parent.children = None
                self._offer(parent)
            self.num_blocks -= 1
            if self._on_event is not None:
                self._on_event(BlockRemoved(node.digest, node.block))
            node.key = None  # marks the node as gone: it may linger in the heap
            node.parent = None
            self._drop_empty_root(parent)
            return node.block
        return None

    def nodes(self) -> Iterator[Node]:
        """Every cached block's node, parents before children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            if node.children:
                stack.extend(node.children.values())

    def roots(self) -> dict[bytes, Node]:
        """The root of each namespace that holds something."""
        return dict(self._roots)

    def _offer(self, node: Node) -> None:
        """Put `node` up for eviction if nothing protects it."""
        if not _evictable(node):
            return
        heappush(self._heap, (node.last_use, node.uid, node))
        # Stale entries are bounded by twice the tree: rebuilding costs no more than what made them.
        if len(self._heap) > 64 + 2 * self.num_blocks:
            self._heap = [(n.last_use, n.uid, n) for n in self.nodes() if _evictable(n)]
            heapify(self._heap)

    def _drop_empty_root(self, node: Node) -> None:
        if node.parent is None and isinstance(node.key, bytes) and node.children is None and node.pins == 0:
            self._roots.pop(node.key, None)

    def _uid(self) -> int:
        self._next_uid += 1
        return self._next_uid


def _evictable(node: Node) -> bool:
    return node.parent is not None and node.children is None and node.pins == 0
