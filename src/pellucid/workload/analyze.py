"""What a trace says before anything is served: lengths, arrivals, sessions, prefix reuse by every name it goes by, and
the time that no engine could beat.

One pass collects a few numbers a row; block uses are sampled beyond a bound (`prefix.py`). The arithmetic of models and
devices is not here: an object satisfying `Ceilings` is handed in, so the same formulas serve the planner, the simulator
and this page.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pellucid.workload import prefix
from pellucid.workload.formats import TraceFile
from pellucid.workload.own_cache import own_mask
from pellucid.workload.trace import PROGRESS_ROWS, Progress, TraceError, TraceRequest, chain_hashes

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LADDER_ROWS = 50_000
LATER_TURN_KEYS = 4_000_000
MAX_DEVICES = 4096
_RATE_BINS = 200
_WINDOWS = (1.0, 10.0, 60.0)


class Rung(NamedTuple):
    """A step of the ladder: a name, the device-seconds that it demands, the two ceilings it is the larger of (None
    where it looks at one only), and what it takes into account."""

    name: str
    device_seconds: float
    compute_seconds: float | None
    memory_seconds: float | None
    meaning: str


class Room(NamedTuple):
    """KV tokens that fit beside the weights on a number of devices, and how many copies of the weights those hold."""

    kv_tokens: int
    num_replicas: int


class Ceilings(Protocol):
    """A model on a kind of device, as the planner knows it."""

    def rungs(self, requests: Iterable[tuple[int, int, int]], batch: float) -> Sequence[Rung]:
        """Four rungs for requests of (input, output, cached input) tokens: 2 FLOPs a parameter, and attention, and
        bandwidth, and the weights once a step of `batch` sequences."""
        ...

    def room(self, num_devices: int, context: int) -> Room:
        """How sequences of `context` tokens fit (no tokens: the weights do not fit)."""
        ...


class Columns:
    """The columns of a trace that fit in memory whatever its size: about 24 bytes a row and a sample of block uses."""

    def __init__(self, block_size: int, limit: int | None) -> None:
        self.times = array("d")
        self.inputs = array("q")
        self.outputs = array("q")
        self.uses = prefix.AccessCollector(block_size, limit)
        self.tenants: Counter[str] = Counter()
        self.turns: Counter[str] = Counter()
        self.later_turns = _LaterTurns(block_size)

    def add(self, row: TraceRequest) -> None:
        """Take the next row."""
        self.times.append(row.arrival_time)
        self.inputs.append(row.input_len)
        self.outputs.append(row.output_len)
        self.uses.add(row)
        self.later_turns.add(row)
        if row.tenant:
            self.tenants[row.tenant] += 1
        if row.session:
            self.turns[row.session] += 1


class _LaterTurns:
    """Reuse with generated tokens of earlier turns: exact where token ids are known, else assumed from session ids.

    With token ids the blocks of prompt and answer together enter the cache. With sessions only, a later turn that is
    at least as long as everything before it is taken to begin with all of it. Traces with neither, or with more blocks
    than can be kept, get no figure.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_cached = 0
        self.num_tokens = 0
        self.basis: str | None = None
        self._seen: set[int | str] = set()
        self._spoken: dict[str, int] = {}
        self._given_up = False

    def add(self, row: TraceRequest) -> None:
        if self._given_up:
            return
        has_tokens = row.input_token_ids is not None and row.output_token_ids is not None and self.block_size > 0
        if not has_tokens and not row.session:
            self._give_up("the trace has neither output token ids nor sessions")
            return
        hashes = row.prefix_block_hash
        num_hits = self._num_hits(hashes)
        cached = num_hits * self.block_size
        if row.input_token_ids is not None and row.output_token_ids is not None and self.block_size:
            self.basis = "token ids"
            self._seen.update(chain_hashes(row.input_token_ids + row.output_token_ids, self.block_size))
        else:
            self.basis = "sessions (assumed)"
            self._seen.update(hashes[num_hits:])
            before = self._spoken.get(row.session, 0)
            cached = max(cached, before if row.input_len >= before else 0)
            self._spoken[row.session] = row.input_len + row.output_len
        self.num_cached += min(cached, max(0, row.input_len - 1))
        self.num_tokens += row.input_len
        if len(self._seen) + len(self._spoken) > LATER_TURN_KEYS:
            self._give_up(f"more than {LATER_TURN_KEYS:,} blocks and sessions")

    def _num_hits(self, hashes: Sequence[int | str]) -> int:
        """Leading blocks that were seen. Ids chain, so a seen block has all before it seen: halving finds the end."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if hashes[middle] in self._seen else (low, middle)
        return low

    def _give_up(self, why: str) -> None:
        self._given_up = True
        self.basis = why
        self._seen.clear()
        self._spoken.clear()

    def document(self) -> dict[str, Any]:
        """The rate, and what it rests on or why there is none."""
        rate = None if self._given_up or not self.num_tokens else self.num_cached / self.num_tokens
        return {"rate": rate, "basis": self.basis}


class Analysis(NamedTuple):
    """`document` is what `--json` prints; `figures` holds series for plots."""

    document: dict[str, Any]
    figures: dict[str, Any]


class Question(NamedTuple):
    """What is asked of a trace. `exact` keeps every block use. `cache_sizes` (tokens) replaces the curve's own choice.
    `engine_block` is the block size of the engine that one has in mind. `ceilings` None leaves the ladder out."""

    exact: bool = False
    cache_sizes: tuple[int, ...] = ()
    engine_block: int = 16
    ceilings: Ceilings | None = None


def read_columns(trace: TraceFile, *, exact: bool, progress: Progress = lambda stage, share: None) -> Columns:
    """Read a whole trace."""
    columns = Columns(trace.header.block_size, None if exact else prefix.SAMPLE_ACCESSES)
    for number, row in enumerate(trace):
        columns.add(row)
        if number % PROGRESS_ROWS == 0:
            progress("reading", trace.share_read)
    if not columns.times:
        raise TraceError(f"{trace.path}: no request to analyse")
    return columns


def analyze(trace: TraceFile, question: Question, progress: Progress = lambda stage, share: None) -> Analysis:
    """Everything about a trace. Rows out of time order are put in order first, and the document says so."""
    columns = read_columns(trace, exact=question.exact, progress=progress)
    times = np.array(columns.times)
    in_order = bool((np.diff(times) >= 0).all())
    order = np.arange(len(times)) if in_order else np.argsort(times, kind="stable")
    times, inputs, outputs = times[order], np.array(columns.inputs)[order], np.array(columns.outputs)[order]
    accesses = columns.uses.result(None if in_order else order)
    reuse = _reuse(columns, accesses, question, progress)
    span = float(times[-1] - times[0])
    document: dict[str, Any] = {
        "trace": str(trace.path),
        "format": trace.format_name,
        "origin": trace.header.origin,
        "transforms": list(trace.header.transforms),
        "num_requests": len(times),
        "num_skipped": trace.num_skipped,
        "sorted": in_order,
        "span_seconds": span,
        "lengths": {"input": _distribution(inputs), "output": _distribution(outputs)},
        "arrivals": _arrivals(times),
        "tenants": dict(columns.tenants.most_common(50)),
        "sessions": _sessions(columns.turns),
        "prefix": reuse,
    }
    figures = {"times": _rate_series(times), "inputs": _histogram(inputs), "outputs": _histogram(outputs)}
    figures["reuse_distance"] = _distance_histogram(accesses, trace.header.block_size)
    if question.ceilings is not None:
        work = _Work(inputs, outputs, accesses, trace.header.block_size, span)
        document |= _ladder(work, question.ceilings, progress)
    return Analysis(document, figures)


def _distribution(values: Ints) -> dict[str, float]:
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    return {
        "sum": int(values.sum()),
        "mean": float(values.mean()),
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "max": int(values.max()),
        "num_zero": int((values == 0).sum()),
    }


def _arrivals(times: Floats) -> dict[str, Any]:
    """Rate and burstiness. `dispersion` is the variance of counts per window over their mean: 1 for Poisson."""
    span = times[-1] - times[0]
    if not span > 0:
        return {"requests_per_second": None, "gap_cv": None, "dispersion": {}, "peak_requests_per_second": None}
    gaps = np.diff(times)
    dispersion = {}
    for width in _WINDOWS:
        if span >= 10 * width:
            counts = np.bincount(((times - times[0]) / width).astype(np.int64))[: int(span / width)]
            dispersion[f"{width:g}s"] = float(counts.var() / counts.mean())
    busiest = np.bincount(((times - times[0]) / 10.0).astype(np.int64))
    return {
        "requests_per_second": float(len(gaps) / span),
        "gap_cv": float(gaps.std() / gaps.mean()),
        "dispersion": dispersion,
        "peak_requests_per_second": float(busiest.max() / min(10.0, span)),
    }


def _sessions(turns: Counter[str]) -> dict[str, Any]:
    if not turns:
        return {"num_sessions": 0}
    counts = np.array(list(turns.values()))
    return {
        "num_sessions": len(counts),
        "turns_mean": float(counts.mean()),
        "turns_p90": float(np.percentile(counts, 90)),
        "turns_max": int(counts.max()),
    }


def _reuse(columns: Columns, accesses: prefix.Accesses, question: Question, progress: Progress) -> dict[str, Any]:
    """Hit rates by each definition, their bounds for another block size, and the capacity curve."""
    block_size = columns.uses.block_size
    with_generated = columns.later_turns.document()
    if not accesses.num_accesses:
        unknown = "the trace has no block hashes and no token ids"
        return {
            "token_hit_infinite": None,
            "block_hit_infinite": None,
            "unknown_because": unknown,
            "with_generated": with_generated,
            "curve": [],
        }
    rates = prefix.infinite_hit_rates(accesses, columns.uses.num_requests, block_size)
    sizes = list(question.cache_sizes) or prefix.curve_sizes(accesses, block_size, max(columns.inputs))
    curve = prefix.capacity_curve(
        accesses, block_size, sizes, own=own_mask, progress=lambda share: progress("capacity curve", share)
    )
    return {
        "block_size": block_size,
        "sampled": accesses.rate < 1.0,
        "sampling_rate": accesses.rate,
        "token_hit_infinite": rates.token,
        "block_hit_infinite": rates.block,
        "engine_hit_infinite": rates.engine,
        "request_hit_infinite": rates.request,
        "with_generated": with_generated,
        "bounds": _bounds(columns, accesses, question.engine_block, rates.engine),
        "distinct_tokens": len(np.unique(accesses.ids)) / accesses.rate * block_size,
        "curve": [{name: value for name, value in p._asdict().items() if value is not None} for p in curve],
    }


def _bounds(columns: Columns, accesses: prefix.Accesses, engine_block: int, found: float) -> dict[str, Any]:
    """What the trace's blocks can and cannot say about an engine whose blocks have another size.

    Two prompts that share k trace blocks share at least k * B tokens and fewer than (k + 1) * B. For smaller engine
    blocks the rate lies between; for larger ones every hit is rounded down to whole engine blocks.
    """
    block_size, total = columns.uses.block_size, max(1, accesses.num_tokens)
    if accesses.rate < 1.0:
        return {"engine_block": engine_block, "lower": None, "upper": None, "unknown_because": "sampled; use --exact"}
    cached = prefix.cached_tokens_by_request(accesses, prefix.infinite_mask(accesses), columns.uses.num_requests)
    inputs = np.zeros(len(cached), np.int64)
    np.add.at(inputs, accesses.request, accesses.tokens)
    if engine_block == block_size:
        return {"engine_block": engine_block, "lower": found, "upper": found}
    most = np.minimum(cached + block_size - 1, np.maximum(inputs - 1, 0)) // engine_block * engine_block
    least = cached // engine_block * engine_block
    return {
        "engine_block": engine_block,
        "lower": float(least.sum() / total),
        "upper": float(np.maximum(most, least).sum() / total),
    }


Weighted = tuple[list[tuple[int, int, int]], float]
"""Requests of (input, output, cached) tokens, and how often each counts in a sum."""


class _Work(NamedTuple):
    """What the ladder is computed from."""

    inputs: Ints
    outputs: Ints
    accesses: prefix.Accesses
    block_size: int
    span: float

    def pieces(self, hits: NDArray[np.bool_] | None) -> list[Weighted]:
        """Requests whose weighted sum is the work of the trace under these cache hits.

        With all uses known that is every request with its cached tokens. With a sample of uses, it is every request
        without a cache, and for each hit found what its block saves: the request with the prefix up to and including
        that block cached, less the request with the prefix before it, weighted by the inverse of the sampling rate.
        The sample's surplus goes to first blocks.
        """
        if hits is None or not len(self.accesses.ids):
            return [self._requests(np.zeros(len(self.inputs), np.int64))]
        if self.accesses.rate == 1.0:
            return [self._requests(prefix.cached_tokens_by_request(self.accesses, hits, len(self.inputs)))]
        uses = np.flatnonzero(hits & self.accesses.legal)
        found = self._savings(self.accesses.request[uses], self.accesses.position[uses], 1.0 / self.accesses.rate)
        first = np.flatnonzero(self.inputs > self.block_size)
        share = self.accesses.surplus / self.accesses.rate / max(1, len(first))
        corrected = self._savings(first, np.zeros(len(first), np.int64), share)
        return [self._requests(np.zeros(len(self.inputs), np.int64)), *found, *corrected]

    def _requests(self, cached: Ints) -> Weighted:
        usable = np.flatnonzero((self.inputs > 0) & (self.outputs > 0))
        picked = usable[:: max(1, -(-len(usable) // LADDER_ROWS))]
        weight = float(self.outputs[usable].sum() / max(1, self.outputs[picked].sum()))
        return self._rows(picked, np.minimum(cached, np.maximum(self.inputs - 1, 0))[picked]), weight

    def _savings(self, requests: Ints, position: Ints, weight: float) -> list[Weighted]:
        """What caching the block at `position` of each request saves, once the blocks before it are cached."""
        usable = np.flatnonzero(self.outputs[requests] > 0)
        picked = usable[:: max(1, -(-len(usable) // LADDER_ROWS))]
        if not len(picked):
            return []
        weight *= len(usable) / len(picked)
        before = position[picked] * self.block_size
        with_block = self._rows(requests[picked], before + self.block_size)
        return [(with_block, weight), (self._rows(requests[picked], before), -weight)]

    def _rows(self, requests: Ints, cached: Ints) -> list[tuple[int, int, int]]:
        return list(zip(self.inputs[requests].tolist(), self.outputs[requests].tolist(), cached.tolist()))


def _ladder(work: _Work, ceilings: Ceilings, progress: Progress) -> dict[str, Any]:
    """The rungs in device-seconds, the least number of devices, and what a perfect scheduler could reach on them."""
    context = _decode_context(work)
    no_reuse = _rungs(work, ceilings, None, 1.0)[:3]
    ideal = _rungs(work, ceilings, prefix.infinite_mask(work.accesses), 1.0)[:3]
    ladder = [{**rung, "cache": "infinite"} for rung in ideal]
    document: dict[str, Any] = {"ladder_no_reuse": no_reuse, "ladder": ladder}
    num_devices = _least_devices(work, ceilings, context, progress)
    if isinstance(num_devices, str):
        document["ladder_stops_because"] = num_devices
        return document
    for name, what, policy in _MEMORY_RUNGS:
        ladder.append(_memory_rung(work, ceilings, num_devices, policy) | {"rung": name})
        ladder[-1]["cache"] = f"{what} {ceilings.room(num_devices, context).kv_tokens:,} tokens"
    ladder[-1]["device_seconds"] = max(ladder[-1]["device_seconds"], ladder[-2]["device_seconds"])
    for rung in ladder + no_reuse:
        rung["devices_for_span"] = rung["device_seconds"] / work.span if work.span > 0 else None
    per_second = num_devices / ladder[-1]["device_seconds"]
    document["num_devices"] = num_devices
    document["perfect_scheduler"] = {
        "output_tokens_per_second": float(work.outputs.sum() * per_second),
        "requests_per_second": len(work.outputs) * per_second,
        "trace_speed": work.span * per_second if work.span > 0 else None,
    }
    return document


_MEMORY_RUNGS: tuple[tuple[str, str, prefix.Policy], ...] = (
    ("capacity", "Belady's optimum in", prefix.belady_mask),
    ("policy", "Pellucid's block manager in", own_mask),
)


def _least_devices(work: _Work, ceilings: Ceilings, context: int, progress: Progress) -> int | str:
    """The fewest devices that hold the weights and get through the trace in its own time with an LRU cache of what is
    left (which is what Pellucid's policy comes to); where the trace has no clock, that hold the weights. Or why none
    do."""
    counts = [1 << i for i in range(MAX_DEVICES.bit_length())]
    fitting = [n for n in counts if ceilings.room(n, context).kv_tokens > 0]
    if not fitting:
        return f"the weights do not fit on {MAX_DEVICES} devices"
    if not work.span > 0:
        return fitting[0]

    def suffices(num_devices: int) -> bool:
        progress("ladder", 0.5)
        rung = _memory_rung(work, ceilings, num_devices, prefix.lru_mask)
        return bool(rung["device_seconds"] <= work.span * num_devices)

    high = next((n for n in fitting if suffices(n)), None)
    if high is None:
        return f"{MAX_DEVICES} devices are too few for this trace at its own speed"
    low = high // 2 if high > fitting[0] else high - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def _decode_context(work: _Work) -> int:
    """The mean context over all decode steps: sum of out * (in + out / 2) over sum of out."""
    total = max(1, int(work.outputs.sum()))
    return max(1, int((work.outputs * (work.inputs + work.outputs / 2)).sum() / total))


def _memory_rung(work: _Work, ceilings: Ceilings, num_devices: int, policy: prefix.Policy) -> dict[str, Any]:
    """The last rung with the memory there is: as a cache under `policy`, and as room for sequences at a time.

    The whole room counts for both, and replicas as if each request found its own prefix: a ceiling, not a forecast.
    """
    context = _decode_context(work)
    room = ceilings.room(num_devices, context)
    batch = max(1.0, room.kv_tokens / room.num_replicas / context)
    num_blocks = int(room.kv_tokens // work.block_size * work.accesses.rate) if work.block_size else 0
    return {**_rungs(work, ceilings, policy(work.accesses, num_blocks), batch)[3], "batch": batch}


def _rungs(work: _Work, ceilings: Ceilings, hits: NDArray[np.bool_] | None, batch: float) -> list[dict[str, Any]]:
    """The planner's rungs for the work under these hits. Seconds add up over requests; the larger ceiling of the sums
    decides."""
    parts = [(ceilings.rungs(rows, batch), weight) for rows, weight in work.pieces(hits)]
    found = []
    for index, rung in enumerate(parts[0][0]):
        seconds = {
            name: sum(weight * (getattr(rungs[index], name) or 0.0) for rungs, weight in parts)
            for name in ("compute_seconds", "memory_seconds")
            if getattr(rung, name) is not None
        }
        found.append({"rung": rung.name, "device_seconds": max(seconds.values()), **seconds, "meaning": rung.meaning})
    return found


def _rate_series(times: Floats) -> dict[str, list[float]]:
    span = max(float(times[-1] - times[0]), 1e-9)
    counts, edges = np.histogram(times - times[0], bins=_RATE_BINS, range=(0.0, span))
    return {"seconds": edges[:-1].tolist(), "requests_per_second": (counts / (span / _RATE_BINS)).tolist()}


def _histogram(values: Ints) -> dict[str, list[float]]:
    top = max(2.0, float(values.max()))
    edges = np.unique(np.geomspace(1, top + 1, 60).astype(np.int64))
    counts, edges = np.histogram(values, bins=edges)
    return {"edges": edges.tolist(), "num_requests": counts.tolist()}


def _distance_histogram(accesses: prefix.Accesses, block_size: int) -> dict[str, list[float]]:
    distances = prefix.reuse_distances(accesses)
    again = distances[distances >= 0] / accesses.rate * block_size
    if not len(again):
        return {"edges": [], "share": []}
    edges = np.geomspace(max(1, block_size), max(again.max(), block_size) * 1.01, 60)
    counts, edges = np.histogram(np.maximum(again, edges[0]), bins=edges)
    return {"edges": edges.tolist(), "share": (counts / len(distances)).tolist()}
