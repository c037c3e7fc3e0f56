"""Where a step's time goes beside the kernels: what the engine does between two native calls.

    python -m benchmarks.between_steps MODEL [--batch 1 32] [--steps 120] [--sampling temperature=0.8 top_p=0.95]

A whole engine, in this process, decodes so many sequences at once; medians over the steps. `outside` is all but the
executor's time: deciding, folding in with the ledger, and the records. Python runs with the environment that an engine
has in its own process (`engine/process.py`).
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator

from pellucid.assembly import build_engine
from pellucid.build import load_model, plan_engine
from pellucid.core.request import Request, SamplingParams
from pellucid.engine.engine import Engine
from pellucid.engine.process import HUGE_PAGES
from pellucid.settings import EngineSettings

PROMPT, WARM_UP = 64, 40


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--sampling", nargs="*", default=[], help="such as temperature=0.8 top_p=0.95; default: greedy")
    asked = parser.parse_args()
    if any(name not in os.environ for name in HUGE_PAGES):  # Python reads it when it starts
        arguments = [sys.executable, "-m", "benchmarks.between_steps", *sys.argv[1:]]
        os.execve(sys.executable, arguments, {**HUGE_PAGES, **os.environ})
    values = dict(pair.split("=") for pair in asked.sampling)
    sampling = SamplingParams(
        max_tokens=WARM_UP + asked.steps + 1,
        ignore_eos=True,
        temperature=float(values.pop("temperature", 0.0)),
        **{name: float(value) for name, value in values.items()},
    )
    model = load_model(asked.model)
    settings = EngineSettings(max_running=max(asked.batch))
    engine = build_engine(settings, model.files.path, plan_engine(settings, model), lambda text: None)
    for batch in asked.batch:
        rows = list(time_steps(engine, batch, sampling, asked.steps))
        parts = {name: 1e3 * statistics.median(row[name] for row in rows) for name in rows[0]}
        share = 100 * parts["outside"] / parts["step"]
        print(f"batch {batch}:", *(f"{name} {ms:.3f}" for name, ms in parts.items()), f"ms; outside {share:.1f} %")


def time_steps(engine: Engine, batch: int, sampling: SamplingParams, num_steps: int) -> Iterator[dict[str, float]]:
    """Seconds of each step, whole and in parts, while `batch` sequences decode."""
    rng = random.Random(batch)
    for i in range(batch):
        engine.add(Request(f"{batch}-{i}", tuple(rng.randrange(1000) for _ in range(PROMPT)), sampling))
    for _ in range(WARM_UP):
        engine.step()
    engine.take_summaries()
    walls, summaries = [], []
    for _ in range(num_steps):
        began = time.perf_counter()
        engine.step()
        walls.append(time.perf_counter() - began)
    while len(summaries) < num_steps:  # they are handed out twice a second
        summaries += engine.take_summaries()
    for i in range(batch):
        engine.abort(f"{batch}-{i}")
    while engine.has_work:
        engine.step()
    for wall, summary in zip(walls, summaries[-num_steps:], strict=True):
        yield {
            "step": wall,
            "executor": summary.seconds,
            **dict(summary.phases),
            "outside": wall - summary.seconds,
            "schedule": summary.schedule_seconds,
            "commit": summary.commit_seconds,
        }


if __name__ == "__main__":
    main()
