"""ServeGen client profiles (alibaba/ServeGen): each client is a rate curve and length distributions, per time window.

A profile is not a trace; it *generates* one, here seeded, so that the same seed gives the same requests on every
machine. For each client, `chunk-<i>-trace.csv` holds rows of (window start in seconds, requests a second, coefficient
of variation, family, shape, scale) and `chunk-<i>-dataset.json` maps window starts to the distributions of input and
output tokens, each written as the text of a Python dict {tokens: probability}. Windows without a row of their own in
the second file use the closest earlier one that has data.

Gaps are drawn from the named family (Gamma or Weibull with the given shape) and scaled to mean 1 / rate, which keeps
the stated rate even where the file's own scale was fitted on another unit. No family means Poisson.
"""

from __future__ import annotations

import ast
import heapq
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import gamma
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pellucid.workload.formats.source import Member, open_bytes
from pellucid.workload.trace import TraceError, TraceRequest

_ONLY_WIDTH = 600.0  # of a client with one window: as all that were published are
_PART = re.compile(r"([^/!]*)chunk-(\d+)-(trace\.csv|dataset\.json)$")


class Window(NamedTuple):
    """The arrivals of one client from `start` (seconds) on: mean `rate` a second, gaps of `family` with `shape`."""

    start: float
    rate: float
    family: str
    shape: float


class Lengths(NamedTuple):
    """A distribution of token counts: `values[i]` with probability `weights[i]` (they sum to 1)."""

    values: NDArray[np.int64]
    weights: NDArray[np.float64]


class Client(NamedTuple):
    """One client. `lengths` holds (window start, input, output), in time order."""

    name: str
    windows: tuple[Window, ...]
    lengths: tuple[tuple[float, Lengths, Lengths], ...]


def is_servegen(files: Sequence[Member]) -> bool:
    """Whether an archive holds ServeGen client files."""
    return any(_PART.search(member.label) for member in files)


def load_clients(files: Sequence[Member]) -> list[Client]:
    """All clients of an archive that have both files and at least one window with traffic, in the order of their
    names."""
    parts: dict[str, dict[str, Member]] = {}
    for member in files:
        if match := _PART.search(member.label):
            folder = member.label.rpartition("!")[2].rpartition("/")[0].rpartition("/")[2]
            parts.setdefault(f"{folder}/{int(match[2]):06d}", {})[match[3]] = member
    clients = [_load(name, pair) for name, pair in sorted(parts.items()) if len(pair) == 2]
    return [client for client in clients if client.lengths and any(w.rate > 0 for w in client.windows)]


def _load(name: str, pair: dict[str, Member]) -> Client:
    return Client(name, tuple(_windows(pair["trace.csv"])), tuple(_lengths(pair["dataset.json"])))


def _windows(member: Member) -> Iterator[Window]:
    with open_bytes(member.path) as data:
        for number, line in enumerate(data.read().decode().splitlines(), start=1):
            cells = line.split(",")
            try:
                start, rate, _, family, shape, _ = cells
                window = Window(float(start), float(rate), family, float(shape))
            except ValueError:
                raise TraceError(
                    f"{member.label}:{number}: {line!r}; expected window_start,rate,cv,family,shape,scale"
                ) from None
            if window.family not in ("", "Gamma", "Weibull"):
                raise TraceError(f"{member.label}:{number}: family {family!r}; expected Gamma, Weibull or nothing")
            yield window


def _lengths(member: Member) -> Iterator[tuple[float, Lengths, Lengths]]:
    with open_bytes(member.path) as data:
        windows = json.loads(data.read())
    for start in sorted(windows, key=float):
        sides = [_distribution(member, start, windows[start], side) for side in ("input_tokens", "output_tokens")]
        if sides[0] is not None and sides[1] is not None:
            yield float(start), sides[0], sides[1]


def _distribution(member: Member, start: str, window: dict[str, str], side: str) -> Lengths | None:
    try:
        table = ast.literal_eval(window[side])
        values = np.array(list(table), dtype=np.int64)
        weights = np.array(list(table.values()), dtype=np.float64)
    except (KeyError, ValueError, SyntaxError, TypeError, AttributeError):
        raise TraceError(
            f"{member.label}: window {start}: field {side!r}: expected the text of a dict of numbers"
        ) from None
    if not len(values):
        return None
    if weights.min() < 0 or not weights.sum() > 0:
        raise TraceError(f"{member.label}: window {start}: field {side!r}: expected probabilities of 0 or more")
    return Lengths(values, weights / weights.sum())


def generate(
    clients: Sequence[Client], *, seed: int, start: float = 0.0, duration: float | None = None
) -> Iterator[TraceRequest]:
    """Requests of all clients in time order over [start, start + duration), with times counted from `start`.

    Each client draws from its own generator, derived from the seed and its position, so adding a client at the end
    leaves the others' requests as they were.
    """
    if not clients:
        raise TraceError("no ServeGen client with traffic; expected chunk-<i>-trace.csv beside chunk-<i>-dataset.json")
    end = float("inf") if duration is None else start + duration
    streams = [_client_stream(c, np.random.default_rng([seed, i]), start, end) for i, c in enumerate(clients)]
    return heapq.merge(*streams, key=lambda request: request.arrival_time)


def expected_requests(clients: Sequence[Client]) -> float:
    """How many requests the clients make over all their windows, on average: rate times width, summed."""
    return sum(window.rate * width for client in clients for window, width in _with_widths(client.windows))


def _client_stream(client: Client, rng: np.random.Generator, start: float, end: float) -> Iterator[TraceRequest]:
    windows = client.windows
    known = [at for at, _, _ in client.lengths]
    for window, width in _with_widths(windows):
        low, high = max(start, window.start), min(end, window.start + width)
        if window.rate <= 0 or low >= high:
            continue
        times = _arrivals(window, rng, width) + window.start
        _, inputs, outputs = client.lengths[max(0, bisect_right(known, window.start) - 1)]
        input_lens = rng.choice(inputs.values, size=len(times), p=inputs.weights)
        output_lens = rng.choice(outputs.values, size=len(times), p=outputs.weights)
        keep = (times >= low) & (times < high)
        for at, input_len, output_len in zip(
            times[keep].tolist(), input_lens[keep].tolist(), output_lens[keep].tolist()
        ):
            yield TraceRequest(arrival_time=at - start, input_len=input_len, output_len=output_len, tenant=client.name)


def _with_widths(windows: Sequence[Window]) -> Iterator[tuple[Window, float]]:
    """Each window and how long it lasts; the last one as long as that before it."""
    starts = [window.start for window in windows]
    last = starts[-1] - starts[-2] if len(windows) > 1 else _ONLY_WIDTH
    yield from zip(windows, [b - a for a, b in pairwise(starts)] + [last])


def _arrivals(window: Window, rng: np.random.Generator, width: float) -> NDArray[np.float64]:
    """Arrival times in [0, width). The first gap counts from the window's start."""
    count = int(window.rate * width * 1.2) + 16
    pieces: list[NDArray[np.float64]] = []
    at = 0.0
    while at < width:
        pieces.append(at + np.cumsum(_gaps(window, rng, count)))
        at = float(pieces[-1][-1])
    times = np.concatenate(pieces)
    return times[times < width]


def _gaps(window: Window, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    mean = 1.0 / window.rate
    if window.family == "Gamma" and window.shape > 0:
        return rng.gamma(window.shape, mean / window.shape, count)
    if window.family == "Weibull" and window.shape > 0:
        return rng.weibull(window.shape, count) * (mean / gamma(1.0 + 1.0 / window.shape))
    return rng.exponential(mean, count)
