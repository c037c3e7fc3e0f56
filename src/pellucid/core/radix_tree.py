"""Which prefixes are in memory: a tree with one full block per edge, and the order in which blocks leave it.

A path from a namespace's root spells token blocks; keys are compared exactly, never by a digest alone, so a false hit
is impossible. Keys are opaque hashables (token bytes in a live engine, a trace's hash ids in a simulator), so one edge
per block costs one dictionary look-up and there is nothing to split.

A node's tokens lie in a block of the device pool (`block`), in one of the host pool (`host`), or in both. Invariants: a
node that is in neither is gone; what is on the device has its whole prefix there, so device blocks leave from the
leaves of the device's part of the tree; a host copy counts only while its whole prefix is in one of the two. A pin on a
node keeps the path above it on the device (and nothing below it).

Recency is a logical clock (`touch` count), not time. A node's last use is at least that of its descendants: `match`
touches the path it walks, and a child that leaves hands its last use on to its parent. Each owner has a heap of its
own, so that the blocks of one who holds too many can leave first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush

from pellucid.core.events import BlockEvent, BlockRemoved, BlockStored

NOWHERE = -1


class Node:
    """One cached block. `pins` counts the sequences whose deepest published block this is, `wanted` those that were
    preempted and will come back for it, `hits` the requests that started from it. `depth` is 0 for a first block."""

    __slots__ = (
        "_digest",
        "block",
        "children",
        "depth",
        "hits",
        "host",
        "key",
        "last_use",
        "num_on_device",
        "owner",
        "parent",
        "pins",
        "uid",
        "wanted",
    )

    def __init__(self, uid: int, key: Hashable, block: int, parent: Node | None, owner: str) -> None:
        self.uid = uid
        self.key = key
        self.block = block
        self.host = NOWHERE
        self.parent = parent
        self.owner = owner
        self.depth: int = -1 if parent is None else parent.depth + 1
        self.children: dict[Hashable, Node] | None = None
        self.num_on_device = 0  # children that have a device block
        self.pins = 0
        self.wanted = 0
        self.hits = 0
        self.last_use = 0
        self._digest: bytes | None = None

    @property
    def on_device(self) -> bool:
        return self.block != NOWHERE

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
    """Cached prefixes of every namespace. Does not touch the pools: `KVManager` keeps them in step."""

    def __init__(self, on_event: Callable[[BlockEvent], None] | None = None) -> None:
        self._roots: dict[bytes, Node] = {}
        self._heaps: dict[str, list[tuple[int, int, Node]]] = {}
        self._host_heap: list[tuple[int, int, Node]] = []
        self._clock = 0
        self._next_uid = 0
        self._on_event = on_event
        self.num_blocks = 0  # nodes with a device block
        self.num_host_blocks = 0  # nodes with a host block
        self.num_by_owner: dict[str, int] = {}  # device blocks

    def root(self, namespace: bytes) -> Node:
        """The root of `namespace`, made when first asked for."""
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = Node(self._uid(), namespace, NOWHERE, None, "")
        return node

    def match(self, namespace: bytes, keys: Iterable[Hashable]) -> list[Node]:
        """Nodes of the longest cached prefix of `keys`, in order, and touch them. O(1) per block.

        Those on the device come first; behind them may follow some that are on the host only.
        """
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
            self.offer(path[-1])
            if not path[-1].on_device:
                self._offer_last_on_device(path)
        return path

    def child(self, parent: Node, key: Hashable) -> Node | None:
        """The cached block that follows `parent` under `key`."""
        return None if parent.children is None else parent.children.get(key)

    def insert(self, parent: Node, key: Hashable, block: int, owner: str = "") -> Node:
        """Hang device block `block` below `parent`, where nothing is yet under `key`.

        The caller pins the new node, or hangs the next one below it, before it evicts: until the first unpin the node
        is not up for eviction.
        """
        if parent.children is None:
            parent.children = {}
        if key in parent.children:
            raise ValueError(f"block {block}: its place in the tree is taken by block {parent.children[key].block}")
        self._clock += 1
        node = Node(self._uid(), key, NOWHERE, parent, owner)
        node.last_use = self._clock
        parent.children[key] = node
        self.place(node, block)
        if self._on_event is not None:
            self._on_event(BlockStored(node.digest, parent.digest, block))
        return node

    def place(self, node: Node, block: int) -> None:
        """`node`, whose prefix is on the device, has its tokens in device block `block` as well."""
        assert not node.on_device
        assert node.parent is not None
        node.block = block
        node.parent.num_on_device += 1
        self.num_blocks += 1
        self.num_by_owner[node.owner] = self.num_by_owner.get(node.owner, 0) + 1

    def place_on_host(self, node: Node, host: int) -> None:
        """`node` has its tokens in host block `host` as well."""
        assert node.host == NOWHERE
        node.host = host
        self.num_host_blocks += 1
        self.offer(node)

    def pin(self, node: Node) -> None:
        """Keep `node` and everything above it on the device."""
        node.pins += 1

    def unpin(self, node: Node) -> None:
        """Give one pin back; the node counts as used now."""
        if node.pins <= 0:
            raise ValueError(f"unpin of block {node.block}, which is not pinned")
        node.pins -= 1
        self._clock += 1
        node.last_use = self._clock
        self.offer(node)
        self._drop_empty_root(node)

    def next_to_evict(self, owner: str | None = None) -> Node | None:
        """The least recently used node, of `owner` if given, whose device block may go; None if there is none. It
        stays in the tree until `leave_device`. O(log n) amortised: stale heap entries are skipped."""
        best: tuple[int, int, Node] | None = None
        for heap in self._heaps.values() if owner is None else (self._heaps.get(owner, []),):
            while heap and not (heap[0][0] == heap[0][2].last_use and _may_leave_device(heap[0][2])):
                heappop(heap)
            if heap and (best is None or heap[0] < best):
                best = heap[0]
        return None if best is None else best[2]

    def next_to_evict_on_host(self) -> Node | None:
        """The least recently used node whose host block may go without taking others along; None if there is none."""
        heap = self._host_heap
        while heap and not (heap[0][0] == heap[0][2].last_use and _may_leave_host(heap[0][2])):
            node = heappop(heap)[2]
            if _may_leave_host(node):  # a copy of what was used on the device meanwhile
                heappush(heap, (node.last_use, node.uid, node))
        return heap[0][2] if heap else None

    def leave_device(self, node: Node) -> list[Node]:
        """`node` gives up its device block; without a host block it is gone, and with it what hangs below. Returns
        those nodes of the host tier that are gone."""
        parent = node.parent
        assert parent is not None
        block, node.block = node.block, NOWHERE
        parent.num_on_device -= 1
        parent.last_use = max(parent.last_use, node.last_use)
        self.num_blocks -= 1
        self.num_by_owner[node.owner] -= 1
        if node.host == NOWHERE:
            gone = self._remove(node, block)
        else:
            gone = []
            self.offer(node)
        self.offer(parent)
        self._drop_empty_root(parent)
        return gone

    def leave_host(self, node: Node) -> None:
        """`node`, which is on the device or has no children, gives up its host block."""
        assert node.host != NOWHERE
        node.host = NOWHERE
        self.num_host_blocks -= 1
        if not node.on_device:
            parent = node.parent
            assert parent is not None
            self._remove(node, NOWHERE)
            parent.last_use = max(parent.last_use, node.last_use)
            self.offer(parent)
            self._drop_empty_root(parent)

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

    def _remove(self, node: Node, block: int) -> list[Node]:
        """Take `node`, which has no block left (its last one on the device was `block`), and all below it out of the
        tree; returns those below, still with their host blocks' numbers."""
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        del parent.children[node.key]
        if not parent.children:
            parent.children = None
        below: list[Node] = []
        stack = [node]
        while stack:
            item = stack.pop()
            if self._on_event is not None:
                self._on_event(BlockRemoved(item.digest, block if item is node else item.block))
            if item is not node:
                below.append(item)
                self.num_host_blocks -= 1
            if item.children:
                stack.extend(item.children.values())
        for item in (node, *below):  # marks them as gone: they may linger in a heap
            item.key = item.parent = item.children = None
        return below

    def _offer_last_on_device(self, path: list[Node]) -> None:
        for node in reversed(path):
            if node.on_device:
                self.offer(node)
                return

    def offer(self, node: Node) -> None:
        """Put `node` up for eviction, from the device or from the host, if nothing protects it."""
        if _may_leave_device(node):
            heap = self._heaps.setdefault(node.owner, [])
            heappush(heap, (node.last_use, node.uid, node))
            # Stale entries are bounded by twice the tree: rebuilding costs no more than what made them.
            if len(heap) > 64 + 2 * self.num_by_owner[node.owner]:
                heap[:] = [
                    (n.last_use, n.uid, n) for n in self.nodes() if n.owner == node.owner and _may_leave_device(n)
                ]
                heapify(heap)
        if _may_leave_host(node):
            heappush(self._host_heap, (node.last_use, node.uid, node))
            if len(self._host_heap) > 64 + 2 * self.num_host_blocks:
                self._host_heap = [(n.last_use, n.uid, n) for n in self.nodes() if _may_leave_host(n)]
                heapify(self._host_heap)

    def _drop_empty_root(self, node: Node) -> None:
        if node.parent is None and isinstance(node.key, bytes) and node.children is None and node.pins == 0:
            self._roots.pop(node.key, None)

    def _uid(self) -> int:
        self._next_uid += 1
        return self._next_uid


def _may_leave_device(node: Node) -> bool:
    return node.parent is not None and node.block != NOWHERE and node.num_on_device == 0 and node.pins == 0


def _may_leave_host(node: Node) -> bool:
    return (
        node.parent is not None
        and node.host != NOWHERE
        and node.wanted == 0
        and (node.block != NOWHERE or node.children is None)
    )
