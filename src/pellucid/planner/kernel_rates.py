"""How fast the engine's own kernels run on a measured machine: what a roofline is derated by, from measurement only.

A matrix product's time per parameter is a table over the number of rows, not a straight line: at one row it streams
weights, at many it multiplies, and kernels change path between. Between two measured rows the time is interpolated
linearly; beyond the last one it grows in proportion. Attention takes FLOPs for the pairs of a chunk, at one rate, and
bytes for the cache entries that are read. Their time is a table over the bytes of a step: what fits the processor's
own cache beside the weights is read several times as fast as what does not.

`rates_from` takes timed steps apart:

    attention    from pairs of steps that differ in context alone; decodes give the table, and one chunk the rate
    head(T)      a step of T rows with logits, less the same one without
    layers(T)    the step with logits (which is what an engine's decodes are), less head and attention

So a noisy head moves seconds between the two parts, and their sum stays what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from pellucid.core.cost import StepFeatures
from pellucid.core.errors import ConfigError
from pellucid.planner.shape import ModelShape

Part = Literal["layers", "head"]


@dataclass(frozen=True, slots=True)
class LinearRate:
    """Seconds per parameter of a product of `num_rows` rows with weights stored in `weights`, in the layers or in the
    head (which sampling follows, and is counted with)."""

    part: Part
    weights: str
    num_rows: int
    seconds_per_param: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionRate:
    """Attention's rates: `flops` per second on the pairs of a chunk, `read_bytes` per second on the cache where a step
    reads `at_bytes` of it. Several rows with one `flops` are a table."""

    cache: str
    flops: float
    read_bytes: float
    spread: float = 0.0
    at_bytes: float = 1.0


@dataclass(frozen=True, slots=True)
class KernelRates:
    """Every measured kernel of one machine. An int8 cache that was not measured is taken to be read as fast as a bf16
    one, byte for byte."""

    linear: tuple[LinearRate, ...]
    attention: tuple[AttentionRate, ...]

    def covers(self, weights: str, head: str, cache: str) -> bool:
        """Whether layers in `weights`, a head in `head` and attention over a cache in `cache` were measured."""
        parts = {(r.part, r.weights) for r in self.linear}
        return {("layers", weights), ("head", head)} <= parts and bool(self._attention_table(cache))

    def linear_seconds(self, part: Part, weights: str, num_rows: float, num_params: float) -> float:
        """Time of a product of `num_rows` rows with `num_params` parameters."""
        rows = self._table(part, weights)
        return num_params * _interpolate([(r.num_rows, r.seconds_per_param) for r in rows], num_rows)

    def attention_seconds(self, cache: str, flops: float, read_bytes: float) -> float:
        """Time of attention's arithmetic and of its reads, one after the other."""
        rows = self._attention_table(cache)
        reading = [(0.0, 0.0), *((r.at_bytes, r.at_bytes / r.read_bytes) for r in rows)]
        return flops / rows[0].flops + _interpolate(reading, read_bytes)

    def spread(self, weights: str, num_rows: int) -> float:
        """Relative spread of the nearest measured row count."""
        return min(self._table("layers", weights), key=lambda r: abs(r.num_rows - num_rows)).spread

    def _attention_table(self, cache: str) -> list[AttentionRate]:
        rows = sorted((r for r in self.attention if r.cache == cache), key=lambda r: r.at_bytes)
        return rows or (self._attention_table("bf16") if cache == "int8" else [])

    def _table(self, part: Part, weights: str) -> list[LinearRate]:
        rows = [r for r in self.linear if r.part == part and r.weights == weights]
        return sorted(rows, key=lambda r: r.num_rows)


class TimedStep(NamedTuple):
    """One measured step: what it computed, its seconds (preparation taken off), and their relative spread."""

    features: StepFeatures
    seconds: float
    spread: float


def rates_from(shape: ModelShape, steps: Iterable[TimedStep]) -> KernelRates:
    """Kernel rates of a model from timed steps. Raises ConfigError where the steps do not determine them."""
    timed = list(steps)
    plain = [s for s in timed if not s.features.num_samples]
    near: dict[int, TimedStep] = {}
    for step in sorted(plain, key=lambda s: s.features.num_context):
        near.setdefault(step.features.num_tokens, step)
    attention = _attention(shape, [(s, near[s.features.num_tokens]) for s in plain])
    rates = KernelRates((), attention)
    layers = {rows: _left(shape, rates, step) for rows, step in near.items()}
    sampled = {s.features.num_samples: s for s in timed if s.features.num_samples and s.features.num_tokens in near}
    both = _table({rows: _left(shape, rates, step) for rows, step in sampled.items()})
    heads = _table({rows: max(both[rows] - layers[rows], 0.0) for rows in both})
    layers = _table({**layers, **{rows: both[rows] - heads[rows] for rows in both}})
    heads = {rows: max(both[rows] - layers[rows], 0.0) for rows in both}
    spreads = {rows: step.spread for rows, step in (near | sampled).items()}
    return KernelRates(
        (
            *_rates("layers", shape.weight_format.name, layers, spreads, shape.num_matrix_params),
            *_rates("head", shape.head_format.name, heads, spreads, shape.hidden * shape.vocab),
        ),
        attention,
    )


