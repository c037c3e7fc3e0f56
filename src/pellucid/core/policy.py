"""In which order prompts are served and who must give way: three policies behind one Protocol.

A policy keeps the waiting sequences and answers three questions: in which order do they (and the running sequences
that still read their prompt) get what a step has to give, must a running sequence make room for a waiting one, and
which running sequence goes first when blocks run out. `docs/fairness.md` works an example by hand.

`Fcfs` serves in order of arrival. `Priority` serves by priority (lower first) with aging: a request that has waited
`aging_seconds` longer counts as one level more urgent, so its place, `priority * aging_seconds + arrival`, never moves
and nobody starves. `Fair` serves tenants by the service they received (`core/service.py`), with locality.

A preempted sequence keeps its place: it arrived before everyone who waits behind it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import Protocol

from pellucid.core.config import SchedulerConfig
from pellucid.core.sequence import Sequence
from pellucid.core.service import ServiceBook

Key = tuple[float, ...]

WINDOW = 32
"""How many waiting requests (of each tenant, under `fair`) are looked at for their cached prefix."""


class Policy(Protocol):
    """The waiting sequences and the order of service."""

    def push(self, sequence: Sequence) -> None: ...

    def remove(self, sequence: Sequence) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]:
        """A snapshot of the waiting in service order: the queue may change while it is read."""
        ...

    def order(self, running: Iterable[Sequence]) -> Iterator[Sequence]:
        """Running sequences with prompt left and all waiting ones, in service order."""
        ...

    def ahead(self, sequence: Sequence) -> tuple[int, float]:
        """Prompt tokens of waiting sequences that would be served before `sequence`, which is not in the queue yet, and
        the share of the prompt rate that they and it can count on."""
        ...

    def owed(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether `running` must give way so that `waiting` can start."""
        ...

    def outranks(self, sequence: Sequence, other: Sequence) -> bool:
        """Whether `other` may not be read before `sequence`, however short it is."""
        ...

    def deferred(self) -> frozenset[str]:
        """Tenants whose next tokens come after the prompts of those who are owed."""
        ...

    def capped(self, prompts: Iterable[Sequence]) -> tuple[frozenset[str], float]:
        """Tenants whose next tokens get no more than a share of the step's time while others have prompts to be read
        (`prompts` are those of running sequences), and that share."""
        ...

    def may_pass(self, sequence: Sequence, head: Sequence) -> bool:
        """Whether `sequence` may start before `head`, which came first and does not fit, however often that happens."""
        ...

    def window(self) -> Iterator[Sequence]:
        """The waiting sequences whose cached prefix is worth knowing (`num_matched`), as it bears on their order."""
        ...

    def victim_key(self, sequence: Sequence) -> Key:
        """The running sequence with the largest key is the first to lose its blocks."""
        ...


class Queue:
    """Sequences sorted by a key that never changes while they wait."""

    def __init__(self) -> None:
        self._items: list[tuple[Key, Sequence]] = []

    def push(self, key: Key, sequence: Sequence) -> None:
        insort(self._items, (key, sequence), key=_key)

    def remove(self, key: Key, sequence: Sequence) -> None:
        index = bisect_left(self._items, key, key=_key)
        if index == len(self._items) or self._items[index][1] is not sequence:
            raise ValueError(f"{sequence!r} is not waiting")
        del self._items[index]

    def __iter__(self) -> Iterator[Sequence]:
        return iter([sequence for _, sequence in self._items])

    def __len__(self) -> int:
        return len(self._items)


def _key(item: tuple[Key, Sequence]) -> Key:
    return item[0]


class Fcfs:
    """First come, first served."""

    def __init__(self) -> None:
        self._queue = Queue()

    def push(self, sequence: Sequence) -> None:
        self._queue.push(self._place(sequence), sequence)

    def remove(self, sequence: Sequence) -> None:
        self._queue.remove(self._place(sequence), sequence)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def order(self, running: Iterable[Sequence]) -> Iterator[Sequence]:
        yield from sorted(running, key=self._place)
        yield from self._queue

    def ahead(self, sequence: Sequence) -> tuple[int, float]:
        return _num_unread(self._queue), 1.0

    def owed(self, waiting: Sequence, running: Sequence) -> bool:
        return False

    def outranks(self, sequence: Sequence, other: Sequence) -> bool:
        return False

    def deferred(self) -> frozenset[str]:
        return frozenset()

    def capped(self, prompts: Iterable[Sequence]) -> tuple[frozenset[str], float]:
        return frozenset(), 1.0

    def may_pass(self, sequence: Sequence, head: Sequence) -> bool:
        return False

    def window(self) -> Iterator[Sequence]:
        return islice(self, WINDOW)

    def victim_key(self, sequence: Sequence) -> Key:
        return (sequence.request.priority, sequence.id)

    def _place(self, sequence: Sequence) -> Key:
        return (sequence.id,)


