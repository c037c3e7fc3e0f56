"""Block tables of sequences: matched against the prefix tree, grown, published into it, cut, given back.

The pool counts who holds a block, the tree knows what it contains; this file keeps the two in step and is the only one
that touches both. Invariants (checked by `core/invariants.py`):

- a sequence's published blocks are exactly its path in the tree: where another sequence published the same tokens
  first, the sequence takes over that block and gives its own back, so no prefix is stored twice once it is published;
- hence a cached block's descendants are never held by anyone unless it is held too: every CACHED block can be evicted,
  and `num_reclaimable` = free + cached is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pellucid.core.block_pool import BlockPool
from pellucid.core.events import BlockEvent
from pellucid.core.radix_tree import Node, RadixTree
from pellucid.core.sequence import Sequence


class PrefixMatch(NamedTuple):
    """The longest usable cached prefix of a sequence: its blocks' nodes, in order."""

    nodes: list[Node]

    @property
    def num_blocks(self) -> int:
        return len(self.nodes)


class KVManager:
    """The device pool and its prefix tree. With `prefix_cache` off nothing is published, so nothing is matched."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool = True,
        on_block_event: Callable[[BlockEvent], None] | None = None,
    ) -> None:
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(on_block_event)

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

    def match_limit(self, sequence: Sequence) -> int:
        """Tokens of `sequence` that may come from the cache: never the last one, whose logits are wanted."""
        if not self.prefix_cache:
            return 0
        limit = sequence.request.match_limit
        return sequence.num_tokens - 1 if limit is None else min(limit, sequence.num_tokens - 1)

    def match(self, sequence: Sequence) -> PrefixMatch:
        """The cached prefix that `sequence` could start from. It is only looked up: `attach` takes it."""
        keys = sequence.first_keys(self.match_limit(sequence) // self.block_size)
        return PrefixMatch(self.tree.match(sequence.request.cache_key, keys))

    def can_attach(self, match: PrefixMatch, num_tokens: int, num_kept_free: int) -> bool:
        """Whether a sequence with this match could hold `num_tokens` tokens and leave `num_kept_free` reclaimable."""
        num_revived = sum(1 for node in match.nodes if self.pool.refs[node.block] == 0)
        num_new = self.num_blocks_for(num_tokens) - match.num_blocks
        return num_new + num_revived + num_kept_free <= self.num_reclaimable

    def attach(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Give an empty sequence its cached prefix: referenced, pinned, and counted as computed."""
        assert not sequence.block_table
        assert sequence.node is None
        for node in match.nodes:
            self.pool.ref(node.block)
        sequence.node = match.nodes[-1] if match.nodes else self.tree.root(sequence.request.cache_key)
        self.tree.pin(sequence.node)
        sequence.block_table = [node.block for node in match.nodes]
        sequence.num_published = match.num_blocks
        sequence.num_computed = sequence.num_scheduled = match.num_blocks * self.block_size

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the block table cover `num_tokens` tokens, evicting cached blocks as needed. All or nothing."""
        missing = self.num_blocks_missing(sequence, num_tokens)
        if missing > self.num_reclaimable:
            return False
        while self.pool.num_free < missing:
            block = self.tree.evict()
            assert block is not None, "a cached block that cannot be evicted"
            self.pool.uncache(block)
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
                node = self.tree.insert(parent, key, block)
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

    def _move_pin(self, sequence: Sequence, node: Node, num_published: int) -> None:
        assert sequence.node is not None
        self.tree.pin(node)
        self.tree.unpin(sequence.node)
        sequence.node = node
        sequence.num_published = num_published
