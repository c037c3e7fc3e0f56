"""What all the watching costs: steps of 32 decodes with everything that notices them and with nothing, in one run.

    python -m benchmarks.watching [--model MODEL] [--sequences 32] [--blocks 24]

Blocks of steps take turns. In one kind of block the engine keeps ledgers and records every step, and what other
processes and threads do with that is done too, in the engine's own thread, where it costs more than it does in service:
batches of summaries are encoded, decoded and counted, the time of every token goes into the metrics, requests that
would have ended (one each 4 steps, as replies of 128 tokens do) are written to the store, and once a second a document
is made for a page that watches. In the other kind of block none of this happens. Printed are the median step of each
kind, the median of the differences between neighbouring blocks, and, because a median leaves single steps out, what a
page's look costs the engine and its document the server, once a second.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.ledger import NoLedger, real_engine
from benchmarks.steps import heading

from pellucid.core.events import Finished, TokensGenerated
from pellucid.core.ledger import LedgerReport
from pellucid.core.request import Request, SamplingParams
from pellucid.core.step_record import StepSummary
from pellucid.engine import messages
from pellucid.engine.engine import Engine
from pellucid.engine.recording import Recording
from pellucid.models.sources import DEFAULT_MODEL
from pellucid.server.ops.document import Subject
from pellucid.telemetry.prometheus import ServerMetrics
from pellucid.telemetry.recorder import StepRecorder
from pellucid.telemetry.store import Store, StoredRequest

BLOCK = 20  # steps
STEPS_PER_REQUEST = 4  # 32 replies of 128 tokens


class NoRecording:
    """Takes every call of a Recording and notes nothing."""

    recorder = None

    def planned(self, *_: Any, **__: Any) -> None:
        return None

    def folded(self, *_: Any, **__: Any) -> None:
        return None

    def take_batch(self, now: float) -> list[StepSummary]:
        return []


class Watchers:
    """What the server and its threads do with a step, and a page that watches."""

    def __init__(self, engine: Engine, store: Store, ledger: LedgerReport) -> None:
        self._engine, self._store, self._ledger = engine, store, ledger
        self._metrics = ServerMetrics(lambda: asdict(engine.stats()))
        self._choices = {id: self._metrics.choice(0.0) for id in _running(engine)}
        self._subject = Subject("model", "0", engine.scheduler.config)
        self._steps: list[StepSummary] = []
        self._looked_at = time.perf_counter()
        self._num_stored = 0
        self.look_seconds: list[float] = []
        self.document_seconds: list[float] = []

    def saw(self, events: list[Any], number: int) -> None:
        """One step's events."""
        now = time.monotonic()
        for event in events:
            if isinstance(event, TokensGenerated):
                self._choices[event.request_id].tokens(len(event.token_ids), now)
        if summaries := self._engine.take_summaries():
            batch = messages.decode_from_engine(messages.encode(messages.Steps(summaries)))
            assert isinstance(batch, messages.Steps)
            self._metrics.steps(batch.summaries)
            self._steps += batch.summaries
        if number % STEPS_PER_REQUEST == 0:
            self._put()
        if time.perf_counter() - self._looked_at >= 1.0:
            self._look()

    def _put(self) -> None:
        self._num_stored += 1
        self._store.put(StoredRequest(f"r-{self._num_stored}", "default", time.time(), "length", self._ledger))

    def _look(self) -> None:
        began = self._looked_at = time.perf_counter()
        view = self._engine.look()
        looked = time.perf_counter()
        msgspec.json.encode((self._subject.inside(view), self._subject.steps(self._steps)))
        self._steps.clear()
        self.look_seconds.append(looked - began)
        self.document_seconds.append(time.perf_counter() - looked)


def _running(engine: Engine) -> list[str]:
    return [sequence.request.id for sequence in engine.scheduler.running.values()]


def one_ledger(engine: Engine) -> LedgerReport:
    """Of a short request that is served for it."""
    sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    engine.add(Request("first", tuple(range(10, 73)), sampling, time.monotonic()))
    while True:
        for event in engine.step():
            if isinstance(event, Finished) and event.ledger is not None:
                return event.ledger


def fill(engine: Engine, num_running: int) -> None:
    """Start so many sequences and compute their prompts."""
    for i in range(num_running):
        sampling = SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)
        engine.add(Request(f"r{i}", (i + 5, *range(10, 73)), sampling, time.monotonic()))
    while any(sequence.num_due > 1 for sequence in engine.scheduler.running.values()) or engine.scheduler.num_waiting:
        engine.step()


def measure(engine: Engine, store: Store, ledger: LedgerReport, num_blocks: int) -> str:
    """The line of figures."""
    ledgers = (engine.scheduler.ledgers, NoLedger())
    recordings = (Recording(engine.scheduler, StepRecorder(1000, target_seconds=0.05)), NoRecording())
    watchers = Watchers(engine, store, ledger)
    medians: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * num_blocks):
        off = number % 2
        engine.scheduler.ledgers = ledgers[off]  # type: ignore[assignment]
        engine._recording = recordings[off]  # type: ignore[assignment]
        saw: Callable[[list[Any], int], None] = watchers.saw if not off else (lambda events, step: None)
        medians[off].append(statistics.median(_timed(engine, saw, step) for step in range(BLOCK)))
    difference = statistics.median(a - b for a, b in zip(*medians, strict=True))
    base, watched = statistics.median(medians[1]), statistics.median(medians[0])
    look, document = statistics.median(watchers.look_seconds), statistics.median(watchers.document_seconds)
    return (
        f"step watched {1e3 * watched:.3f} ms, unwatched {1e3 * base:.3f} ms, difference {1e3 * difference:.3f} ms = "
        f"{difference / base:.2%}; once a second {1e3 * look:.2f} ms for a look, {1e3 * document:.2f} for its document"
    )


def _timed(engine: Engine, saw: Callable[[list[Any], int], None], number: int) -> float:
    began = time.perf_counter()
    saw(engine.step(), number)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=24, help="of each kind")
    arguments = parser.parse_args()
    print(heading())
    engine = real_engine(arguments.model)
    ledger = one_ledger(engine)
    fill(engine, arguments.sequences)
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory) / "requests.sqlite")
        print(measure(engine, store, ledger, arguments.blocks))
        store.close()


if __name__ == "__main__":
    main()