class Priority:
    """Most urgent first, with aging; a strictly more urgent request takes the place of a less urgent running one."""

    def __init__(self, aging_seconds: float) -> None:
        self._aging_seconds = aging_seconds
        self._queue = Queue()

    def push(self, sequence: Sequence) -> None:
        self._queue.push(self._place(sequence), sequence)

    def remove(self, sequence: Sequence) -> None:
        self._queue.remove(self._place(sequence), sequence)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def order(self, running: Iterable[Sequence]) -> Iterator[Sequence]:
        yield from sorted([*running, *self._queue], key=self._place)

    def ahead(self, sequence: Sequence) -> tuple[int, float]:
        place = self._place(sequence)
        return _num_unread(other for other in self._queue if self._place(other) < place), 1.0

    def owed(self, waiting: Sequence, running: Sequence) -> bool:
        return self.outranks(waiting, running)

    def outranks(self, sequence: Sequence, other: Sequence) -> bool:
        more_urgent = sequence.request.priority < other.request.priority
        return more_urgent and self._place(sequence) < self._place(other)

    def deferred(self) -> frozenset[str]:
        return frozenset()

    def capped(self, prompts: Iterable[Sequence]) -> tuple[frozenset[str], float]:
        return frozenset(), 1.0

    def may_pass(self, sequence: Sequence, head: Sequence) -> bool:
        return False

    def window(self) -> Iterator[Sequence]:
        return islice(self, WINDOW)

    def victim_key(self, sequence: Sequence) -> Key:
        return self._place(sequence)

    def _place(self, sequence: Sequence) -> Key:
        request = sequence.request
        return (request.priority * self._aging_seconds + request.arrival, sequence.id)


