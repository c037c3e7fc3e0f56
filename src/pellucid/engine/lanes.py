"""A lane per request: which causes its time went to, and when, for the requests that run, wait or have just ended.

Lanes are drawn from the requests' ledgers (`core/ledger.py`). A ledger knows its causes exactly and their times by
phase; being read every second, it also tells when in a phase they came. Invariants: the spans of a lane are adjacent,
begin at the request's arrival, and the causes of each sum to its length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from pellucid.core.events import Event, Finished
from pellucid.core.ledger import Ledger, LedgerReport
from pellucid.core.ledger_book import LedgerBook
from pellucid.core.sequence import Sequence

MOST_SPANS = 64
_ALIKE = 0.1  # shares that differ by less are drawn as one span


class Span(NamedTuple):
    """Time `[start, end)` on the engine's clock, and the causes that share it: seconds that sum to its length."""

    start: float
    end: float
    causes: tuple[tuple[str, float], ...]


class Lane(NamedTuple):
    """A request as it is now, or as it ended (`status` is then the reason). The last span of an open lane ends now."""

    request_id: str
    tenant: str
    status: str
    arrival: float
    num_prompt: int
    num_cached: int
    num_generated: int
    num_preemptions: int
    spans: tuple[Span, ...]
    head: tuple[int, ...]


class _Reader:
    """Reads one ledger again and again, and makes spans of what it says each time."""

    __slots__ = ("arrival", "num_phases", "seen", "spans", "tenant", "upto")

    def __init__(self, tenant: str, arrival: float) -> None:
        self.tenant = tenant
        self.arrival = self.upto = arrival
        self.spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self.num_phases = 0  # that were read to their end
        self.seen: dict[str, float] = {}  # seconds of the present phase that stand in spans

    def read(self, ledger: Ledger) -> None:
        """Up to where the ledger is charged."""
        self._read_phases((phase.end, phase.causes) for phase in ledger.phases[self.num_phases :])
        self._add(ledger.since, ledger.seconds.items())
        self.seen = dict(ledger.seconds)

    def read_end(self, report: LedgerReport) -> None:
        """All that is left."""
        self._read_phases((phase.end, phase.causes) for phase in report.phases[self.num_phases :])

    def _read_phases(self, phases: Iterable[tuple[float, Iterable[tuple[str, float]]]]) -> None:
        for end, causes in phases:
            self._add(self.arrival + end, causes)
            self.seen = {}
            self.num_phases += 1

    def _add(self, end: float, causes: Iterable[tuple[str, float]]) -> None:
        if end <= self.upto:
            return
        new = [(cause, seconds - self.seen.get(cause, 0.0)) for cause, seconds in causes]
        span = Span(self.upto, end, tuple(part for part in new if part[1] > 0.0))
        self.upto = end
        if self.spans and _alike(self.spans[-1], span):
            span = _joined(self.spans.pop(), span)
        self.spans.append(span)


class Lanes:
    """The lanes of at most `limit` requests: those that run or wait, then those that ended last."""

    def __init__(self, book: LedgerBook, limit: int) -> None:
        self._book = book
        self._limit = limit
        self._open: dict[str, _Reader] = {}
        self._ended: deque[Lane] = deque(maxlen=limit)

    def started(self, sequence: Sequence) -> None:
        """The sequence is computed from now on: it has a lane, however short it is."""
        self._reader(sequence)

    def take(self, events: Iterable[Event]) -> None:
        """Close the lanes of requests that ended."""
        for event in events:
            if isinstance(event, Finished):
                reader = self._open.pop(event.request_id, None)
                if reader is not None and event.ledger is not None:
                    reader.read_end(event.ledger)
                    self._ended.append(_ended(event, event.ledger, reader))

    def view(self, sequences: list[Sequence], now: float, num_head: int) -> tuple[Lane, ...]:
        """The lanes of `sequences`, in their order, then those that ended, the last one last."""
        opened = [self._lane(sequence, now, num_head) for sequence in sequences[: self._limit]]
        room = self._limit - len(opened)
        return (*opened, *(list(self._ended)[-room:] if room else ()))

    def _lane(self, sequence: Sequence, now: float, num_head: int) -> Lane:
        reader = self._reader(sequence)
        reader.read(sequence.ledger)
        spans = tuple(reader.spans)
        if now > reader.upto:
            spans += (Span(reader.upto, now, ((self._book.cause_now(sequence), now - reader.upto),)),)
        return Lane(
            sequence.request.id,
            reader.tenant,
            "swapped" if sequence.wanted else sequence.status.value,
            reader.arrival,
            sequence.num_prompt,
            sequence.num_cached,
            sequence.num_generated,
            sequence.num_preemptions,
            spans,
            tuple(sequence.tokens[: min(num_head, sequence.num_prompt)]),
        )

    def _reader(self, sequence: Sequence) -> _Reader:
        request_id = sequence.request.id
        reader = self._open.get(request_id)
        if reader is None:
            reader = self._open[request_id] = _Reader(sequence.request.tenant, sequence.ledger.arrival)
        return reader


def _ended(event: Finished, report: LedgerReport, reader: _Reader) -> Lane:
    return Lane(
        event.request_id,
        reader.tenant,
        event.reason,
        reader.arrival,
        event.num_prompt,
        event.num_cached,
        event.num_generated,
        report.num_preemptions,
        tuple(reader.spans),
        (),
    )


def _alike(one: Span, other: Span) -> bool:
    """Whether the same causes share both, nearly alike."""
    if len(one.causes) != len(other.causes):
        return False
    first, second = one.end - one.start, other.end - other.start
    return all(
        cause == same and abs(seconds / first - more / second) < _ALIKE
        for (cause, seconds), (same, more) in zip(one.causes, other.causes)
    )


def _joined(one: Span, other: Span) -> Span:
    more = dict(other.causes)
    return Span(one.start, other.end, tuple((cause, seconds + more[cause]) for cause, seconds in one.causes))
