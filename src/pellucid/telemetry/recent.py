"""Percentiles of the last minute, at a price that does not depend on how much happened in it.

Values are counted in buckets that are 5 % wide, a set of buckets a second, and the oldest second is dropped. So a
percentile is exact to within 2.5 %, a value costs one logarithm and one addition, and a busy minute keeps hardly more
than a quiet one. Times are seconds on any one clock that does not run backwards.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence

WINDOW_SECONDS = 60
_WIDTH = math.log(1.05)
_LEAST = 1e-6  # seconds; what is shorter counts as this


class RecentValues:
    """Durations seen within the last `WINDOW_SECONDS`."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, Counter[int]]] = deque()

    def add(self, value: float, now: float, count: int = 1) -> None:
        """`value` was seen `count` times."""
        second = int(now)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, Counter()))
            self._drop_old(second)
        self._seconds[-1][1][round(math.log(max(value, _LEAST)) / _WIDTH)] += count

    def percentiles(self, shares: Sequence[float], now: float) -> tuple[int, list[float]]:
        """How many values there were, and for each of `shares` (in [0, 1], ascending) the value that this share of them
        does not exceed; none where there were no values."""
        self._drop_old(int(now))
        buckets: Counter[int] = Counter()
        for _, counted in self._seconds:
            buckets.update(counted)
        total = buckets.total()
        found: list[float] = []
        seen = 0
        ascending = iter(sorted(buckets.items()))
        bucket = 0
        for share in shares if total else ():
            rank = max(1, math.ceil(share * total))
            while seen < rank:
                bucket, count = next(ascending)
                seen += count
            found.append(math.exp(bucket * _WIDTH))
        return total, found

    def _drop_old(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - WINDOW_SECONDS:
            self._seconds.popleft()


class RecentTimes:
    """What readers of replies felt: `ttft` from arrival to the first token, `itl` per token after it."""

    def __init__(self) -> None:
        self.ttft = RecentValues()
        self.itl = RecentValues()
