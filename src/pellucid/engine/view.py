"""What an engine looks like from inside, for whoever watches: made when asked for, by reading the scheduler's state.

Nothing is recorded for nobody: the first `look` begins a recording of lanes and hits, and one that was not looked at
for `SECONDS_WATCHED` is dropped. Reading changes nothing (no match, no touch of the prefix tree).

Invariants: a view is of one moment between two steps; its size is bounded (`MOST_LANES`, `MOST_BRANCHES`,
`MOST_TENANTS`, two bytes a block) however many requests there are.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice, repeat
from typing import NamedTuple

from pellucid.core.block_pool import BlockPool, BlockState
from pellucid.core.events import Event
from pellucid.core.ledger import Ledger
from pellucid.core.ledger_book import LedgerBook
from pellucid.core.plan import StepPlan
from pellucid.core.radix_tree import Node, RadixTree
from pellucid.core.scheduler import Scheduler
from pellucid.core.sequence import Sequence
from pellucid.core.service import CACHED_WEIGHT, OUTPUT_WEIGHT, PROMPT_WEIGHT, Account
from pellucid.core.tenants import Tenant
from pellucid.engine.lanes import Lane, Lanes

SECONDS_WATCHED = 5.0
MOST_LANES = 120
MOST_WAITING = 40  # lanes of waiting requests, the next to start first
MOST_BRANCHES = 12
MOST_TENANTS = 64
LOOKS_PER_WALK = 3  # walking the whole tree is the dearest part of a view, and its heavy branches change slowly
HEAD_TOKENS = 24  # of a prompt or a branch, where texts may be shown

# A block's flags. None of them: the block is free.
HELD, IN_TREE, SHARED, IN_FLIGHT = 1, 2, 4, 8
_FLAGS_OF_REFS = bytes([0, HELD] + [HELD | SHARED] * 254)


class PoolView(NamedTuple):
    """A pool, a byte a block: `flags` (HELD, IN_TREE, SHARED: by several requests, IN_FLIGHT), and `owners`: 1 + the
    index in `EngineView.tenants` of a tenant whose running request holds the block, or 0."""

    flags: bytes
    owners: bytes


class Branch(NamedTuple):
    """A stretch of the prefix tree without a fork. It starts `start` blocks below its root and has `num_blocks` blocks,
    with everything below it `num_below`; `num_hits` requests started from it or from below since the watching began,
    `num_users` hold it now. `parent` is an index in `EngineView.branches` or -1; `head` holds its first token ids where
    texts may be shown."""

    parent: int
    start: int
    num_blocks: int
    num_below: int
    num_hits: int
    num_users: int
    head: tuple[int, ...]


class TenantView(NamedTuple):
    """A tenant that is known to the scheduler. `received` grows with what is computed for it, in the units of
    `core/service.py`; `lead` is how far its service is ahead of the least served tenant that waits, as the fair policy
    compares them. `waiting` counts its waiting requests by cause, `num_blocks` the blocks that are shown as its own."""

    tenant: Tenant
    num_running: int
    waiting: dict[str, int]
    num_blocks: int
    received: float
    lead: float


class EngineView(NamedTuple):
    """One moment. `now` is on the engine's clock, as are all times; `waiting` counts waiting requests by cause."""

    now: float
    waiting: dict[str, int]
    num_swapped: int
    pool: PoolView
    branches: tuple[Branch, ...]
    lanes: tuple[Lane, ...]
    tenants: tuple[TenantView, ...]


class Viewer:
    """What is kept from one look to the next. The engine tells it of each step while it exists."""

    def __init__(self, scheduler: Scheduler, now: float) -> None:
        self._scheduler = scheduler
        self._lanes = Lanes(scheduler.ledgers, MOST_LANES)
        self._hits: dict[Node, int] = {}
        self._branches: tuple[Branch, ...] = ()
        self._num_looks = 0
        self._looked_at = now

    def expired(self, now: float) -> bool:
        """Whether nobody has looked for so long that nobody is watching."""
        return now - self._looked_at > SECONDS_WATCHED

    def launched(self, plan: StepPlan) -> None:
        """A step was decided; its newly started sequences still stand where the cache put them."""
        running = self._scheduler.running
        for new in plan.new:
            sequence = running[new.seq_id]
            node = sequence.node
            if node is not None and node.parent is not None:
                self._hits[node] = self._hits.get(node, 0) + 1
            self._lanes.started(sequence)

    def happened(self, events: list[Event]) -> None:
        """What a step or an abort led to."""
        self._lanes.take(events)

    def look(self, now: float, *, tokens: bool = False) -> EngineView:
        """The view of this moment. `tokens`: with the first token ids of prompts and branches."""
        self._looked_at = now
        running = list(self._scheduler.running.values())
        waiting = list(self._scheduler.waiting)
        accounts = sorted(self._scheduler.book.accounts(), key=lambda account: account.tenant.name)[:MOST_TENANTS]
        owners = {account.tenant.name: index for index, account in enumerate(accounts, start=1)}
        causes = _causes(waiting, self._scheduler.ledgers)
        pool = read_pool(self._scheduler.kv.pool, running, owners)
        if self._num_looks % LOOKS_PER_WALK == 0:
            tree = self._scheduler.kv.tree
            self._branches, self._hits = heaviest_branches(tree, self._hits, tokens=tokens)
        self._num_looks += 1
        return EngineView(
            now=now,
            waiting=dict(sum(causes.values(), Counter())),
            num_swapped=sum(bool(sequence.wanted) for sequence in waiting),
            pool=pool,
            branches=self._branches,
            lanes=self._lanes.view([*running, *islice(waiting, MOST_WAITING)], now, HEAD_TOKENS if tokens else 0),
            tenants=_tenants(accounts, causes, pool),
        )


