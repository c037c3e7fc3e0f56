"""The highest rate that a server holds: bisection over rates, each tried several times, the verdict by their median.

Attainment is noisy and not always monotone, so a search states what it saw at every rate, and the answer is the highest
rate tried at which the median attainment held, with the lowest at which it did not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from pellucid.core.errors import ConfigError

Attainment = Callable[[float], Awaitable[tuple[float, bool]]]
"""From a rate to the share of good requests, and whether the run was valid."""

_GROWTH = 2.0


class CapacitySearch(NamedTuple):
    """Doubles from `first` until the objective is missed (or halves until it holds), then bisects to `precision`."""

    attain: float = 0.99
    repeats: int = 3
    first: float = 1.0
    precision: float = 0.05
    lowest: float = 1e-3
    highest: float = 1e4

    async def run(self, attainment: Attainment) -> dict[str, Any]:
        """The search's document: `capacity` (requests a second, None where even the lowest rate misses) and all
        trials."""
        if not 0 < self.attain <= 1:
            raise ConfigError(f"--attain is {self.attain:g}; it is a share of requests, in (0, 1]")
        trials: list[dict[str, Any]] = []

        async def holds(rate: float) -> bool:
            seen = [await attainment(rate) for _ in range(self.repeats)]
            shares = [share for share, _ in seen]
            kept = median(shares) >= self.attain
            valid = all(valid for _, valid in seen)
            trials.append({"rate": rate, "attainment": shares, "holds": kept, "valid": valid})
            return kept

        low, high = await self._bracket(holds)
        while low is not None and high is not None and high / low > 1 + self.precision:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if await holds(middle) else (low, middle)
        return {
            "capacity": low,
            "missed_at": high,
            "attain": self.attain,
            "repeats": self.repeats,
            "valid": all(trial["valid"] for trial in trials if trial["rate"] == low),
            "trials": sorted(trials, key=lambda trial: trial["rate"]),
        }

    async def _bracket(self, holds: Callable[[float], Awaitable[bool]]) -> tuple[float | None, float | None]:
        rate = self.first
        if await holds(rate):
            while rate < self.highest:
                if not await holds(rate * _GROWTH):
                    return rate, rate * _GROWTH
                rate *= _GROWTH
            return rate, None
        while rate / _GROWTH >= self.lowest:
            if await holds(rate / _GROWTH):
                return rate / _GROWTH, rate
            rate /= _GROWTH
        return None, rate


def sweep_rates(text: str) -> list[float]:
    """From `rate=1:20` (six rates, evenly spaced in ratio), `rate=1:20:8` or `rate=1,2,5`."""
    name, _, values = text.partition("=")
    try:
        if name != "rate":
            raise ValueError
        if "," in values or ":" not in values:
            rates = [float(value) for value in values.split(",")]
        else:
            low, high, *count = values.split(":")
            rates = np.geomspace(float(low), float(high), int(count[0]) if count else 6).tolist()
        if not all(0 < rate < float("inf") for rate in rates):
            raise ValueError
    except ValueError:
        raise ConfigError(f"--sweep {text!r}: expected rate=LOW:HIGH, rate=LOW:HIGH:COUNT or rate=A,B,C") from None
    return rates
