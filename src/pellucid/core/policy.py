"""In which order waiting sequences are served. A policy keeps the queue and answers one question: who is next.

`Fcfs` serves in order of arrival. A preempted sequence keeps its place: it arrived before everyone who waits behind it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Protocol

from pellucid.core.sequence import Sequence


class Policy(Protocol):
    """The waiting sequences, in the order in which the scheduler should try to admit them."""

    def push(self, sequence: Sequence) -> None: ...

    def remove(self, sequence: Sequence) -> None: ...

    def __iter__(self) -> Iterator[Sequence]:
        """A snapshot in service order: the queue may change while it is read."""
        ...

    def __len__(self) -> int: ...


class Fcfs:
    """First come, first served."""

    def __init__(self) -> None:
        self._queue: list[Sequence] = []

    def push(self, sequence: Sequence) -> None:
        insort(self._queue, sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._queue, sequence.id, key=_arrival)
        if index == len(self._queue) or self._queue[index] is not sequence:
            raise ValueError(f"{sequence!r} is not waiting")
        del self._queue[index]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._queue))

    def __len__(self) -> int:
        return len(self._queue)


def _arrival(sequence: Sequence) -> int:
    return sequence.id
