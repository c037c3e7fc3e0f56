"""Times the executor's steps without scheduler or server: decode at several batch sizes, and a long prompt in chunks.

    PYTHONPATH=src:. python benchmarks/steps.py MODEL [--isa reference] [--threads 2] [--batch 1 32] [--prompt 4000]
                                                [--sampling temperature=0.8 top_p=0.95]

Prints one line per figure, best and median (a shared machine slows single steps down by factors, so compare bests), and
first the machine, the commit and the command that they belong to.
"""

from __future__ import annotations

import argparse
import platform
import random
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pellucid.core.plan import BlockUpdate, Chunk, NewSequence, StepPlan, StepResult
from pellucid.core.request import SamplingParams
from pellucid.runtime.config import RuntimeConfig
from pellucid.runtime.executor import TorchExecutor, load_executor

GREEDY = SamplingParams(temperature=0.0)


def sampling_of(words: list[str]) -> SamplingParams:
    """`name=number` words as parameters; greedy without any."""
    values = {name: float(value) for name, value in (word.split("=") for word in words)}
    whole = {name: int(value) for name, value in values.items() if name in ("top_k", "seed")}
    return SamplingParams(**(values | whole)) if words else GREEDY


def heading() -> str:
    """Machine, commit and command, as every published figure needs them."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    return f"{cpu}; commit {commit.strip() or 'unknown'}; python {shlex.join(sys.argv)}"


def decode_steps(
    executor: TorchExecutor, batch: int, context: int, num_steps: int, sampling: SamplingParams
) -> list[StepResult]:
    """Steps that decode `batch` sequences, from `context` tokens on."""
    size = executor.config.block_size
    per_sequence = -(-(context + num_steps + 1) // size)
    for i in range(batch):
        prompt = tuple(random.Random(i).randrange(1000) for _ in range(context))
        blocks = tuple(range(i * per_sequence, (i + 1) * per_sequence))
        new = (NewSequence(i, prompt, context, sampling),)
        run(executor, StepPlan(0, (Chunk(i, 0, context, True),), new, (BlockUpdate(i, 0, blocks),)))
    steps = []
    for step in range(num_steps):
        end = context + step + 1
        steps.append(run(executor, StepPlan(1, tuple(Chunk(i, end - 1, end, True) for i in range(batch)))))
    run(executor, StepPlan(2, (), released=tuple(range(batch))))
    return steps


def prefill_seconds(executor: TorchExecutor, length: int, chunk: int) -> Iterator[float]:
    """Seconds of each chunk of one prompt of `length` tokens."""
    prompt = tuple(random.Random(0).randrange(1000) for _ in range(length))
    blocks = tuple(range(-(-length // executor.config.block_size)))
    first = StepPlan(0, (), (NewSequence(0, prompt, length, GREEDY),), (BlockUpdate(0, 0, blocks),))
    run(executor, first)
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        yield run(executor, StepPlan(1, (Chunk(0, start, end, end == length),))).seconds
    run(executor, StepPlan(2, (), released=(0,)))


def run(executor: TorchExecutor, plan: StepPlan) -> StepResult:
    """Carry out one step."""
    return executor.collect(executor.launch(plan))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--isa", default="auto", help="reference: plain PyTorch")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sampling", nargs="*", default=[], help="such as temperature=0.8 top_p=0.95; default: greedy")
    args = parser.parse_args()
    config = RuntimeConfig(
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        threads=args.threads,
        deterministic=args.deterministic,
        isa=args.isa,
        weights=args.weights,
    )
    longest = max([args.context + args.steps + 1, args.prompt])
    num_blocks = max([*args.batch, 1]) * (-(-longest // config.block_size))
    executor = load_executor(args.model, config, num_blocks=min(num_blocks, 6000))
    print(heading())
    print(executor.describe())
    for batch in args.batch:
        steps = decode_steps(executor, batch, args.context, args.steps, sampling_of(args.sampling))
        seconds = [step.seconds for step in steps]
        sampled = statistics.median(dict(step.phases)["sample"] for step in steps)
        best, median = min(seconds), statistics.median(seconds)
        print(
            f"decode, batch {batch}, context {args.context}: best {best * 1e3:.1f} ms ({batch / best:.0f} tok/s), "
            f"median {median * 1e3:.1f} ms ({batch / median:.0f} tok/s), of it {sampled * 1e3:.2f} ms to sample"
        )
    runs = [list(prefill_seconds(executor, args.prompt, args.chunk)) for _ in range(args.repeats)]
    best = sum(min(chunk) for chunk in zip(*runs))
    median = statistics.median(sum(chunks) for chunks in runs)
    last = min(chunks[-2 if len(chunks) > 1 else -1] for chunks in runs)
    print(
        f"prefill, {args.prompt} tokens in chunks of {args.chunk}: best {best:.2f} s ({args.prompt / best:.0f} tok/s), "
        f"median {median:.2f} s ({args.prompt / median:.0f} tok/s); a chunk at the end {last * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main()
