"""One run against another: ratios with intervals, paired by request where both were sent the same load.

Requests of two runs are pairs when the schedules have equal digests: then request i is the same request, and the
median of its ratios says more than the ratio of the medians. Intervals are 95 % percentile bootstraps over requests,
seeded. One run each says nothing about the next day: repeat, interleaved, before believing a difference
(docs/benchmarking.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from pellucid.workload.client import BenchError
from pellucid.workload.metrics import Clocking, RequestRecord

RESAMPLES = 1000
_MAX_CELLS = 2_000_000
MIN_PAIRS = 5
Floats = NDArray[np.float64]


class Run(NamedTuple):
    """A run as written by `pellucid bench -o`: its summary and its requests."""

    path: str
    document: dict[str, Any]
    records: list[RequestRecord]

    @property
    def label(self) -> str:
        """The file's name without what every run of this load has in it."""
        return Path(self.path).stem.removesuffix(f"-{self.document['workload']}")


def by_workload(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of the same load together, in the order given. Raises BenchError where a run has no other to compare
    with."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.document["workload"], []).append(run)
    for workload, (base, *others) in found.items():
        if not others:
            raise BenchError(f"{base.path} is the only run of {workload!r} given; only runs of the same load compare")
    return found


def load_run(path: Path) -> Run:
    """Read STEM.json and STEM.requests.jsonl beside it. Raises BenchError where either is missing or of another
    shape."""
    beside = path.with_name(path.name.removesuffix(".json") + ".requests.jsonl")
    try:
        document = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        decode = msgspec.json.Decoder(RequestRecord).decode
        records = [decode(line) for line in beside.read_bytes().splitlines()]
        for needed in ("loop", "workload", "target", "highlights"):
            document[needed]
    except OSError as error:
        raise BenchError(
            f"cannot read {error.filename}: {error.strerror}; `pellucid bench -o` writes both files"
        ) from None
    except (msgspec.DecodeError, KeyError) as error:
        raise BenchError(f"{path} is not a run written by `pellucid bench -o` ({error})") from None
    return Run(str(path), document, records)


_METRICS: dict[str, Callable[[RequestRecord, Clocking], float | None]] = {
    "ttft": lambda record, clocking: clocking.ttft(record),
    "tpot": lambda record, clocking: record.tpot(),
    "stall": lambda record, clocking: record.stall(),
    "e2e": lambda record, clocking: clocking.e2e(record),
}


def compare_all(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Each run against the first one of the same workload. Raises BenchError where a run has no other to compare
    with."""
    return [compare_runs(base, other) for base, *others in by_workload(runs).values() for other in others]


class RatioRow(NamedTuple):
    """One figure of two runs: how many values it rests on (None where it is one number), both sides, their ratio with
    its interval where there is one, and whether the sides are seconds."""

    name: str
    n: int | None
    base: float | None
    other: float | None
    ratio: float | None
    low: float | None
    high: float | None
    in_seconds: bool


def ratio_rows(comparison: dict[str, Any]) -> list[RatioRow]:
    """A comparison as the rows of a table: distributions, throughput, and what the load exists for."""
    rows = []
    for name, found in comparison["ratios"].items():
        percentiles = (key for key in ("p50", "p99") if key in found)
        rows += [_row(f"{name} {key}", found["n"], found[key], in_seconds=True) for key in percentiles]
        if "paired_median_ratio" in found:
            rows.append(_row(f"{name}, median of pairs", found["n"], found["paired_median_ratio"], in_seconds=True))
        if "base" in found:
            rows.append(_row(name.replace("_", " "), None, found, in_seconds=False))
    for name, found in comparison["highlights"].items():
        rows.append(_row(name.replace("_", " "), None, found, in_seconds=found["seconds"]))
    return rows


def pairing(comparison: dict[str, Any]) -> str:
    """Whether requests were compared one by one, in words."""
    return "the same requests, paired" if comparison["paired"] else "no common schedule, not paired"


def _row(name: str, n: int | None, found: dict[str, Any], *, in_seconds: bool) -> RatioRow:
    base, other, ratio, low, high = (found.get(key) for key in ("base", "other", "ratio", "low", "high"))
    return RatioRow(name, n, base, other, ratio, low, high, in_seconds)


def compare_runs(base: Run, other: Run) -> dict[str, Any]:
    """Ratios other / base. Raises BenchError where one is open loop and the other closed."""
    if base.document["loop"] != other.document["loop"]:
        raise BenchError(
            f"{base.path} and {other.path} differ in loop ({base.document['loop']} and {other.document['loop']}); "
            f"only runs of the same load compare"
        )
    digest = base.document.get("schedule_sha256")
    paired = digest is not None and digest == other.document.get("schedule_sha256")
    clocking = Clocking(base.document["loop"] == "open")
    ratios = {name: _metric_ratio(base, other, clocking, read, paired) for name, read in _METRICS.items()}
    for name in ("output_tokens_per_second", "goodput"):
        ratios[name] = _plain_ratio(base.document[name], other.document[name])
    return {
        "workload": base.document["workload"],
        "base": base.path,
        "other": other.path,
        "base_target": base.document["target"],
        "other_target": other.document["target"],
        "paired": paired,
        "valid": bool(base.document.get("valid")) and bool(other.document.get("valid")),
        "ratios": ratios,
        "highlights": _highlight_ratios(base.document["highlights"], other.document["highlights"]),
    }


def _highlight_ratios(base: dict[str, Any], other: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The figures that the workload exists for, without intervals: a number, or percentiles of a distribution."""
    ratios = {}
    for name in base.keys() & other.keys():
        before, after = base[name], other[name]
        if isinstance(before, dict) and isinstance(after, dict):
            for key in ("p50", "p90", "p99"):
                ratios[f"{name} {key}"] = _plain_ratio(before.get(key), after.get(key)) | {"seconds": True}
        else:
            ratios[name] = _plain_ratio(before, after) | {"seconds": name.endswith("_seconds")}
    return dict(sorted(ratios.items()))


def _plain_ratio(base: float | None, other: float | None) -> dict[str, Any]:
    return {"base": base, "other": other, "ratio": other / base if base and other is not None else None}


def _metric_ratio(
    base: Run, other: Run, clocking: Clocking, read: Callable[[RequestRecord, Clocking], float | None], paired: bool
) -> dict[str, Any]:
    """Ratios of p50 and p99 with intervals; in a paired comparison also the median of the requests' own ratios."""
    before = {r.index: value for r in base.records if r.ok and (value := read(r, clocking)) is not None}
    after = {r.index: value for r in other.records if r.ok and (value := read(r, clocking)) is not None}
    if not before or not after:
        return {"n": 0}
    result: dict[str, Any] = {}
    if paired:
        both = sorted(before.keys() & after.keys())
        x, y = np.array([before[i] for i in both]), np.array([after[i] for i in both])
        result["n"] = len(both)
        usable = x > 0
        if usable.sum() >= MIN_PAIRS:
            result["paired_median_ratio"] = interval(lambda table: np.median(table, axis=1), y[usable] / x[usable])
    else:
        x, y = np.array(list(before.values())), np.array(list(after.values()))
        result["n"] = min(len(x), len(y))
    for name, percent in (("p50", 50), ("p99", 99)):
        result[name] = {"base": float(np.percentile(x, percent)), "other": float(np.percentile(y, percent))}
        result[name] |= _percentile_ratio(x, y, percent, paired)
    return result


def interval(statistic: Callable[[Floats], Floats], values: Floats) -> dict[str, float]:
    """A statistic (of each row of a table of samples) with its 95 % bootstrap interval."""
    rng = np.random.default_rng(0)
    drawn = [statistic(values[rng.integers(len(values), size=(rows, len(values)))]) for rows in _batches(len(values))]
    low, high = np.percentile(np.concatenate(drawn), [2.5, 97.5]).tolist()
    return {"ratio": float(statistic(values[None, :])[0]), "low": low, "high": high}


def _batches(width: int) -> list[int]:
    """Resamples to draw at a time, so that a table of them stays small."""
    rows = max(1, min(RESAMPLES, _MAX_CELLS // max(1, width)))
    return [min(rows, RESAMPLES - done) for done in range(0, RESAMPLES, rows)]


def _percentile_ratio(x: Floats, y: Floats, percent: float, paired: bool) -> dict[str, float | None]:
    """p(y) / p(x). Paired runs are resampled by request, both sides together; others each by itself."""
    base = float(np.percentile(x, percent))
    if base <= 0 or min(len(x), len(y)) < MIN_PAIRS:
        return {"ratio": float(np.percentile(y, percent)) / base if base > 0 else None, "low": None, "high": None}
    rng = np.random.default_rng(0)
    drawn = []
    for count in _batches(max(len(x), len(y))):
        rows = rng.integers(len(x), size=(count, len(x)))
        columns = rows if paired else rng.integers(len(y), size=(count, len(y)))
        below, above = np.percentile(x[rows], percent, axis=1), np.percentile(y[columns], percent, axis=1)
        drawn.append(np.divide(above, below, out=np.full(count, np.inf), where=below > 0))
    low, high = np.percentile(np.concatenate(drawn), [2.5, 97.5]).tolist()
    return {"ratio": float(np.percentile(y, percent)) / base, "low": low, "high": high}
