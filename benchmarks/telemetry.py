"""What noticing a step costs: microseconds per step for the recorder, the batches to the server, and the metrics.

    python benchmarks/telemetry.py [--sequences 32] [--step-ms 4]

Each part runs alone in a loop, on records of a real scheduler's decode steps; median and best of several rounds are
printed, with their share of a step of `--step-ms`. It is processor time, so that a busy machine bends it less. Only the
engine's row delays steps; the others run in the server's process, beside them.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import count
from statistics import median

from pellucid.core.config import SchedulerConfig
from pellucid.core.plan import StepPlan, StepResult
from pellucid.core.request import Request, SamplingParams
from pellucid.core.scheduler import Scheduler
from pellucid.core.step_record import StepRecord
from pellucid.engine import messages
from pellucid.engine.engine import EngineStats
from pellucid.engine.recording import Planned, Recording, StepTimes
from pellucid.runtime.machine import processor_name
from pellucid.telemetry.machine_use import MachineLimits, MachineUse, StepWork
from pellucid.telemetry.prometheus import ServerMetrics
from pellucid.telemetry.recorder import StepRecorder, decode_record

ROUNDS = 15
STEPS = 1000  # the recorder's ring, so that records of all ages lie in it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--step-ms", type=float, default=4.0)
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"{processor_name()}, commit {commit or 'unknown'}, {arguments.sequences} sequences")
    parts = engine_parts(arguments.sequences) | server_parts(arguments.sequences)
    for name, work in parts.items():
        rounds = sorted(1e6 * timed(work) for _ in range(ROUNDS))
        figures = (
            f"{micros:8.1f} us ({micros / arguments.step_ms / 10:5.2f} %)" for micros in (median(rounds), rounds[0])
        )
        print(f"{name:40} {'  best '.join(figures)}")


def timed(work: Callable[[], None], times: int = 500) -> float:
    """Processor seconds of one call, over many."""
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times


def decoding(num_sequences: int) -> tuple[Scheduler, Planned, StepResult]:
    """A scheduler with a decode step of so many sequences in flight, and what the step will give."""
    config = SchedulerConfig(
        num_blocks=4096, max_running=num_sequences, token_budget=max(512, 64 * num_sequences), prefix_cache=False
    )
    scheduler = Scheduler(config)
    for index in range(num_sequences):
        prompt = tuple(range(index, index + 64))
        scheduler.add(Request(f"chatcmpl-{index:032x}", prompt, SamplingParams(max_tokens=1000, ignore_eos=True)), 0.0)
    recording = Recording(scheduler)
    while True:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        planned = recording.planned(plan)
        result = _result(plan)
        if plan.num_tokens == num_sequences and len(plan.chunks) == num_sequences:
            return scheduler, planned, result
        scheduler.commit(result, 0.0)


def _result(plan: StepPlan) -> StepResult:
    phases = (("prepare", 0.0002), ("forward", 0.0035), ("sample", 0.0003))
    tokens = tuple((1,) if chunk.samples else () for chunk in plan.chunks)
    return StepResult(plan.step_id, tokens, 0.004, phases)


def engine_parts(num_sequences: int) -> dict[str, Callable[[], None]]:
    """What the engine's process does for each step."""
    scheduler, planned, result = decoding(num_sequences)
    recording = Recording(scheduler, StepRecorder(STEPS, target_seconds=0.05))
    recording.planned(planned.plan)  # names are looked up once
    clock = count()

    def note() -> None:
        now = 0.004 * next(clock)
        noted = recording.planned(planned.plan)
        recording.folded(noted, result, StepTimes(now, now, now + 0.004, now + 0.004), ())
        if summaries := recording.take_batch(now):  # every 125th step of 4 ms
            messages.encode(messages.Steps(summaries))

    return {"engine: note, record, batch and encode": note}


def server_parts(num_sequences: int) -> dict[str, Callable[[], None]]:
    """What the server's process does for each step."""
    scheduler, planned, result = decoding(num_sequences)
    recorder = StepRecorder(1)
    Recording(scheduler, recorder).folded(planned, result, StepTimes(0.0, 0.0, 0.004, 0.004), ())
    record: StepRecord = decode_record(recorder.last(1)[0])
    batch = messages.encode(messages.Steps([record.summary] * 125))
    limits = MachineLimits(1e12, 1e10)
    machine = MachineUse(StepWork(1e8, 1e3, 1e7, 1e8, 1e7, 1e4, 1e3, 1e5), limits)
    metrics = ServerMetrics(lambda: asdict(EngineStats()), machine=machine)
    choices = [metrics.choice(0.0) for _ in range(num_sequences)]
    clock = count()

    def batches() -> None:
        if next(clock) % 125 == 0:
            metrics.steps(messages.decode_from_engine(batch).summaries)

    def tokens() -> None:
        now = 0.004 * next(clock)
        for choice in choices:
            choice.tokens(1, now)

    return {
        "server: batches of steps": batches,
        "server: times of tokens": tokens,
    }


if __name__ == "__main__":
    main()
