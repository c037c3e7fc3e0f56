"""The mutable progress of one request; private to the scheduler.

    tokens        prompt, then every token that was committed
    [0, num_computed)             their KV is in the pool (committed)
    [num_computed, num_scheduled) being computed by steps that are launched and not yet committed
    num_known     tokens the sequence has or will have sampled once those steps commit

There is no prefill and no decode: whatever lies in [num_scheduled, num_known) is due, a prompt's 5,000 tokens or the
one token sampled last. Invariants: num_computed <= num_scheduled <= num_known; the block table covers num_scheduled
tokens; the first `num_published` blocks of the table are in the prefix tree, under the pinned `node`.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable
from enum import Enum
from itertools import islice

from pellucid.core.errors import IllegalTransition
from pellucid.core.ledger import Ledger
from pellucid.core.radix_tree import Node
from pellucid.core.request import Request

# A block that somebody is about to compute: the node (or, at the top, the namespace) it will hang below, and its key.
Claim = tuple[Node | bytes, Hashable]


PUBLIC = "public prefixes"
"""The owner of cached blocks that no tenant is charged for."""


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.WAITING, Status.SWAPPED, Status.FINISHED}),
    Status.SWAPPED: frozenset({Status.RUNNING, Status.WAITING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


class Sequence:
    """One request on its way. `id` is a small integer of the scheduler's, in order of arrival."""

    __slots__ = (
        "_keys",
        "announced",
        "awaited",
        "block_size",
        "block_table",
        "epoch",
        "id",
        "last_step",
        "ledger",
        "max_length",
        "node",
        "num_cached",
        "num_charged",
        "num_computed",
        "num_lost",
        "num_matched",
        "num_overtaken",
        "num_pending",
        "num_preemptions",
        "num_promoted",
        "num_prompt",
        "num_published",
        "num_scheduled",
        "num_table_sent",
        "num_waited_steps",
        "request",
        "status",
        "tokens",
        "wanted",
    )

    def __init__(self, seq_id: int, request: Request, block_size: int, max_length: int) -> None:
        self.id = seq_id
        self.request = request
        self.block_size = block_size
        self.max_length = max_length  # prompt and output together: generation ends there
        self.tokens = array("i", request.prompt)
        self.num_prompt = len(request.prompt)
        self.status = Status.WAITING
        self.ledger = Ledger(request.tenant, request.arrival)
        self.block_table: list[int] = []
        self.node: Node | None = None
        self.num_computed = 0
        self.num_scheduled = 0
        self.num_pending = 0  # samples of launched steps that are not committed yet
        self.num_published = 0
        self.announced = False  # the executor has been told of it
        self.num_table_sent = 0  # entries of the block table that the executor has been told
        self.num_cached = 0  # prompt tokens that came from the cache at first admission
        self.awaited: Claim | None = None  # the block that another request is computing for both
        self.num_waited_steps = 0  # steps spent waiting for another request's prefix
        self.num_preemptions = 0
        self.last_step = -1  # in which something of it was computed
        self.num_lost = 0  # tokens that were computed when it was last preempted
        self.num_promoted = 0  # blocks that were copied back from the host for it
        self.wanted: list[Node] = []  # blocks that it will come back for after a preemption by swap
        self.num_matched = 0  # tokens found in the cache when it was last looked up
        self.num_overtaken = 0  # admissions that passed it while it did not fit
        self.num_charged = 0  # prompt tokens that its tenant has been charged for
        self.epoch = 0  # grows with each preemption: results of steps launched before it are stale
        self._keys: list[Hashable] = []

    def __repr__(self) -> str:
        return (
            f"Sequence({self.id}, {self.status.value}, tokens={len(self.tokens)}, computed={self.num_computed}, "
            f"scheduled={self.num_scheduled}, blocks={len(self.block_table)})"
        )

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_known(self) -> int:
        return len(self.tokens) + self.num_pending

    @property
    def num_due(self) -> int:
        """Tokens that could be computed now. Nothing is ever computed on the last token of `max_length`."""
        return min(len(self.tokens) + self.num_pending, self.max_length - 1) - self.num_scheduled

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    def become(self, status: Status) -> None:
        """Change status, or raise IllegalTransition naming what was legal."""
        legal = TRANSITIONS[self.status]
        if status not in legal:
            names = ", ".join(sorted(s.value for s in legal)) or "nothing"
            raise IllegalTransition(f"{self!r} cannot become {status.value}; legal from here: {names}")
        self.status = status

    @property
    def namespace(self) -> bytes:
        """The root below which the sequence's blocks hang in the prefix tree."""
        request = self.request
        return request.public_key if request.num_public_blocks else request.cache_key

    def owner(self, index: int) -> str:
        """Whose share of the pool the cached block `index` counts against."""
        return PUBLIC if index < self.request.num_public_blocks else self.request.tenant

    def key(self, index: int) -> Hashable:
        """The tree's key of the sequence's block `index`, whose tokens are all known.

        Token bytes; or, for a request that names its blocks, that name (blocks behind the named ones get a key that no
        other request has). The first block behind a public prefix is found under the request's own namespace only.
        """
        names = self.request.block_keys
        if names is not None:
            return self._private(index, names[index] if index < len(names) else (self.request.id, index))
        if len(self._keys) <= index:
            self._make_keys()
        return self._keys[index]

    def first_keys(self, count: int) -> Iterable[Hashable]:
        """The keys of the first `count` blocks, whose tokens are all known."""
        if self.request.block_keys is not None:
            return map(self.key, range(count))
        if len(self._keys) < count:
            self._make_keys()
        return islice(self._keys, count)

    def _make_keys(self) -> None:
        """Keys of all full blocks that have none yet, cut from one copy of the tokens: long prompts have thousands."""
        data = self.tokens[len(self._keys) * self.block_size :].tobytes()
        width = self.block_size * self.tokens.itemsize
        index = len(self._keys)
        self._keys.extend(data[i : i + width] for i in range(0, len(data) - width + 1, width))
        first_private = self.request.num_public_blocks
        if index <= first_private < len(self._keys):
            self._keys[first_private] = self._private(first_private, self._keys[first_private])

    def _private(self, index: int, key: Hashable) -> Hashable:
        """`key`, made the tenant's own where block `index` is the first behind a public prefix."""
        public = self.request.num_public_blocks
        return (self.request.cache_key, key) if public and index == public else key

    def forget_keys(self, num_kept: int) -> None:
        """Tokens from block `num_kept` on may change: their keys are made anew when asked for."""
        del self._keys[num_kept:]
