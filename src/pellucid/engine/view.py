"""What an engine looks like from inside, for whoever watches: made when asked for, by reading the scheduler's state.

Nothing is recorded for nobody: the first `look` begins a recording of lanes, and one that was not looked at for
`SECONDS_WATCHED` is dropped. Reading changes nothing (no match, no touch of the prefix tree).

Invariants: a view is of one moment between two steps; its size is bounded (`MOST_LANES`, `MOST_TENANTS`, a few
branches, two bytes a block) however many requests there are.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import NamedTuple

from pellucid.core.events import Event
from pellucid.core.ledger import Ledger
from pellucid.core.ledger_book import LedgerBook
from pellucid.core.plan import StepPlan
from pellucid.core.scheduler import Scheduler
from pellucid.core.sequence import Sequence
from pellucid.core.service import CACHED_WEIGHT, OUTPUT_WEIGHT, PROMPT_WEIGHT, Account
from pellucid.core.tenants import Tenant
from pellucid.engine.lanes import Lane, Lanes
from pellucid.engine.memory_view import HEAD_TOKENS, Branch, PoolView, TreeWalk, held_by, read_pool

SECONDS_WATCHED = 5.0
MOST_LANES = 120
MOST_WAITING = 40  # lanes of waiting requests, the next to start first
MOST_TENANTS = 64
LOOKS_PER_WALK = 3  # walking the whole tree is the dearest part of a view, and its heavy branches change slowly


class TenantView(NamedTuple):
    """A tenant that is known to the scheduler. `received` grows with what is computed for it, in the units of
    `core/service.py`; `lead` is how far its service is ahead of the least served tenant that waits, as the fair policy
    compares them. `waiting` counts its waiting requests by cause, `num_blocks` the blocks that its requests hold, each
    counted for one tenant."""

    tenant: Tenant
    num_running: int
    waiting: dict[str, int]
    num_blocks: int
    received: float
    lead: float


class EngineView(NamedTuple):
    """One moment. `now` is on the engine's clock, as are all times; `waiting` counts waiting requests by cause, and
    `num_swapped` of them come back for blocks that were copied away. `host` is None without a host tier."""

    now: float
    waiting: dict[str, int]
    num_swapped: int
    pool: PoolView
    host: PoolView | None
    branches: tuple[Branch, ...]
    lanes: tuple[Lane, ...]
    tenants: tuple[TenantView, ...]


class Viewer:
    """What is kept from one look to the next. The engine tells it of each step while it exists."""

    def __init__(self, scheduler: Scheduler, now: float) -> None:
        self._scheduler = scheduler
        self._lanes = Lanes(scheduler.ledgers, MOST_LANES)
        self._walk: TreeWalk | None = None
        self._index_of: dict[str, int] = {}  # of tenants, when the tree was walked
        self._num_looks = 0
        self._looked_at = now

    def expired(self, now: float) -> bool:
        """Whether nobody has looked for so long that nobody is watching."""
        return now - self._looked_at > SECONDS_WATCHED

    def launched(self, plan: StepPlan) -> None:
        """A step was decided."""
        for new in plan.new:
            self._lanes.started(self._scheduler.running[new.seq_id])

    def happened(self, events: list[Event]) -> None:
        """What a step or an abort led to."""
        self._lanes.take(events)

    def look(self, now: float, *, tokens: bool = False) -> EngineView:
        """The view of this moment. `tokens`: with the first token ids of prompts and branches."""
        self._looked_at = now
        kv = self._scheduler.kv
        running = list(self._scheduler.running.values())
        waiting = list(self._scheduler.waiting)
        accounts = sorted(self._scheduler.book.accounts(), key=lambda account: account.tenant.name)[:MOST_TENANTS]
        walk = self._tree({account.tenant.name: index for index, account in enumerate(accounts, start=1)})
        causes = _causes(waiting, self._scheduler.ledgers)
        held = held_by(bytearray(kv.pool.num_blocks), running, self._index_of)
        return EngineView(
            now=now,
            waiting=dict(sum(causes.values(), Counter())),
            num_swapped=sum(1 for sequence in waiting if sequence.wanted),
            pool=read_pool(kv.pool, held_by(bytearray(walk.owners), running, self._index_of)),
            host=read_pool(kv.host, bytes(walk.host_owners)) if kv.host.num_blocks else None,
            branches=walk.heaviest(tokens=tokens),
            lanes=self._lanes.view([*running, *islice(waiting, MOST_WAITING)], now, HEAD_TOKENS if tokens else 0),
            tenants=_tenants(accounts, causes, held),
        )

    def _tree(self, index_of: dict[str, int]) -> TreeWalk:
        """A walk of the tree, a few looks old at most."""
        if self._walk is None or self._num_looks % LOOKS_PER_WALK == 0 or index_of != self._index_of:
            kv = self._scheduler.kv
            self._walk = TreeWalk(kv.tree, kv.pool.num_blocks, kv.host.num_blocks, index_of)
            self._index_of = index_of
        self._num_looks += 1
        return self._walk


def _causes(waiting: list[Sequence], book: LedgerBook) -> dict[str, Counter[str]]:
    """By tenant, how many of the waiting wait for what."""
    ledgers: dict[str, list[Ledger]] = {}
    for sequence in waiting:
        ledgers.setdefault(sequence.request.tenant, []).append(sequence.ledger)
    return {tenant: Counter(book.reasons(waits)) for tenant, waits in ledgers.items()}


def _tenants(accounts: list[Account], causes: dict[str, Counter[str]], held: bytes) -> tuple[TenantView, ...]:
    least = min((account.service for account in accounts if account.num_waiting), default=None)
    return tuple(
        TenantView(
            tenant=account.tenant,
            num_running=account.num_running,
            waiting=dict(causes.get(account.tenant.name, {})),
            num_blocks=held.count(index),
            received=PROMPT_WEIGHT * account.prompt_tokens
            + OUTPUT_WEIGHT * account.output_tokens
            + CACHED_WEIGHT * account.cached_tokens,
            lead=0.0 if least is None else account.service - least,
        )
        for index, account in enumerate(accounts, start=1)
    )
