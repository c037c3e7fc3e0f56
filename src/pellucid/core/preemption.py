"""Who gives blocks back when the pool is full.

The policy gives the order (lowest priority first, then the tenant that was served most, then the newest). The oldest
running sequence is never a victim, so it always gets the blocks it needs, finishes, and hands the role on: that is the
progress guarantee.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pellucid.core.policy import Key
from pellucid.core.sequence import Sequence


def choose_victim(
    running: Iterable[Sequence],
    victim_key: Callable[[Sequence], Key],
    *,
    willing: Callable[[Sequence], bool] | None = None,
) -> Sequence | None:
    """The running sequence to preempt next (it may be the one that needs blocks); None if only the oldest is left.

    `willing` restricts the choice to sequences that must give way.
    """
    candidates = sorted(running, key=lambda sequence: sequence.id)[1:]
    return max((s for s in candidates if willing is None or willing(s)), key=victim_key, default=None)
