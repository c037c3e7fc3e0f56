"""Block tables of sequences: matched against the prefix tree, grown, published into it, cut, given back.

The pools count who holds a block, the tree knows what it contains; this file keeps them in step and is the only one
that touches them all. Invariants (checked by `core/invariants.py`):

- a sequence's published blocks are exactly its path in the tree: where another sequence published the same tokens
  first, the sequence takes over that block and gives its own back, so no prefix is stored twice once it is published;
- hence a cached block's descendants are never held by anyone unless it is held too: every CACHED block can be evicted,
  and `num_reclaimable` = free + cached is exact.

With a host pool, blocks that leave the device may be copied there (demoted), and a prefix that is found there is copied
back (promoted) when a sequence starts from it. Copies are made in the order in which they are decided, before the
step's chunks; so a device block can be given away or relied upon in the very step of its copy, while a host block is
IN_FLIGHT until the copy is reported done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pellucid.core.block_pool import BlockPool, BlockState
from pellucid.core.events import BlockEvent
from pellucid.core.plan import Transfer
from pellucid.core.radix_tree import Node, RadixTree
from pellucid.core.sequence import Sequence
from pellucid.core.tiers import TierCosts


class PrefixMatch(NamedTuple):
    """The longest usable cached prefix of a sequence: its blocks' nodes, in order. The first `num_on_device` of them
    are on the device, the others will have to be promoted."""

    nodes: list[Node]
    num_on_device: int

    @property
    def num_blocks(self) -> int:
        return len(self.nodes)


class KVManager:
    """The device pool, the host pool and the prefix tree over both. With `prefix_cache` off nothing is published, so
    nothing is matched."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool = True,
        num_host_blocks: int = 0,
        tiers: TierCosts | None = None,
        on_block_event: Callable[[BlockEvent], None] | None = None,
    ) -> None:
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.pool = BlockPool(num_blocks)
        self.host = BlockPool(num_host_blocks)
        self.tree = RadixTree(on_block_event)
        self.shares: dict[str, int] = {}  # blocks that owners may keep; those above it lose theirs first
        self.num_demoted = self.num_promoted = 0
        self._tiers = tiers
        self._moves: list[tuple[str, int, int]] = []  # of the step being decided: kind, source, target
        self._under_way: dict[int, Transfer] = {}
        self._next_transfer = 0

    @property
    def num_reclaimable(self) -> int:
        """Blocks that `reserve` can hand out: free ones, and cached ones that nobody holds."""
        return self.pool.num_free + self.pool.num_cached

    def num_blocks_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that `sequence` lacks to hold `num_tokens` tokens."""
        return max(0, self.num_blocks_for(num_tokens) - len(sequence.block_table))

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_held_alone(self, sequence: Sequence, match: PrefixMatch) -> int:
        """Blocks that could be handed out but for `sequence`, leaving out those that `match` wants to keep."""
        kept = {node.block for node in match.nodes}
        return sum(self.pool.refs[block] == 1 and block not in kept for block in sequence.block_table)

    def match_limit(self, sequence: Sequence) -> int:
        """Tokens of `sequence` that may come from the cache: never the last one, whose logits are wanted."""
        if not self.prefix_cache:
            return 0
        limit = sequence.request.match_limit
        return sequence.num_tokens - 1 if limit is None else min(limit, sequence.num_tokens - 1)

    def match(self, sequence: Sequence) -> PrefixMatch:
        """The cached prefix that `sequence` could start from. It is only looked up: `attach` takes it."""
        keys = sequence.first_keys(self.match_limit(sequence) // self.block_size)
        nodes = self.tree.match(sequence.namespace, keys)
        num_on_device = len(nodes)
        while num_on_device and not nodes[num_on_device - 1].on_device:
            num_on_device -= 1
        end = num_on_device
        while end < len(nodes) and self.host.state(nodes[end].host) is not BlockState.IN_FLIGHT:
            end += 1
        if end > num_on_device:
            assert self._tiers is not None
            if not self._tiers.promote_pays(num_on_device, end - num_on_device):
                end = num_on_device
        return PrefixMatch(nodes[:end], num_on_device)

    def can_attach(self, match: PrefixMatch, num_tokens: int, num_kept_free: int) -> bool:
        """Whether a sequence with this match could hold `num_tokens` tokens and leave `num_kept_free` reclaimable."""
        num_revived = sum(1 for node in match.nodes[: match.num_on_device] if self.pool.refs[node.block] == 0)
        num_new = self.num_blocks_for(num_tokens) - match.num_on_device
        return num_new + num_revived + num_kept_free <= self.num_reclaimable

    def attach(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Give an empty sequence its cached prefix: referenced, pinned, promoted where it has to be, and counted as
        computed. `can_attach` has said that there is room."""
        assert not sequence.block_table
        assert sequence.node is None
        nodes = match.nodes
        sequence.node = nodes[-1] if nodes else self.tree.root(sequence.namespace)
        for node in nodes[: match.num_on_device]:
            self.pool.ref(node.block)
            node.hits += 1
        if match.num_on_device < len(nodes):
            self._promote(nodes[match.num_on_device :], nodes[match.num_on_device - 1] if match.num_on_device else None)
        self.tree.pin(sequence.node)
        sequence.block_table = [node.block for node in nodes]
        sequence.num_published = len(nodes)
        sequence.num_computed = sequence.num_scheduled = len(nodes) * self.block_size
        sequence.num_promoted += len(nodes) - match.num_on_device

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the block table cover `num_tokens` tokens, evicting cached blocks as needed. All or nothing."""
        missing = self.num_blocks_missing(sequence, num_tokens)
        if missing > self.num_reclaimable:
            return False
        self._make_free(missing)
        sequence.block_table.extend(self.pool.allocate(missing))
        return True

    def publish(self, sequence: Sequence) -> int:
        """Offer the sequence's newly full, computed blocks to the tree; returns how many there were."""
        num_new = sequence.num_computed // self.block_size - sequence.num_published
        if not self.prefix_cache or num_new <= 0:
            return 0
        parent = sequence.node
        assert parent is not None
        for index in range(sequence.num_published, sequence.num_published + num_new):
            key = sequence.key(index)
            block = sequence.block_table[index]
            node = self.tree.child(parent, key)
            if node is None:
                node = self.tree.insert(parent, key, block, sequence.owner(index))
                self.pool.cache(block)
            elif not node.on_device:
                self.tree.place(node, block)
                self.pool.cache(block)
            elif node.block != block:
                self.pool.ref(node.block)
                self.pool.unref(block)
                sequence.block_table[index] = node.block
                sequence.num_table_sent = min(sequence.num_table_sent, index)
            parent = node
        self._move_pin(sequence, parent, sequence.num_published + num_new)
        return num_new

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Keep the KV of at most the first `num_tokens` tokens; blocks behind them go back, last one first.

        A cut inside a published block moves down to that block's start: others may read the block, so it must not be
        written again. The sequence's tokens are the caller's business.
        """
        if num_tokens < sequence.num_published * self.block_size:
            num_tokens -= num_tokens % self.block_size
            node = sequence.node
            num_published = num_tokens // self.block_size
            for _ in range(sequence.num_published - num_published):
                assert node is not None
                node = node.parent
            assert node is not None
            self._move_pin(sequence, node, num_published)
        num_kept = self.num_blocks_for(num_tokens)
        for block in reversed(sequence.block_table[num_kept:]):
            self.pool.unref(block)
        del sequence.block_table[num_kept:]
        sequence.forget_keys(num_tokens // self.block_size)
        sequence.num_table_sent = min(sequence.num_table_sent, num_kept)
        sequence.num_computed = min(sequence.num_computed, num_tokens)
        sequence.num_scheduled = min(sequence.num_scheduled, num_tokens)

    def release(self, sequence: Sequence) -> None:
        """Give all blocks back. Published ones stay cached until they are evicted."""
        if sequence.node is not None:
            self.tree.unpin(sequence.node)
            sequence.node = None
        for block in reversed(sequence.block_table):
            self.pool.unref(block)
        sequence.block_table = []
        sequence.num_published = sequence.num_computed = sequence.num_scheduled = sequence.num_table_sent = 0

    # -- tiers -----------------------------------------------------------------------------------------------------

    def want(self, sequence: Sequence) -> list[Node]:
        """`sequence` is being preempted and will come back for its published blocks: they are worth a copy. Returns
        them, for `unwant`."""
        nodes = [] if sequence.node is None else sequence.node.path()
        for node in nodes:
            node.wanted += 1
        return nodes

    def unwant(self, nodes: list[Node]) -> None:
        """A sequence for which `want` was called has started again, or has ended."""
        for node in nodes:
            node.wanted -= 1
            if node.wanted == 0:
                self.tree.offer(node)

    def take_transfers(self) -> tuple[Transfer, ...]:
        """The copies decided since the last call, in order; they are under way from now on."""
        transfers: list[Transfer] = []
        for kind, source, target in self._moves:
            if transfers and transfers[-1].kind == kind:
                transfers[-1] = transfers[-1]._replace(pairs=(*transfers[-1].pairs, (source, target)))
            else:
                transfers.append(Transfer(self._next_transfer, kind, ((source, target),)))
                self._next_transfer += 1
        self._moves = []
        self._under_way |= {transfer.id: transfer for transfer in transfers}
        return tuple(transfers)

    def transfer_done(self, transfer_id: int) -> None:
        """The copies of this transfer are made: their host blocks are reusable again."""
        transfer = self._under_way.pop(transfer_id)
        for source, target in transfer.pairs:
            self.host.end_transfer(target if transfer.kind == "out" else source)

    @property
    def num_moves(self) -> int:
        """Copies decided since `take_transfers` was last called."""
        return len(self._moves)

    @property
    def num_under_way(self) -> int:
        """Blocks whose copies are decided and not yet reported done."""
        return len(self._moves) + sum(len(transfer.pairs) for transfer in self._under_way.values())

    def _make_free(self, count: int) -> None:
        """Evict until `count` blocks are free; the caller knows that so many can be."""
        while self.pool.num_free < count:
            node = self.tree.next_to_evict(self._above_share()) or self.tree.next_to_evict()
            assert node is not None, "a cached block that cannot be evicted"
            self._evict(node)

    def _evict(self, node: Node) -> None:
        """Take the device block of `node`, after a copy to the host if that pays."""
        block = node.block
        if node.host < 0 and self._tiers is not None and self._tiers.demote_pays(node):
            host = self._host_block()
            if host is not None:
                self.tree.place_on_host(node, host)
                self._move("out", block, host, host)
                self.num_demoted += 1
        for gone in self.tree.leave_device(node):
            self.host.uncache(gone.host)
        self.pool.uncache(block)

    def _host_block(self) -> int | None:
        """A host block, CACHED, its former content evicted if need be; None where all are in use or in flight."""
        if not self.host.num_free:
            node = self.tree.next_to_evict_on_host()
            if node is not None and self.host.state(node.host) is not BlockState.IN_FLIGHT:
                host = node.host
                self.tree.leave_host(node)
                self.host.uncache(host)
        if not self.host.num_free:
            return None
        host = self.host.allocate(1)[0]
        self.host.cache(host)
        self.host.unref(host)
        return host

    def _promote(self, nodes: list[Node], above: Node | None) -> None:
        """Bring host blocks back to the device, one reference each. They and the prefix `above` them are safe from the
        evictions that this takes."""
        if above is not None:
            self.tree.pin(above)
        for node in nodes:  # nothing may evict them from the host while room is made for them
            node.wanted += 1
        self._make_free(len(nodes))
        for node, block in zip(nodes, self.pool.allocate(len(nodes)), strict=True):
            node.wanted -= 1
            node.hits += 1
            self.tree.place(node, block)
            self.pool.cache(block)
            self._move("in", node.host, block, node.host)
        self.num_promoted += len(nodes)
        if above is not None:
            self.tree.unpin(above)

    def _move(self, kind: str, source: int, target: int, host: int) -> None:
        self._moves.append((kind, source, target))
        self.host.begin_transfer(host)

    def _above_share(self) -> str | None:
        """The owner that is furthest above its share of the pool, if any is."""
        excess = {owner: self.tree.num_by_owner.get(owner, 0) - share for owner, share in self.shares.items()}
        owner = max(excess, key=excess.__getitem__, default=None)
        return owner if owner is not None and excess[owner] > 0 else None

    def _move_pin(self, sequence: Sequence, node: Node, num_published: int) -> None:
        assert sequence.node is not None
        self.tree.pin(node)
        self.tree.unpin(sequence.node)
        sequence.node = node
        sequence.num_published = num_published
