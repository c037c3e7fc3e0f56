"""Who gives blocks back when the pool is full.

Victim order: lowest priority (largest number) first, then newest. The oldest running sequence is never a victim, so it
always gets the blocks it needs, finishes, and hands the role on: that is the progress guarantee.
"""

from __future__ import annotations

from collections.abc import Iterable

from pellucid.core.sequence import Sequence


def choose_victim(running: Iterable[Sequence]) -> Sequence | None:
    """The running sequence to preempt next (it may be the one that needs blocks); None if only the oldest is left."""
    candidates = sorted(running, key=lambda sequence: sequence.id)[1:]
    return max(candidates, key=lambda sequence: (sequence.request.priority, sequence.id), default=None)