def _rates(
    part: Part, weights: str, seconds: Mapping[int, float], spreads: Mapping[int, float], num_params: float
) -> list[LinearRate]:
    return [LinearRate(part, weights, rows, t / num_params, spreads[rows]) for rows, t in seconds.items()]


def _table(seconds: Mapping[int, float]) -> dict[int, float]:
    """rows -> seconds, by rows. More rows never take less time: where noise says so, neighbours that are out of order
    share their mean."""
    rows = sorted(seconds)
    return dict(zip(rows, _rising([seconds[r] for r in rows]), strict=True))


def _rising(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in least squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # (mean, how many)
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean, count = (mean * count + before * size) / (count + size), count + size
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def attention_work(shape: ModelShape, features: StepFeatures) -> tuple[float, float]:
    """Attention FLOPs and KV bytes (read and written) of a step, for a model whose layers all see everything."""
    flops = sum(g.num_layers * g.attention.decode_flops(features.num_attended) for g in shape.groups)
    return flops, (features.num_context + features.num_tokens) * shape.kv_bytes_per_token()


class _Added(NamedTuple):
    """What a longer context adds to a step of as many rows, which reads `near_bytes` without it."""

    num_bytes: float
    flops: float
    seconds: float
    near_bytes: float

    def from_nothing(self) -> _Added:
        """The same with the few near bytes added at the same rate."""
        scale = 1.0 + self.near_bytes / self.num_bytes
        return _Added(self.num_bytes * scale, self.flops * scale, self.seconds * scale, 0.0)

    def same_bytes(self, table: Sequence[tuple[float, float]]) -> float:
        """What `table` (bytes -> anything) says of the added bytes: those after the near ones."""
        return _interpolate(table, self.near_bytes + self.num_bytes) - _interpolate(table, self.near_bytes)


def _attention(shape: ModelShape, pairs: Sequence[tuple[TimedStep, TimedStep]]) -> tuple[AttentionRate, ...]:
    """Rates from the differences of (long, short) steps with equal rows.

    What decodes add, t = flops / F + R(bytes), gives R where F is known. A chunk adds many FLOPs for its bytes, so F
    follows from it less the decodes at the same bytes. Where noise makes F or R negative, the other carries all of it.
    """
    decodes: list[_Added] = []
    chunks: list[_Added] = []
    for long, short in pairs:
        if long.features.num_context > short.features.num_context:
            is_decode = long.features.num_tokens == long.features.num_sequences
            (decodes if is_decode else chunks).append(_added(shape, long, short))
    decodes = sorted(d.from_nothing() for d in decodes)
    if not decodes or not chunks or decodes[-1].seconds <= 0 or max(chunks, key=lambda c: c.flops).seconds <= 0:
        raise ConfigError("the timed steps do not show what context costs; measure again on a quieter machine")
    chunk = max(chunks, key=lambda c: c.flops)
    seconds = _rising([max(d.seconds, 0.0) for d in decodes])
    at = [0.0, *(d.num_bytes for d in decodes)]
    same_seconds = chunk.same_bytes(list(zip(at, (0.0, *seconds))))
    same_flops = chunk.same_bytes(list(zip(at, (0.0, *(d.flops for d in decodes)))))
    per_flop = max((chunk.seconds - same_seconds) / (chunk.flops - same_flops), 0.0)
    if per_flop * decodes[-1].flops >= seconds[-1]:
        per_flop = chunk.seconds / chunk.flops
    spread = max(long.spread for long, _ in pairs)
    reading = _rising([max(t - per_flop * d.flops, 0.0) for t, d in zip(seconds, decodes, strict=True)])
    return tuple(
        AttentionRate(
            shape.cache_format.name, _reciprocal(per_flop), _reciprocal(t / d.num_bytes), spread, at_bytes=d.num_bytes
        )
        for t, d in zip(reading, decodes, strict=True)
    )


def _added(shape: ModelShape, long: TimedStep, short: TimedStep) -> _Added:
    (far_flops, far_bytes), (near_flops, near_bytes) = (attention_work(shape, s.features) for s in (long, short))
    return _Added(far_bytes - near_bytes, far_flops - near_flops, long.seconds - short.seconds, near_bytes)


def _left(shape: ModelShape, rates: KernelRates, step: TimedStep) -> float:
    """A step's seconds without its attention; never less than a tenth of them."""
    spent = rates.attention_seconds(shape.cache_format.name, *attention_work(shape, step.features))
    return max(step.seconds - spent, step.seconds / 10)


def _reciprocal(seconds: float) -> float:
    return 1.0 / seconds if seconds else 1e30  # finite, so that it can be written as JSON


def _interpolate(table: Sequence[tuple[float, float]], at: float) -> float:
    """Piecewise linear through `table` (ascending); constant below it, proportional to `at` above it."""
    if at <= table[0][0]:
        return table[0][1]
    for (x0, y0), (x1, y1) in pairwise(table):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    last_at, last = table[-1]
    return last * at / last_at
