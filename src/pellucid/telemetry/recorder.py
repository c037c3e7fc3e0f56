"""The step recorder: the last N steps of an engine, always on, and written to a file when something goes wrong.

    anomaly            what is seen                                             written
    failure            a conservation law broken, a step that raised            before the error goes on
    slow step          a warm engine's step took over 5 x the step-time target  beside the following steps
    preemption storm   16 or more preemptions within 64 steps                   beside the following steps

Each dump is a file of JSON lines in the state directory: a line that says why, then the last `DUMPED_STEPS` steps. At
most `MOST_DUMPS` files are kept and one is written a minute (a failure always), so that a machine that is slow all day
fills no disk. Each is announced by one log line.

Records are kept as msgpack: 2,048 steps of 64 sequences would be half a million objects for Python's collector to walk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import msgspec

from pellucid.core.errors import ConfigError
from pellucid.core.step_record import StepRecord

SLOW_FACTOR = 5.0
COLD_STEPS = 16  # the first ones touch all memory for the first time, and are no anomaly
STORM_STEPS = 64
STORM_PREEMPTIONS = 16
SECONDS_BETWEEN_DUMPS = 60.0
MOST_DUMPS = 16
DUMPED_STEPS = 512  # of the ring; more would keep Python's lock from the engine for longer
DUMP_FORMAT = 1

log = logging.getLogger("pellucid.recorder")
encode_record = msgspec.msgpack.Encoder().encode
encode_json = msgspec.json.Encoder().encode
decode_record: Callable[[bytes], StepRecord] = msgspec.msgpack.Decoder(StepRecord).decode


class StepRecorder:
    """Implements `engine.recording.Recorder`. Called from one thread.

    `directory`: where dumps go (made when the first is written); None writes none. `target_seconds`: the step-time
    target; without one no step counts as slow. Raises ConfigError for a capacity below 1.
    """

    def __init__(self, capacity: int, directory: Path | None = None, *, target_seconds: float | None = None) -> None:
        if capacity < 1:
            raise ConfigError(f"the step recorder was told to keep {capacity} steps; it must be at least 1")
        self._ring: deque[bytes] = deque(maxlen=capacity)
        self._directory = directory
        self._slow_seconds = float("inf") if target_seconds is None else SLOW_FACTOR * target_seconds
        self._num_recorded = 0
        self._preempting: deque[tuple[int, int]] = deque()  # which of the last steps preempted, and how many
        self._dumped_at = float("-inf")
        self._writer: threading.Thread | None = None

    def record(self, record: StepRecord) -> None:
        """Keep one more step, and begin a dump if it is an anomaly."""
        self._ring.append(encode_record(record))
        self._num_recorded += 1
        summary = record.summary
        if summary.wall_seconds > self._slow_seconds and self._num_recorded > COLD_STEPS:
            ms, limit = summary.wall_seconds * 1e3, self._slow_seconds * 1e3
            self._anomaly(
                "slow", f"step {summary.step_id} took {ms:.0f} ms; {limit:.0f} ms is {SLOW_FACTOR:g} x the target"
            )
        if summary.num_preempted:
            self._look_for_a_storm(summary.num_preempted)

    def last(self, count: int) -> list[bytes]:
        """The last `count` steps, oldest first, each a StepRecord in msgpack."""
        return list(islice(self._ring, max(0, len(self._ring) - count), None))

    def failed(self, reason: str) -> None:
        """Write what is known, whatever was written before, and return when it is on disk."""
        if self._directory is not None:
            self.wait()
            _dump(self._directory, "failure", reason, self.last(DUMPED_STEPS))

    def wait(self) -> None:
        """Wait for a dump that is being written."""
        if self._writer is not None:
            self._writer.join()

    def _look_for_a_storm(self, num_preempted: int) -> None:
        self._preempting.append((self._num_recorded, num_preempted))
        while self._preempting[0][0] <= self._num_recorded - STORM_STEPS:
            self._preempting.popleft()
        total = sum(count for _, count in self._preempting)
        if total >= STORM_PREEMPTIONS:
            self._anomaly("storm", f"{total} preemptions within {STORM_STEPS} steps")

    def _anomaly(self, kind: str, reason: str) -> None:
        now = time.monotonic()
        if self._directory is None or now - self._dumped_at < SECONDS_BETWEEN_DUMPS:
            return
        self._dumped_at = now
        self.wait()
        # Making JSON of them takes a tenth of a second, which the next step need not wait for.
        arguments = (self._directory, kind, reason, self.last(DUMPED_STEPS))
        self._writer = threading.Thread(target=_dump, args=arguments, name="pellucid-dump", daemon=True)
        self._writer.start()


def _dump(directory: Path, kind: str, reason: str, records: list[bytes]) -> None:
    """Write one file and say so. A disk that is full is said as well, and stops nothing."""
    now = datetime.now(UTC)
    path = directory / f"steps-{now:%Y%m%dT%H%M%S.%f}Z-{kind}.jsonl"
    head = {"pellucid_steps": DUMP_FORMAT, "reason": reason, "written_at": now.isoformat(timespec="seconds")}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(encode_json(head) + b"\n")
            for record in records:
                file.write(encode_json(decode_record(record).to_json()) + b"\n")
        for old in sorted(directory.glob("steps-*.jsonl"))[:-MOST_DUMPS]:
            old.unlink(missing_ok=True)
    except OSError as error:
        log.error("%s; the last %d steps could not be written to %s: %s", reason, len(records), path, error.strerror)
        return
    log.warning("%s; the last %d steps are in %s", reason, len(records), path)
