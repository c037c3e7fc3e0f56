"""From the options of `pellucid bench` to what is sent: a named load, a trace, or a synthetic one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pellucid.core.errors import ConfigError
from pellucid.workload import synthetic
from pellucid.workload.formats import ReadOptions, open_trace
from pellucid.workload.trace import file_sha256
from pellucid.workload.workloads import Pacing, Replay, Workload, named_workload

MIN_MEASURED = 10
"""Requests that a rate of a search must have in the time measured; below that a rate cannot be told from another."""


class Load(NamedTuple):
    """What is to be sent. `make` gives the workload at a rate, or at its own for None. `about` goes into the
    document."""

    make: Callable[[float | None], Workload]
    about: dict[str, Any]
    lowest_rate: float = 1e-3


class Described(NamedTuple):
    """A synthetic load as its options describe it."""

    arrivals: str
    input_len: str
    output_len: str
    pattern: str
    tenants: str
    seed: int


def named_load(name: str) -> Load:
    """One of the named loads, which have no rate."""
    workload = named_workload(name)
    return Load(lambda rate: workload, {})


def synthetic_load(
    described: Described, pacing: Pacing, rate: float | None, duration: float, requests: int | None
) -> Load:
    """A load from a description. Without a number of requests it is measured for `duration` after the ramp, and runs
    on for as long again, so that the load does not end before the measured requests are answered."""
    lengths = synthetic.independent_lengths(
        synthetic.LengthDistribution.parse(described.input_len, "--input-len"),
        synthetic.LengthDistribution.parse(described.output_len, "--output-len"),
    )
    pattern, tenants = synthetic.Pattern.parse(described.pattern), synthetic.parse_tenants(described.tenants)
    if requests is None:
        pacing = pacing._replace(measured_until=pacing.ramp + duration)

    def make(wanted: float | None) -> Workload:
        spec = synthetic.SynthSpec(
            arrivals=synthetic.Arrivals.parse(described.arrivals, wanted or rate or 1.0),
            lengths=lengths,
            pattern=pattern,
            tenants=tenants,
            seed=described.seed,
            num_requests=requests,
            duration=None if requests is not None else 2.0 * (pacing.ramp + duration),
        )
        return Replay("synthetic", list(synthetic.generate(spec)), spec.block_size, pacing)

    return Load(make, {"synthetic": described._asdict()}, MIN_MEASURED / duration)


def trace_load(
    path: Path, encode: Callable[[str], Sequence[int]] | None, pacing: Pacing, rate: float | None, requests: int | None
) -> Load:
    """A trace, sped up or slowed down to a rate where one is given. Its prompts are made anew from its block ids."""
    trace = open_trace(path, options=ReadOptions(encode=encode))
    rows = [
        msgspec.structs.replace(row, input_token_ids=None, output_token_ids=None) for row in islice(trace, requests)
    ]
    times = [row.arrival_time for row in rows]
    span = max(times, default=0.0) - min(times, default=0.0)

    def make(wanted: float | None) -> Workload:
        wanted = wanted or rate
        if wanted is None:
            return Replay(path.name, rows, trace.header.block_size, pacing)
        if not span > 0:
            raise ConfigError(f"all requests of {path} arrive at once, so no speed gives them a rate")
        speed = wanted * span / (len(rows) - 1)
        return Replay(path.name, rows, trace.header.block_size, pacing._replace(speed=speed))

    replayed = {"file": str(path), "sha256": file_sha256(path), "transforms": list(trace.header.transforms)}
    return Load(make, {"trace": replayed})
