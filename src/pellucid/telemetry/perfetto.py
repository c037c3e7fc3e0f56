"""Recorded steps as a trace for a timeline viewer: Perfetto (ui.perfetto.dev) or Chrome's `about:tracing`.

One track shows the steps, each with its parts below it: gap, deciding, the executor's phases, folding in. One track a
sequence shows the chunks it was given, named by what they were: prompt tokens or one decoded token. Times are
microseconds on the engine's clock, as the format asks for; rows are those of `/v1/steps`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_STEPS, _SEQUENCES = 1, 2  # the format's processes: groups of tracks
_STEP_TRACK, _PART_TRACK = 1, 2

Event = dict[str, Any]


def trace(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The trace of these steps, as one JSON-ready document."""
    events = [_name("process_name", _STEPS, "engine"), _name("process_name", _SEQUENCES, "sequences")]
    events += [_name("thread_name", _STEPS, "steps", _STEP_TRACK), _name("thread_name", _STEPS, "parts", _PART_TRACK)]
    named: set[int] = set()
    for row in rows:
        events += _step(row)
        for sequence in row["sequences"]:
            if sequence["seq_id"] not in named:
                named.add(sequence["seq_id"])
                title = f"{sequence['seq_id']} {sequence['tenant']} {sequence['request_id']}"
                events.append(_name("thread_name", _SEQUENCES, title, sequence["seq_id"]))
            events.append(_chunk(row, sequence))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _step(row: Mapping[str, Any]) -> list[Event]:
    """The step, and its parts one after the other. What phases leave of the executor's time is called `other`."""
    features = row["features"]
    began = row["started"] - row["gap_seconds"]
    whole = row["gap_seconds"] + row["schedule_seconds"] + row["seconds"] + row["commit_seconds"]
    details = {"plan": row["plan"], "predicted_ms": 1e3 * row["predicted_seconds"], **features}
    details["stolen_ms"] = 1e3 * row.get("stolen_seconds", 0.0)
    details |= {name: row[name] for name in ("num_waiting", "num_running", "num_swapped", "num_preempted")}
    kind = "decode" if row["num_prompt_tokens"] == 0 else "mixed"
    title = f"step {row['step_id']}: {kind}, {features['num_tokens']} tokens"
    events = [_span(title, _STEPS, _STEP_TRACK, began, whole, details)]
    phases = dict(row["phases"])
    other = max(0.0, row["seconds"] - sum(phases.values()))
    parts = {"gap": row["gap_seconds"], "schedule": row["schedule_seconds"], **phases, "other": other}
    for name, seconds in (parts | {"commit": row["commit_seconds"]}).items():
        if seconds > 0.0:
            events.append(_span(name, _STEPS, _PART_TRACK, began, seconds, {}))
        began += seconds
    return events


def _chunk(row: Mapping[str, Any], sequence: Mapping[str, Any]) -> Event:
    start, end = sequence["start"], sequence["end"]
    title = f"prompt [{start}, {end})" if start < sequence["num_prompt"] else f"decode {start}"
    executing = row["started"] + row["schedule_seconds"]
    details = {"step": row["step_id"], "request": sequence["request_id"], "tenant": sequence["tenant"]}
    return _span(title, _SEQUENCES, sequence["seq_id"], executing, row["seconds"], details)


def _span(name: str, process: int, track: int, began: float, seconds: float, details: Mapping[str, Any]) -> Event:
    times = {"ts": began * 1e6, "dur": seconds * 1e6}
    return {"name": name, "ph": "X", "pid": process, "tid": track, **times, "args": dict(details)}


def _name(kind: str, process: int, name: str, track: int = 0) -> Event:
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}
