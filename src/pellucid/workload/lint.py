"""What is wrong with a trace, what that does to a result, and which transform mends it.

One pass, a few numbers per row. Block ids are sampled by their own hash where there are very many, so a finding about
ids may name a share but never needs all of them in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pellucid.workload.formats import TraceFile
from pellucid.workload.prefix import numeric_ids
from pellucid.workload.trace import PROGRESS_ROWS, Progress, TraceRequest

UNIFORM_BELOW_CV = 0.2
QUANTISED_FROM_SHARE = 0.02
MIN_ROWS_FOR_CLOCK = 50
_ID_BITS = 20


class Finding(NamedTuple):
    """One defect. `place` is the first row that shows it (empty when the trace as a whole does). `mend` is the command
    that mends it; empty where only the source can."""

    code: str
    num_rows: int
    place: str
    message: str
    consequence: str
    mend: str


class LintReport(NamedTuple):
    """All findings, and how many rows were looked at and skipped."""

    num_requests: int
    num_skipped: int
    findings: tuple[Finding, ...]


class _Tally:
    """How many rows show a defect, and the first of them."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.place = ""
        self.detail = ""

    def add(self, place: str, detail: str) -> None:
        if not self.num_rows:
            self.place, self.detail = place, detail
        self.num_rows += 1


