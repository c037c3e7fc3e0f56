"""Traces made from a description: when requests come, how long they are, what they share, whose they are.

Everything is drawn from one seed through separate generators (arrivals, lengths, sharing, tenants), so changing the
rate leaves the lengths as they were. A prompt is a list of named segments (a system prompt, a document, a question,
an earlier answer); its block ids are digests of the segments and offsets they cover, so two prompts share a block
exactly when they would share its tokens.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import gamma, log
from typing import Any, Literal, NamedTuple

import numpy as np

from pellucid.core.errors import ConfigError
from pellucid.workload.trace import TraceRequest

PatternKind = Literal["independent", "system", "few-shot", "rag", "chat", "agent"]
_PIECE = 1024
_ARRIVAL_ARGUMENTS = {"poisson": 0, "constant": 0, "gamma": 1, "weibull": 1, "onoff": 2, "diurnal": 2}


class Segment(NamedTuple):
    """A run of tokens with an identity: equal names mean equal tokens."""

    name: str
    num_tokens: int


def segment_hashes(segments: Sequence[Segment], block_size: int) -> tuple[int, ...]:
    """Chained ids of the full blocks of a prompt made of segments."""
    ids: list[int] = []
    state = b""
    start, end = 0, block_size
    for segment in segments:
        while end <= start + segment.num_tokens:
            covered = f"{segment.name}\0{end - start}".encode()
            digest = hashlib.blake2b(state + covered, digest_size=8).digest()
            ids.append(int.from_bytes(digest, "little") >> 2)
            end += block_size
        state = hashlib.blake2b(state + f"{segment.name}\0{segment.num_tokens}".encode(), digest_size=16).digest()
        start += segment.num_tokens
    return tuple(ids)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival process of mean `rate` a second.

    `kind` is poisson, constant, gamma (`a`: coefficient of variation), weibull (`a`: shape), onoff (Poisson in bursts
    of `a` seconds after pauses of `b`) or diurnal (Poisson whose rate swings by the share `b` over a period of `a`
    seconds).
    """

    kind: str
    rate: float
    a: float = 0.0
    b: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise ConfigError(f"the rate is {self.rate:g} requests a second; it must be positive")

    @classmethod
    def parse(cls, text: str, rate: float) -> Arrivals:
        """From `poisson`, `gamma:2`, `onoff:10:30`, ..."""
        kind, *numbers = text.split(":")
        wanted = _ARRIVAL_ARGUMENTS.get(kind)
        if wanted is None or len(numbers) != wanted:
            raise ConfigError(
                f"--arrivals {text!r}: expected poisson, constant, gamma:CV, weibull:SHAPE, onoff:BUSY:QUIET or "
                f"diurnal:PERIOD:SWING"
            )
        values = [_positive(number, f"--arrivals {text!r}") for number in numbers]
        if kind == "diurnal" and values[1] > 1:
            raise ConfigError(f"--arrivals {text!r}: the swing is a share of the rate, at most 1")
        return cls(kind, rate, *values)

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        """Arrival times from 0 on, without end."""
        if self.kind == "onoff":
            yield from self._bursts(rng)
        elif self.kind == "diurnal":
            yield from self._diurnal(rng)
        else:
            at = 0.0
            while True:
                for gap in self._gaps(rng).tolist():
                    at += gap
                    yield at

    def _gaps(self, rng: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        mean = 1.0 / self.rate
        if self.kind == "gamma":
            shape = 1.0 / self.a**2
            return rng.gamma(shape, mean / shape, _PIECE)
        if self.kind == "weibull":
            return rng.weibull(self.a, _PIECE) * (mean / gamma(1.0 + 1.0 / self.a))
        if self.kind == "constant":
            return np.full(_PIECE, mean)
        return rng.exponential(mean, _PIECE)

    def _bursts(self, rng: np.random.Generator) -> Iterator[float]:
        """Time runs only inside bursts; the pauses are put back in afterwards."""
        inside = 0.0
        rate = self.rate * (self.a + self.b) / self.a
        while True:
            for gap in rng.exponential(1.0 / rate, _PIECE).tolist():
                inside += gap
                yield inside + int(inside / self.a) * self.b

    def _diurnal(self, rng: np.random.Generator) -> Iterator[float]:
        """Thinning of a Poisson process at the peak rate."""
        peak = self.rate * (1.0 + self.b)
        at = 0.0
        while True:
            gaps, draws = rng.exponential(1.0 / peak, _PIECE), rng.random(_PIECE)
            for gap, draw in zip(gaps.tolist(), draws.tolist()):
                at += gap
                if draw * (1.0 + self.b) <= 1.0 + self.b * np.sin(2 * np.pi * at / self.a):
                    yield at


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Token counts: fixed (`a`), uniform over [a, b], or lognormal with median `a` and sigma `b`, cut at `high`."""

    kind: str
    a: float
    b: float = 0.0
    high: float = float("inf")

    @classmethod
    def parse(cls, text: str, flag: str) -> LengthDistribution:
        """From `512`, `uniform:100:900`, `lognormal:400:1.0` or `lognormal:400:1.0:8192`."""
        kind, *numbers = text.split(":")
        if kind not in ("uniform", "lognormal"):
            kind, numbers = "fixed", [text]
        if len(numbers) not in {"fixed": (1,), "uniform": (2,), "lognormal": (2, 3)}[kind]:
            raise ConfigError(f"{flag} {text!r}: expected N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA[:MAX]")
        values = [_positive(number, f"{flag} {text!r}") for number in numbers]
        if kind == "uniform" and values[1] < values[0]:
            raise ConfigError(f"{flag} {text!r}: the high end is below the low end")
        return cls(kind, *values)

    def draw(self, rng: np.random.Generator) -> int:
        """One count of at least 1."""
        if self.kind == "fixed":
            return max(1, int(self.a))
        value = rng.uniform(self.a, self.b + 1) if self.kind == "uniform" else rng.lognormal(log(self.a), self.b)
        return max(1, int(min(value, self.high)))


Lengths = Callable[[np.random.Generator], tuple[int, int]]


def independent_lengths(inputs: LengthDistribution, outputs: LengthDistribution) -> Lengths:
    """Input and output counts drawn apart."""
    return lambda rng: (inputs.draw(rng), outputs.draw(rng))


def lengths_of_rows(rows: Sequence[tuple[int, int]]) -> Lengths:
    """Input and output counts of a random row of a trace, so that their correlation stays."""
    if not rows:
        raise ConfigError("--lengths-from: the trace has no row with input and output")
    return lambda rng: rows[int(rng.integers(len(rows)))]


@dataclass(frozen=True, slots=True)
class Pattern:
    """What prompts share.

    independent: nothing. system, few-shot: one of `count` prefixes of `num_tokens`. rag: `per_request` of `count`
    documents of `num_tokens`, popular ones more often (Zipf), in random order. chat: sessions of `count` turns on
    average that repeat all that was said, `num_tokens` of system prompt first, `pause` seconds apart. agent: the same
    with a pause of a second and tool results of the drawn input length as turns.
    """

    kind: PatternKind = "independent"
    count: int = 1
    num_tokens: int = 0
    per_request: int = 1
    pause: float = 10.0

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """From `independent`, `system:4:1500`, `few-shot:8:2000`, `rag:100:1000:3`, `chat:5:200:10` or
        `agent:12:3000`."""
        kind, *numbers = text.split(":")
        shapes = {"independent": (0,), "system": (2,), "few-shot": (2,), "rag": (3,), "chat": (3,), "agent": (2,)}
        if len(numbers) not in shapes.get(kind, ()):
            raise ConfigError(
                f"--pattern {text!r}: expected independent, system:COUNT:TOKENS, few-shot:COUNT:TOKENS, "
                f"rag:DOCUMENTS:TOKENS:PER_REQUEST, chat:TURNS:SYSTEM_TOKENS:PAUSE or agent:TURNS:SYSTEM_TOKENS"
            )
        values = [_positive(number, f"--pattern {text!r}") for number in numbers]
        if kind == "independent":
            return cls()
        count, num_tokens = int(values[0]), int(values[1])
        if kind == "rag":
            if values[2] > count:
                raise ConfigError(f"--pattern {text!r}: {values[2]:g} documents a request, but only {count} exist")
            return cls("rag", count, num_tokens, per_request=int(values[2]))
        pause = {"chat": values[-1], "agent": 1.0}.get(kind, 0.0)
        return cls(kind, count, num_tokens, pause=pause)  # type: ignore[arg-type]

    @property
    def has_sessions(self) -> bool:
        """Whether requests come as turns of sessions."""
        return self.kind in ("chat", "agent")


@dataclass(frozen=True, slots=True)
class SynthSpec:
    """A whole workload. `tenants` are (name, weight); the end is `num_requests` or `duration` (seconds), whichever
    first."""

    arrivals: Arrivals
    lengths: Lengths
    pattern: Pattern = Pattern()
    tenants: tuple[tuple[str, float], ...] = ()
    block_size: int = 16
    seed: int = 0
    num_requests: int | None = None
    duration: float | None = None

    def __post_init__(self) -> None:
        if self.num_requests is None and self.duration is None:
            raise ConfigError("a synthetic trace needs an end: give --requests or --duration")


def parse_tenants(text: str) -> tuple[tuple[str, float], ...]:
    """From `acme=2,initech=1`: requests are shared out by weight."""
    tenants = []
    for part in filter(None, text.split(",")):
        name, equals, weight = part.partition("=")
        tenants.append((name.strip(), _positive(weight, f"--tenants {text!r}") if equals else 1.0))
    return tuple(tenants)


def generate(spec: SynthSpec) -> Iterator[TraceRequest]:
    """The requests in time order. The same spec gives the same rows on every machine."""
    stream = _session_rows(spec) if spec.pattern.has_sessions else _single_rows(spec)
    for index, row in enumerate(stream):
        if spec.num_requests is not None and index >= spec.num_requests:
            return
        if spec.duration is not None and row.arrival_time >= spec.duration:
            return
        yield row


class _Draws:
    """The separate generators of one spec."""

    def __init__(self, spec: SynthSpec) -> None:
        seeds = np.random.SeedSequence(spec.seed).spawn(4)
        self.arrivals, self.lengths, self.sharing, self.tenants = (np.random.default_rng(seed) for seed in seeds)
        self._names = [name for name, _ in spec.tenants]
        total = sum(weight for _, weight in spec.tenants)
        self._shares = [weight / total for _, weight in spec.tenants]

    def tenant(self) -> str:
        return str(self.tenants.choice(self._names, p=self._shares)) if self._names else ""


def _single_rows(spec: SynthSpec) -> Iterator[TraceRequest]:
    draws, pattern = _Draws(spec), spec.pattern
    popularity = 1.0 / np.arange(1, pattern.count + 1)
    popularity /= popularity.sum()
    for index, at in enumerate(spec.arrivals.times(draws.arrivals)):
        own, output_len = spec.lengths(draws.lengths)
        segments: list[Segment] = []
        if pattern.kind == "rag":
            documents = draws.sharing.choice(pattern.count, size=pattern.per_request, replace=False, p=popularity)
            segments = [Segment(f"document-{d}", pattern.num_tokens) for d in documents.tolist()]
        elif pattern.kind != "independent":
            which = int(draws.sharing.integers(pattern.count))
            segments = [Segment(f"{pattern.kind}-{which}", pattern.num_tokens)]
        segments.append(Segment(f"own-{index}", own))
        yield _row(at, segments, output_len, spec.block_size, tenant=draws.tenant())


def _row(at: float, segments: Sequence[Segment], output_len: int, block_size: int, **whose: Any) -> TraceRequest:
    return TraceRequest(
        arrival_time=at,
        input_len=sum(segment.num_tokens for segment in segments),
        output_len=output_len,
        prefix_block_hash=segment_hashes(segments, block_size),
        **whose,
    )


def _session_rows(spec: SynthSpec) -> Iterator[TraceRequest]:
    """Sessions start at `rate / turns` a second, so that requests come at `rate`; turns of all sessions in time
    order."""
    draws, pattern = _Draws(spec), spec.pattern
    starts = Arrivals(spec.arrivals.kind, spec.arrivals.rate / pattern.count, spec.arrivals.a, spec.arrivals.b)
    waiting: list[tuple[float, int, TraceRequest]] = []
    order = 0
    for number, start in enumerate(starts.times(draws.arrivals)):
        while waiting and waiting[0][0] <= start:
            yield heapq.heappop(waiting)[2]
        for row in _session(spec, draws, number, start):
            order += 1
            heapq.heappush(waiting, (row.arrival_time, order, row))


def _session(spec: SynthSpec, draws: _Draws, number: int, start: float) -> Iterator[TraceRequest]:
    pattern, tenant, session = spec.pattern, draws.tenant(), f"s{number}"
    num_turns = int(draws.sharing.geometric(1.0 / pattern.count))
    segments = [Segment(f"{pattern.kind}-system", pattern.num_tokens)] if pattern.num_tokens else []
    at = start
    for turn in range(num_turns):
        said, output_len = spec.lengths(draws.lengths)
        segments.append(Segment(f"{session}-said-{turn}", said))
        yield _row(at, segments, output_len, spec.block_size, tenant=tenant, session=session, turn=turn)
        segments.append(Segment(f"{session}-answer-{turn}", output_len))
        at += float(draws.sharing.exponential(pattern.pause))


def _positive(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{what}: {text!r} is not a number") from None
    if not 0 < value < float("inf"):
        raise ConfigError(f"{what}: {text!r} must be positive")
    return value
