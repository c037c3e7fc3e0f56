"""How fast the engine's own kernels run on a measured machine: what a roofline is derated by, from measurement only.

A matrix product's time per parameter is a table over the number of rows, not a straight line: at one row it streams
weights, at many it multiplies, and kernels change path between. Between two measured rows the time is interpolated
linearly; beyond the last one it grows in proportion. Attention is linear in what it touches: FLOPs for the pairs of a
chunk, bytes for the cache entries that are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pellucid.core.cost import StepFeatures


@dataclass(frozen=True, slots=True)
class LinearRate:
    """Seconds per parameter of a product of `num_rows` rows with weights stored in `weights`."""

    weights: str
    num_rows: int
    seconds_per_param: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionRate:
    """Attention's rates: `flops` per second on the pairs of a chunk, `read_bytes` per second on the cache."""

    cache: str
    flops: float
    read_bytes: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class KernelRates:
    """Every measured kernel of one machine."""

    linear: tuple[LinearRate, ...]
    attention: tuple[AttentionRate, ...]

    def covers(self, weights: str, cache: str) -> bool:
        """Whether products with `weights` and attention over a cache in `cache` were both measured."""
        return any(r.weights == weights for r in self.linear) and any(r.cache == cache for r in self.attention)

    def linear_seconds(self, weights: str, num_rows: float, num_params: float) -> float:
        """Time of a product of `num_rows` rows with `num_params` parameters."""
        table = sorted((r.num_rows, r.seconds_per_param) for r in self.linear if r.weights == weights)
        return num_params * _interpolate(table, num_rows)

    def attention_seconds(self, cache: str, flops: float, read_bytes: float) -> float:
        """Time of attention's arithmetic and of its reads, one after the other."""
        rate = next(r for r in self.attention if r.cache == cache)
        return flops / rate.flops + read_bytes / rate.read_bytes

    def spread(self, weights: str, features: StepFeatures) -> float:
        """Relative spread of the nearest measured row count."""
        rows = [r for r in self.linear if r.weights == weights]
        return min(rows, key=lambda r: abs(r.num_rows - features.num_tokens)).spread


def _interpolate(table: Sequence[tuple[int, float]], at: float) -> float:
    """Piecewise linear through `table` (ascending); constant below it, proportional to `at` above it."""
    if at <= table[0][0]:
        return table[0][1]
    for (x0, y0), (x1, y1) in pairwise(table):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    last_at, last = table[-1]
    return last * at / last_at
