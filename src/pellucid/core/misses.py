"""Why prompt blocks were not in the cache: asked once a request, when it starts.

Blocks that leave the tree are remembered for a while by their chained digest (which names a block and everything before
it), with when and for whom; so a miss that was a hit an hour ago says so. What is neither cached nor remembered is
*divergent* if something else is cached behind the same prefix, in another *namespace* if others have it, else *cold*.
Only the first blocks of a long miss are looked up one by one; what follows them shares the last one's reason.

This is for people. Nothing decides by it, and a digest that collides would only tell a wrong story.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

from pellucid.core.events import BlockEvent, BlockRemoved
from pellucid.core.ledger import Miss
from pellucid.core.radix_tree import Node, RadixTree
from pellucid.core.sequence import Sequence

_NUM_REMEMBERED = 16_384
_NUM_LOOKED_UP = 64
_NUM_COMPARED = 64  # cached alternatives, or namespaces, that a block is compared with
NUM_SHOWN = 8  # tokens of what is there instead


class Eviction(NamedTuple):
    """When a block left the cache, and whose tokens needed its place."""

    at: float
    tenant: str


class MissBook:
    """Watches one prefix tree. Told of its events by `on_block_event`."""

    def __init__(self, tree: RadixTree, block_size: int) -> None:
        self._tree = tree
        self._block_size = block_size
        self._evicted: OrderedDict[bytes, Eviction] = OrderedDict()
        self._reclaiming = Eviction(0.0, "")

    def reclaiming(self, tenant: str, now: float) -> None:
        """What is evicted from here on is evicted for this tenant."""
        self._reclaiming = Eviction(now, tenant)

    def on_block_event(self, event: BlockEvent) -> None:
        """A block entered or left the tree."""
        self._evicted.pop(event.digest, None)
        if isinstance(event, BlockRemoved):
            self._evicted[event.digest] = self._reclaiming
            if len(self._evicted) > _NUM_REMEMBERED:
                self._evicted.popitem(last=False)

    def explain(self, sequence: Sequence, matched: list[Node], limit: int) -> tuple[Miss, ...]:
        """Why the prompt's blocks behind the `matched` ones missed. `limit` is how many tokens the cache might give."""
        size, num_prompt = self._block_size, sequence.num_prompt
        num_matched = min(len(matched), num_prompt // size)
        num_usable = max(num_matched, min(limit, num_prompt - 1) // size)
        num_whole = max(num_usable, (num_prompt - 1) // size)
        misses = self._missing(sequence, matched, num_matched, num_usable) if num_usable > num_matched else []
        if num_whole > num_usable:
            misses.append(Miss(num_usable, num_whole, "off"))
        misses.append(Miss(num_whole, -(-num_prompt // size), "partial"))
        return tuple(misses)

    def _missing(self, sequence: Sequence, matched: list[Node], start: int, end: int) -> list[Miss]:
        """Runs of blocks with one reason that cover [start, end)."""
        arrival = sequence.request.arrival
        parent = matched[-1] if matched else self._tree.root(sequence.namespace)
        digest = parent.digest
        misses: list[Miss] = []
        for index in range(start, min(end, start + _NUM_LOOKED_UP)):
            digest = _chained(digest, sequence.key(index))
            eviction = self._evicted.get(digest)
            if eviction is not None:
                miss = Miss(index, index + 1, "evicted", eviction.at - arrival, eviction.tenant)
            elif index == start:
                miss = self._never_there(sequence, parent, index)
            else:
                miss = Miss(index, index + 1, "cold")
            _append(misses, miss)
        misses[-1] = misses[-1]._replace(end=end)
        return misses

    def _never_there(self, sequence: Sequence, parent: Node, index: int) -> Miss:
        """Why nothing is cached under the key of block `index`, the first that misses, behind `parent`."""
        key = sequence.key(index)
        if index == 0 and self._others_have(parent, key):
            return Miss(index, index + 1, "namespace")
        others = [(_num_common(key, other), other) for other in islice(parent.children or (), _NUM_COMPARED)]
        common, other = max(others, key=itemgetter(0), default=(-1, key))
        if common > 0 or (common == 0 and index > 0):
            at = float(index * self._block_size + common)
            return Miss(index, index + 1, "divergent", at, there=_tokens(other, common))
        return Miss(index, index + 1, "cold")

    def _others_have(self, root: Node, key: Hashable) -> bool:
        roots = islice(self._tree.roots().values(), _NUM_COMPARED)
        return any(other is not root and other.children is not None and key in other.children for other in roots)


def _append(misses: list[Miss], miss: Miss) -> None:
    """Add a block's miss to a list of runs. Blocks of one prompt leave one by one: a run has the time of its first.
    Cold blocks behind a first reason belong to it."""
    last = misses[-1] if misses else None
    if last is not None and (
        (last.why, last.tenant) == (miss.why, miss.tenant) or (miss.why == "cold" and last.why != "evicted")
    ):
        misses[-1] = last._replace(end=miss.end)
    else:
        misses.append(miss)


def _chained(digest: bytes, key: Hashable) -> bytes:
    """The digest of a block behind the one that has `digest`; as `Node.digest` makes it."""
    data = key if isinstance(key, bytes) else repr(key).encode()
    return hashlib.blake2b(data, digest_size=16, key=digest).digest()


def _tokens(key: Hashable, start: int) -> tuple[int, ...]:
    """Some of a key's tokens; none of a key that is no token bytes."""
    return tuple(memoryview(key).cast("i")[start : start + NUM_SHOWN]) if isinstance(key, bytes) else ()


def _num_common(one: Hashable, other: Hashable) -> int:
    """Leading tokens that two keys have in common; 0 for keys that are no token bytes."""
    if not isinstance(one, bytes) or not isinstance(other, bytes):
        return 0
    pairs = zip(memoryview(one).cast("i"), memoryview(other).cast("i"))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
