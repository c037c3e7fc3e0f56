"""The ring, what counts as an anomaly, and what a dump holds."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tests.telemetry.steps import engine, record, request, run

from pellucid.core.errors import ConfigError
from pellucid.telemetry import recorder as module
from pellucid.telemetry.recorder import (
    COLD_STEPS,
    MOST_DUMPS,
    STORM_PREEMPTIONS,
    STORM_STEPS,
    StepRecorder,
    decode_record,
)


def dumps(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.jsonl"))


def test_it_keeps_the_last_ones():
    recorder = StepRecorder(5)
    for step_id in range(12):
        recorder.record(record(step_id))
    assert [decode_record(row).summary.step_id for row in recorder.last(3)] == [9, 10, 11]
    assert [decode_record(row).summary.step_id for row in recorder.last(100)] == [7, 8, 9, 10, 11]
    assert decode_record(recorder.last(1)[0]) == record(11)
    with pytest.raises(ConfigError, match="at least 1"):
        StepRecorder(0)


def test_a_slow_step_is_dumped_once_a_minute_with_what_came_before(tmp_path, monkeypatch, caplog):
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    recorder = StepRecorder(8, tmp_path / "steps", target_seconds=0.05)
    for step_id in range(20):
        recorder.record(record(step_id, seconds=9.0 if step_id < COLD_STEPS else 0.2))
    assert not (tmp_path / "steps").exists(), "5 x 50 ms is not reached by a warm step"
    with caplog.at_level(logging.WARNING):
        recorder.record(record(20, seconds=0.3))
        recorder.record(record(21, seconds=0.3))
        recorder.wait()
    (path,) = dumps(tmp_path / "steps")
    head, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert head["reason"] == "step 20 took 302 ms; 250 ms is 5 x the target"
    assert rows == [
        record(i, seconds=9.0 if i < COLD_STEPS else 0.2 if i < 20 else 0.3).to_json() for i in range(13, 21)
    ]
    assert len(caplog.messages) == 1
    assert str(path) in caplog.messages[0]
    now += 61.0
    recorder.record(record(22, seconds=0.3))
    recorder.wait()
    assert len(dumps(tmp_path / "steps")) == 2


def test_without_a_target_no_step_is_slow(tmp_path):
    recorder = StepRecorder(8, tmp_path)
    for step_id in range(20):
        recorder.record(record(step_id, seconds=1e6))
    recorder.wait()
    assert dumps(tmp_path) == []


@pytest.mark.parametrize("spread_over", [1, STORM_STEPS, STORM_STEPS + 1])
def test_preemptions_close_together_are_a_storm(tmp_path, spread_over):
    recorder = StepRecorder(256, tmp_path)
    counts = [0] * spread_over
    counts[0] += STORM_PREEMPTIONS - 1
    counts[-1] += 1
    for step_id, count in enumerate(counts):
        recorder.record(record(step_id, num_preempted=count))
    recorder.wait()
    assert len(dumps(tmp_path)) == (spread_over <= STORM_STEPS)


def test_a_failure_is_always_written_and_files_are_bounded(tmp_path):
    recorder = StepRecorder(4, tmp_path, target_seconds=0.05)
    for step_id in range(COLD_STEPS + 1):
        recorder.record(record(step_id, seconds=9.0))
    for index in range(MOST_DUMPS + 3):
        recorder.failed(f"InvariantViolation: number {index}")
    files = dumps(tmp_path)
    assert len(files) == MOST_DUMPS
    assert json.loads(files[-1].read_text().splitlines()[0])["reason"].endswith(f"number {MOST_DUMPS + 2}")


def test_a_directory_that_cannot_be_written_is_said_and_stops_nothing(tmp_path, caplog):
    (tmp_path / "steps").write_text("a file is in the way")
    StepRecorder(4, tmp_path / "steps").failed("InvariantViolation: x")
    assert len(caplog.messages) == 1
    assert "could not be written" in caplog.messages[0]


def test_the_engine_fills_it():
    recorder = StepRecorder(64)
    running = engine(recorder)
    running.add(request("a", 20, 5, tenant="acme"))
    run(running)
    rows = [decode_record(row).to_json() for row in running.last_steps(64)]
    assert len(rows) == running.stats().num_steps
    assert rows[0]["plan"] == "step 0 | new 0(20) | blocks 0@0=0-1 | run 0:[0,8)"
    assert rows[0]["sequences"] == [
        {"seq_id": 0, "request_id": "a", "tenant": "acme", "num_prompt": 20, "start": 0, "end": 8, "samples": False}
    ]
    assert "1, 2, 3" not in json.dumps(rows), "token ids are not kept"
