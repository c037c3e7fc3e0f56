"""How cost grows, one dimension at a time: reading prompts of 1k to 32k tokens, decoding 1 to 64 sequences of 512, and
one sequence of 1k to 32k.

    PYTHONPATH=src:. python benchmarks/sweeps.py MODEL [--longest 32768] [--chunk 512] [--plot OUT.svg]

One prompt of the longest length is computed in chunks; the sum of its first chunks is what a shorter one takes. Decode
steps are timed in turns over a cache that is claimed, not computed: reading it takes as long. A model of a shape that
is not at hand comes from `benchmarks/random_model.py`. The figures are the executor's, without scheduler and server.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from benchmarks.steps import heading, prefill_seconds

from pellucid.runtime.config import RuntimeConfig
from pellucid.runtime.executor import TorchExecutor, load_executor
from pellucid.runtime.step_timing import Batch, time_steps

BATCHES = (1, 2, 4, 8, 16, 32, 64)
BATCH_CONTEXT = 512
SHORTEST = 1024


class Sweep(NamedTuple):
    """Seconds by what was varied."""

    title: str
    axis: str
    seconds: dict[int, float]


def lengths(longest: int) -> list[int]:
    """Doubling from the shortest to the longest."""
    return [SHORTEST << i for i in range((longest // SHORTEST).bit_length())]


def prefill(executor: TorchExecutor, longest: int, chunk: int) -> Sweep:
    """Whole prompts, from one run over the longest."""
    spent, done, seconds = 0.0, 0, {}
    for took in prefill_seconds(executor, longest, chunk):
        spent, done = spent + took, done + chunk
        seconds[done] = spent
    return Sweep("reading a prompt", "tokens", {length: seconds[length] for length in lengths(longest)})


def decode(executor: TorchExecutor, longest: int, repeats: int) -> list[Sweep]:
    """One step, by sequences and by context; medians over turns."""
    batches = [Batch(n, 1, BATCH_CONTEXT - 1, True) for n in BATCHES]
    contexts = [Batch(1, 1, length - 1, True) for length in lengths(longest)]
    timings = time_steps(executor, [*batches, *contexts], block_size=executor.config.block_size, repeats=repeats)
    seconds = [timing.seconds for timing in timings]
    by_batch = dict(zip(BATCHES, seconds, strict=False))
    by_context = dict(zip(lengths(longest), seconds[len(BATCHES) :], strict=True))
    return [
        Sweep(f"a decode step, {BATCH_CONTEXT} tokens each", "sequences", by_batch),
        Sweep("a decode step of one sequence", "tokens of context", by_context),
    ]


def table(sweep: Sweep) -> str:
    """Time, and what a unit more has cost since the point before."""
    rows = [f"| {sweep.title}, {sweep.axis} | ms | ms for each further |", "|---|---|---|"]
    before: tuple[int, float] | None = None
    for size, seconds in sweep.seconds.items():
        each = "" if before is None else f"{1e3 * (seconds - before[1]) / (size - before[0]):.4f}"
        rows.append(f"| {size:,} | {1e3 * seconds:,.1f} | {each} |")
        before = (size, seconds)
    return "\n".join(rows)


def plot(sweeps: list[Sweep], path: Path, title: str) -> None:
    """Three panels, both axes logarithmic: a line of slope one is proportional growth."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    for axes, sweep in zip(figure.subplots(1, len(sweeps)), sweeps, strict=True):
        sizes, seconds = list(sweep.seconds), [1e3 * s for s in sweep.seconds.values()]
        axes.loglog(sizes, seconds, "o-", color="#0072b2", base=2)
        proportional = [seconds[-1] * size / sizes[-1] for size in sizes]
        axes.loglog(sizes, proportional, "--", color="#999999", linewidth=1, label="proportional")
        axes.set_yscale("log", base=10)
        axes.set_xticks(sizes, [f"{s // 1024}k" if s >= SHORTEST else str(s) for s in sizes])
        axes.minorticks_off()
        axes.set_title(sweep.title, fontsize=10)
        axes.set_xlabel(sweep.axis)
        axes.set_ylabel("ms")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    with mpl.rc_context({"svg.hashsalt": "pellucid", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--longest", type=int, default=32_768)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args()
    if asked.longest % SHORTEST or SHORTEST % asked.chunk:
        parser.error(f"--longest must be a multiple of {SHORTEST}, and {SHORTEST} one of --chunk")
    config = RuntimeConfig(threads=asked.threads)
    tokens = max(asked.longest, max(BATCHES) * BATCH_CONTEXT)
    executor = load_executor(asked.model, config, num_blocks=-(-tokens // config.block_size))
    print(heading())
    print(executor.describe(), flush=True)
    sweeps = [*decode(executor, asked.longest, asked.repeats), prefill(executor, asked.longest, asked.chunk)]
    for sweep in sweeps:
        print("\n" + table(sweep))
    if asked.plot is not None:
        plot(sweeps, asked.plot, f"{Path(asked.model).stem}; {executor.describe()}")


if __name__ == "__main__":
    main()
