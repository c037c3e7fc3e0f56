"""The exported trace has the steps' times and everyone's chunks."""

from __future__ import annotations

import json

import pytest
from tests.telemetry.steps import engine, record, request, run

from pellucid.telemetry.perfetto import trace
from pellucid.telemetry.recorder import StepRecorder, decode_record


def test_parts_fill_the_step_and_chunks_lie_in_the_executors_time():
    document = trace([record(3).to_json()])
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    (step,) = [event for event in events if event["name"].startswith("step 3: decode")]
    parts = [event for event in events if event["pid"] == step["pid"] and event is not step]
    assert [part["name"] for part in parts] == ["gap", "schedule", "prepare", "forward", "other", "commit"]
    assert step["ts"] == pytest.approx((13.0 - 0.001) * 1e6)
    at = step["ts"]
    for part in parts:
        assert part["ts"] == pytest.approx(at)
        at += part["dur"]
    assert at == pytest.approx(step["ts"] + step["dur"])
    chunks = {event["tid"]: event for event in events if event["pid"] != step["pid"]}
    assert {seq: chunk["name"] for seq, chunk in chunks.items()} == {0: "decode 9", 1: "decode 9"}
    assert chunks[0]["args"] == {"step": 3, "request": "req-a", "tenant": "acme"}
    assert chunks[0]["ts"] == pytest.approx(parts[2]["ts"])


def test_a_run_has_one_track_a_sequence_named_once():
    recorder = StepRecorder(64)
    running = engine(recorder)
    for index in range(3):
        running.add(request(f"r{index}", 6, 4, tenant="t"))
    run(running)
    document = trace([decode_record(row).to_json() for row in recorder.last(64)])
    json.dumps(document)
    names = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name" and e["pid"] == 2]
    assert names == ["0 t r0", "1 t r1", "2 t r2"]
    prompts = [e for e in document["traceEvents"] if e["name"].startswith("prompt [")]
    assert sum(_length(e["name"]) for e in prompts) == 18 - running.stats().cached_tokens


def _length(name: str) -> int:
    start, end = name.removeprefix("prompt [").removesuffix(")").split(", ")
    return int(end) - int(start)