class _RowChecks:
    """Defects that one row shows by itself, or against the row before."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tallies = {name: _Tally() for name in ("negative-time", "unsorted", "zero-length", "hash-count")}
        self.last_time = float("-inf")

    def look(self, place: str, row: TraceRequest) -> None:
        if row.arrival_time < 0:
            self.tallies["negative-time"].add(place, f"arrival_time {row.arrival_time:g}")
        if row.arrival_time < self.last_time:
            self.tallies["unsorted"].add(place, f"arrival_time {row.arrival_time:g} after {self.last_time:g}")
        self.last_time = row.arrival_time
        if not row.input_len or not row.output_len:
            self.tallies["zero-length"].add(place, f"input_len {row.input_len}, output_len {row.output_len}")
        if row.prefix_block_hash and self.block_size:
            expected = row.input_len // self.block_size
            if len(row.prefix_block_hash) != expected:
                found = f"{len(row.prefix_block_hash)} block ids for {row.input_len} tokens, not {expected}"
                self.tallies["hash-count"].add(place, found)

    def findings(self) -> Iterator[Finding]:
        for code, (consequence, mend) in _ROW_TEXTS.items():
            tally = self.tallies[code]
            if tally.num_rows:
                yield Finding(code, tally.num_rows, tally.place, tally.detail, consequence, mend)


_ROW_TEXTS = {
    "negative-time": (
        "an open-loop replay would have to send before it starts",
        "trace slice --start 0, or trace convert --from-zero",
    ),
    "unsorted": (
        "prefix reuse depends on order, and a replay sends rows late; analysis sorts first",
        "trace convert --sort",
    ),
    "zero-length": (
        "an engine refuses an empty prompt, and a request without output has no TPOT and usually marks a failure",
        "trace sample --drop-empty",
    ),
    "hash-count": (
        "hit rates count blocks that the prompt does not have, or miss some that it has",
        "",
    ),
}


def lint(trace: TraceFile, progress: Progress = lambda stage, share: None) -> LintReport:
    """Read the whole trace and report. Raises TraceError where it cannot be read at all."""
    checks = _RowChecks(trace.header.block_size)
    times, digests = array("d"), array("q")
    pairs = _Pairs()
    for place, row in trace.placed():
        checks.look(place, row)
        times.append(row.arrival_time)
        digests.append(hash((row.arrival_time, row.input_len, row.output_len, row.prefix_block_hash, row.session)))
        pairs.add(numeric_ids(row.prefix_block_hash))
        if len(times) % PROGRESS_ROWS == 0:
            progress("reading", trace.share_read)
    findings = [*checks.findings()]
    findings += _clock(np.array(times))
    findings += _duplicates(np.array(digests))
    findings += pairs.findings()
    return LintReport(len(times), trace.num_skipped, tuple(findings))


def _clock(times: NDArray[np.float64]) -> Iterator[Finding]:
    """Ticks, a missing clock, and arrivals too even to be real."""
    if len(times) < 2:
        return
    times = np.sort(times)
    gaps = np.diff(times)
    if not times[-1] > times[0]:
        yield Finding(
            "no-clock",
            len(times),
            "",
            f"all {len(times)} requests arrive at {times[0]:g} s",
            "arrival rate, burstiness and queueing cannot be studied; a replay is one burst",
            "trace synth --lengths-from FILE --arrivals poisson --rate R",
        )
        return
    if len(times) < MIN_ROWS_FOR_CLOCK:
        return
    tied = int((gaps == 0).sum())
    tick = clock_tick(times)
    if tied / len(gaps) >= QUANTISED_FROM_SHARE and tick is not None:
        largest = int(np.unique(times, return_counts=True)[1].max())
        yield Finding(
            "quantised-clock",
            tied,
            "",
            f"times tick every {tick:g} s; up to {largest} requests share an instant",
            "a raw replay sends bursts that were never measured and inflates TTFT percentiles",
            "trace dequantize --seed 0",
        )
    elif gaps.mean() > 0 and gaps.std() / gaps.mean() < UNIFORM_BELOW_CV:
        yield Finding(
            "uniform-arrivals",
            len(times),
            "",
            f"gaps vary by only {gaps.std() / gaps.mean():.3f} of their mean (1 for a Poisson process)",
            "queueing is understated: real users arrive in bursts",
            "trace synth --lengths-from FILE --arrivals poisson --rate R",
        )


def clock_tick(times: NDArray[np.float64]) -> float | None:
    """The step (at least a millisecond) that a coarse clock moves in, jitter of up to 2 % allowed; None for a fine
    clock.

    The candidate is a small gap between distinct times; it is the tick if nearly all gaps are multiples of it.
    """
    gaps = np.diff(np.unique(times))
    if not len(gaps):
        return None
    candidate = float(np.quantile(gaps, 0.1))
    if candidate < 1e-3:
        return None
    multiples = gaps / candidate
    near = np.abs(multiples - np.round(multiples)) <= 0.02 * np.maximum(1.0, np.round(multiples))
    if near.mean() < 0.95 or np.quantile(multiples, 0.9) > 20:
        return None
    return float(np.median(gaps[np.round(multiples) == 1]))


def _duplicates(digests: NDArray[np.int64]) -> Iterator[Finding]:
    repeats = len(digests) - len(np.unique(digests))
    if repeats:
        yield Finding(
            "duplicate-rows",
            repeats,
            "",
            f"{repeats} rows repeat another row in time, lengths and blocks",
            "load and hit rate are overstated if a log was joined or read twice",
            "trace sample --drop-duplicates",
        )


class _Pairs:
    """Checks that ids chain: an id must always follow the same predecessor. Samples ids by value to bound memory."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}
        self._shift = 0
        self.num_rows = 0
        self.example = ""

    def add(self, ids: Sequence[int]) -> None:
        broken = False
        parent = -1
        for block in ids:
            if block & ((1 << self._shift) - 1) == 0:
                known = self._parents.setdefault(block, parent)
                if known != parent:
                    broken = True
                    self.example = self.example or f"block {block} follows {known} in one row and {parent} in another"
            parent = block
        self.num_rows += broken
        if len(self._parents) > 1 << _ID_BITS:
            self._shift += 1
            self._parents = {k: v for k, v in self._parents.items() if k & ((1 << self._shift) - 1) == 0}

    def findings(self) -> Iterator[Finding]:
        if self.num_rows:
            yield Finding(
                "unchained-hashes",
                self.num_rows,
                "",
                self.example,
                "equal blocks after different prefixes look like hits that no engine can take",
                "trace convert --chain-hashes",
            )