class Fair:
    """Tenants by service received, least first; a request with a cached prefix counts as so much less served.

    The head start is `min(cached tokens, quantum)`, so locality can put a tenant at most one quantum ahead of another
    that is waiting. Inside a tenant: priority, then arrival, where each cached block is worth one place in the queue
    (so at most as many later requests pass an earlier one as a prompt has blocks).
    """

    def __init__(self, book: ServiceBook, slots: int) -> None:
        self._book = book
        self._slots = slots
        self._queues: dict[str, Queue] = {}
        self._len = 0

    def push(self, sequence: Sequence) -> None:
        queue = self._queues.setdefault(sequence.request.tenant, Queue())
        queue.push(self._place(sequence), sequence)
        self._len += 1

    def remove(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        self._queues[tenant].remove(self._place(sequence), sequence)
        self._len -= 1
        if not len(self._queues[tenant]):
            del self._queues[tenant]

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Sequence]:
        return self.order(())

    def order(self, running: Iterable[Sequence]) -> Iterator[Sequence]:
        """Merges the tenants' orders; a tenant's service is read anew each time one of its requests was taken, so what
        a step grants counts at once."""
        lists = {tenant: _local_order(queue, WINDOW) for tenant, queue in self._queues.items()}
        started: dict[str, list[Sequence]] = {}
        for sequence in running:
            started.setdefault(sequence.request.tenant, []).append(sequence)
        for tenant, sequences in started.items():
            sequences.sort(key=lambda s: (s.request.priority, s.id))
            lists[tenant] = _merge(sequences, lists.get(tenant, []))
        heap = [(self._score(items[0]), items[0].id, 0, items) for items in lists.values()]
        heapify(heap)
        while heap:
            _, _, index, items = heap[0]
            yield items[index]
            index += 1
            if index < len(items):
                heapreplace(heap, (self._score(items[index]), items[index].id, index, items))
            else:
                heappop(heap)

    def ahead(self, sequence: Sequence) -> tuple[int, float]:
        """A tenant waits for its own requests before it, at its share of the rate."""
        name, priority = sequence.request.tenant, sequence.request.priority
        own = (other for other in self._queues.get(name, ()) if other.request.priority <= priority)
        return _num_unread(own), self._book.entitlement(name)

    def owed(self, waiting: Sequence, running: Sequence) -> bool:
        """A tenant below its share of the running slots takes them from one above, unless it is ahead in service; a
        tenant more than a quantum behind takes from whoever is ahead."""
        mine, other = waiting.request.tenant, running.request.tenant
        if mine == other:
            return False
        book = self._book
        lead = book.service(other) - book.service(mine)
        if lead > book.quantum:
            return True
        below = book.account(mine).num_running + 1 <= self._slots * book.entitlement(mine)
        above = book.account(other).num_running > self._slots * book.entitlement(other)
        return lead > -book.quantum and below and above

    def outranks(self, sequence: Sequence, other: Sequence) -> bool:
        return sequence.request.tenant == other.request.tenant and sequence.request.priority < other.request.priority

    def deferred(self) -> frozenset[str]:
        return frozenset(self._book.ahead())

    def capped(self, prompts: Iterable[Sequence]) -> tuple[frozenset[str], float]:
        """Tenants above their entitlement of places, while one that is not has something to be read."""
        book, slots = self._book, self._slots
        reading = {*self._queues, *(sequence.request.tenant for sequence in prompts)}
        below = {t for t in reading if book.account(t).num_running <= slots * book.entitlement(t)}
        if not below:
            return frozenset(), 1.0
        active = [account.tenant for account in book.accounts() if account.num_running]
        above = [t for t in active if book.account(t.name).num_running > slots * book.entitlement(t.name)]
        return frozenset(t.name for t in above), sum(book.entitlement(t.name) for t in above)

    def may_pass(self, sequence: Sequence, head: Sequence) -> bool:
        return sequence.request.tenant != head.request.tenant

    def window(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from islice(queue, WINDOW)

    def victim_key(self, sequence: Sequence) -> Key:
        request = sequence.request
        return (request.priority, self._book.service(request.tenant), sequence.id)

    def _score(self, sequence: Sequence) -> float:
        book = self._book
        account = book.account(sequence.request.tenant)
        return account.service - min(sequence.num_matched / account.tenant.weight, book.quantum)

    def _place(self, sequence: Sequence) -> Key:
        return (sequence.request.priority, sequence.id)


def _num_unread(sequences: Iterable[Sequence]) -> int:
    return sum(sequence.num_due - sequence.num_matched for sequence in sequences)


def _local_order(queue: Queue, window: int) -> list[Sequence]:
    """A tenant's requests, the first `window` of them moved up by one place a cached block."""
    items = list(queue)
    head = [
        ((s.request.priority, place - s.num_matched // s.block_size, s.id), s) for place, s in enumerate(items[:window])
    ]
    head.sort(key=_key)
    return [s for _, s in head] + items[window:]


def _merge(started: list[Sequence], waiting: list[Sequence]) -> list[Sequence]:
    """Prompts that are being read and prompts that wait, by priority; at equal priority the started ones first."""
    if not waiting or started[-1].request.priority <= waiting[0].request.priority:
        return started + waiting
    return sorted(started + waiting, key=lambda s: s.request.priority)


def short_first(policy: Policy, started: list[Sequence], places: int, most: int) -> list[Sequence]:
    """Prompts with at most `most` tokens left, the shortest first, unless a longer one outranks them: those of
    `started` sequences, and those waiting that have one of `places` beside all who wait before them. Where places are
    short, the policy's order says whose they are."""
    prompts = [(sequence.num_due, sequence) for sequence in started]
    prompts += [(s.num_due - s.num_matched, s) for s in islice(policy, min(max(0, places), WINDOW))]
    longer = [s for n, s in prompts if n > most]
    short = sorted((n, s.id, s) for n, s in prompts if n <= most)
    return [s for _, _, s in short if not any(policy.outranks(other, s) for other in longer)]


def make_policy(config: SchedulerConfig, book: ServiceBook) -> Policy:
    """The policy that `config` names."""
    match config.policy:
        case "fcfs":
            return Fcfs()
        case "priority":
            return Priority(config.aging_seconds)
        case "fair":
            return Fair(book, config.max_running)