def _causes(waiting: list[Sequence], book: LedgerBook) -> dict[str, Counter[str]]:
    """By tenant, how many of the waiting wait for what."""
    ledgers: dict[str, list[Ledger]] = {}
    for sequence in waiting:
        ledgers.setdefault(sequence.request.tenant, []).append(sequence.ledger)
    return {tenant: Counter(book.reasons(waits)) for tenant, waits in ledgers.items()}


def _tenants(accounts: list[Account], causes: dict[str, Counter[str]], pool: PoolView) -> tuple[TenantView, ...]:
    least = min((account.service for account in accounts if account.num_waiting), default=None)
    return tuple(
        TenantView(
            tenant=account.tenant,
            num_running=account.num_running,
            waiting=dict(causes.get(account.tenant.name, {})),
            num_blocks=pool.owners.count(index),
            received=PROMPT_WEIGHT * account.prompt_tokens
            + OUTPUT_WEIGHT * account.output_tokens
            + CACHED_WEIGHT * account.cached_tokens,
            lead=0.0 if least is None else account.service - least,
        )
        for index, account in enumerate(accounts, start=1)
    )


def read_pool(pool: BlockPool, running: list[Sequence], owners: dict[str, int]) -> PoolView:
    """The pool's blocks. All are flagged at once, as the bytes of one large number: a loop over 8,192 blocks would take
    longer than the rest of a view."""
    blocks = range(pool.num_blocks)
    refs = bytes(pool.refs) if max(pool.refs) < 256 else bytes(map(min, pool.refs, repeat(255)))
    flags = int.from_bytes(refs.translate(_FLAGS_OF_REFS), "little")
    flags |= int.from_bytes(bytes(map(pool.in_tree, blocks)), "little") * IN_TREE
    if pool.num_in_flight:
        moving = bytes(pool.state(block) is BlockState.IN_FLIGHT for block in blocks)
        flags |= int.from_bytes(moving, "little") * IN_FLIGHT
    held_by = bytearray(pool.num_blocks)
    for sequence in running:
        owner = owners.get(sequence.request.tenant, 0)
        for block in sequence.block_table:
            held_by[block] = owner
    return PoolView(flags.to_bytes(pool.num_blocks, "little"), bytes(held_by))


class _Stretch:
    """A branch while the tree is walked."""

    __slots__ = ("first", "num_below", "num_blocks", "num_hits", "num_users", "parent", "start")

    def __init__(self, first: Node, parent: int, start: int) -> None:
        self.first = first
        self.parent = parent
        self.start = start
        self.num_blocks = 0
        self.num_below = 0
        self.num_hits = 0
        self.num_users = 0


def heaviest_branches(
    tree: RadixTree, hits: dict[Node, int], *, tokens: bool = False
) -> tuple[tuple[Branch, ...], dict[Node, int]]:
    """The stretches of the tree with the most blocks at and below them, parents before children; and those of `hits`
    whose node is still in the tree."""
    stretches, kept = _stretches(tree, hits)
    for stretch in reversed(stretches):  # children come after their parents
        if stretch.parent >= 0:
            above = stretches[stretch.parent]
            above.num_below += stretch.num_below
            above.num_hits += stretch.num_hits
            above.num_users += stretch.num_users
    # A parent is at least as heavy as its child, and the sort keeps their order: the heaviest form a tree of their own.
    chosen = sorted(range(len(stretches)), key=lambda i: -stretches[i].num_below)[:MOST_BRANCHES]
    place = {index: i for i, index in enumerate(chosen)}
    branches = tuple(
        Branch(
            place.get(stretch.parent, -1),
            stretch.start,
            stretch.num_blocks,
            stretch.num_below,
            stretch.num_hits,
            stretch.num_users,
            _token_ids(stretch.first.key)[:HEAD_TOKENS] if tokens else (),
        )
        for stretch in (stretches[index] for index in chosen)
    )
    return branches, kept


def _stretches(tree: RadixTree, hits: dict[Node, int]) -> tuple[list[_Stretch], dict[Node, int]]:
    found: list[_Stretch] = []
    kept: dict[Node, int] = {}
    ends: list[tuple[Node, int, int]] = [(root, -1, 0) for root in tree.roots().values()]
    for end, parent, start in ends:  # grows while it is walked
        for node in (end.children or {}).values():
            stretch = _Stretch(node, parent, start)
            length = users = 0
            while True:
                length += 1
                users += node.pins
                if hits and node in hits:
                    kept[node] = hits[node]
                    stretch.num_hits += hits[node]
                children = node.children
                if children is None or len(children) != 1:
                    break
                (node,) = children.values()
            stretch.num_blocks = stretch.num_below = length
            stretch.num_users = users
            found.append(stretch)
            if children:
                ends.append((node, len(found) - 1, start + length))
    return found, kept


def _token_ids(key: object) -> tuple[int, ...]:
    """The tokens that a live engine's block key spells; none for a key of another kind."""
    return tuple(memoryview(key).cast("i")) if isinstance(key, bytes) else ()
