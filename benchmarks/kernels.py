"""What the native kernels reach of what the machine can do, beside PyTorch, in one run.

    python benchmarks/kernels.py [--shape 135m|1.1b] [--threads N] [--rounds N] [--json]

Every line is measured in rounds that take turns with the others and with a probe of the machine, and the best round
counts: on a shared machine a figure means something only as a ratio to what was possible in the same seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from pellucid.kernels.cpu import AttentionBatch, CpuKernels, PackedWeight, WeightFormat

# hidden, heads, kv heads, head dimension, feed-forward width, layers
SHAPES = {"135m": (576, 9, 3, 64, 1536, 30), "1.1b": (2048, 32, 4, 64, 5632, 22)}
ROWS = (1, 8, 32, 512)
FORMATS: tuple[WeightFormat, ...] = ("bf16", "int8", "q8", "q4")
LARGE = ((2048, 2048), (2048, 5632))  # inputs, outputs


def best_seconds(jobs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The fastest of `rounds` runs of each job, taking turns."""
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(rounds):
        for name, job in jobs.items():
            began = time.perf_counter()
            job()
            best[name] = min(best[name], time.perf_counter() - began)
    return best


def linear_jobs(cpu: CpuKernels, shape: str, rows: int) -> tuple[dict[str, Callable[[], object]], dict[str, int], int]:
    """One layer's four products per format, over enough copies of the weights that no cache holds them.

    Returns jobs, bytes read and operations done by each.
    """
    hidden, heads, kv_heads, dim, inner, _ = SHAPES[shape]
    sizes = [((heads + 2 * kv_heads) * dim, hidden), (hidden, heads * dim), (2 * inner, hidden), (hidden, inner)]
    copies = max(1, (256 << 20) // (2 * sum(n * k for n, k in sizes))) if rows <= 32 else 1
    x = {k: torch.randn(rows, k).bfloat16() for _, k in sizes}
    jobs: dict[str, Callable[[], object]] = {}
    read: dict[str, int] = {}
    for name in FORMATS:
        weights = [PackedWeight.from_tensor([torch.randn(n, k)], name) for _ in range(copies) for n, k in sizes]
        jobs[name] = lambda weights=weights: [cpu.linear(x[w.num_inputs], w) for w in weights]
        read[name] = sum(w.num_bytes for w in weights)
    matrices = [torch.randn(n, k).bfloat16() for _ in range(copies) for n, k in sizes]
    jobs["torch bf16"] = lambda: [torch.nn.functional.linear(x[w.shape[1]], w) for w in matrices]
    read["torch bf16"] = sum(w.numel() * 2 for w in matrices)
    return jobs, read, 2 * rows * sum(m.numel() for m in matrices)


def linear_lines(cpu: CpuKernels, shape: str, rounds: int) -> list[dict[str, object]]:
    lines: list[dict[str, object]] = []
    for rows in ROWS:
        jobs, read, ops = linear_jobs(cpu, shape, rows)
        memory = tiles = 0.0
        best: dict[str, float] = {}
        for _ in range(rounds):
            memory = max(memory, cpu.probe("read", num_bytes=256 << 20, seconds=0.05))
            tiles = max(tiles, cpu.probe("bf16", seconds=0.02))
            for name, seconds in best_seconds(jobs, 1).items():
                best[name] = min(seconds, best.get(name, float("inf")))
        for name, seconds in best.items():
            line: dict[str, object] = {"what": f"linear {name}", "rows": rows, "milliseconds": seconds * 1e3}
            line["of read bandwidth"] = read[name] / seconds / memory
            line["of bf16 tile peak"] = ops / seconds / tiles if tiles else None
            line["times torch bf16"] = best["torch bf16"] / seconds
            lines.append(line)
    return lines


def large_lines(cpu: CpuKernels, rounds: int) -> list[dict[str, object]]:
    """Products of 512 rows, large enough to hide what goes on around them, beside what the tiles do at best."""
    lines: list[dict[str, object]] = []
    for inputs, outputs in LARGE:
        x = torch.randn(512, inputs).bfloat16()
        matrix = torch.randn(outputs, inputs)
        weights = {name: PackedWeight.from_tensor([matrix], name) for name in FORMATS}
        jobs: dict[str, Callable[[], object]] = {
            name: lambda x=x, weight=weight: cpu.linear(x, weight) for name, weight in weights.items()
        }
        peaks, best = {"bf16": 0.0, "int8": 0.0}, dict.fromkeys(jobs, float("inf"))
        for _ in range(rounds):
            peaks = {name: max(peak, cpu.probe(name, seconds=0.02)) for name, peak in peaks.items()}
            best = {name: min(best[name], seconds) for name, seconds in best_seconds(jobs, 3).items()}
        for name, seconds in best.items():
            rate = 2 * 512 * inputs * outputs / seconds
            line: dict[str, object] = {"what": f"512 x {inputs} x {outputs} {name}", "rows": 512}
            line |= {"milliseconds": seconds * 1e3, "teraflops": rate / 1e12}
            line |= {f"of {of} tile peak": rate / peak if peak else None for of, peak in peaks.items()}
            lines.append(line)
    return lines


def attention_lines(cpu: CpuKernels, shape: str, rounds: int) -> list[dict[str, object]]:
    _, heads, kv_heads, dim, _, _ = SHAPES[shape]
    lines: list[dict[str, object]] = []
    for count, rows, context in ((1, 512, 512), (1, 512, 4096), (1, 1, 4096), (32, 1, 512)):
        blocks = -(-context // 16)
        cache = tuple(torch.randn(blocks * count, kv_heads, 16, dim).bfloat16() for _ in range(2))
        queries = torch.randn(rows * count, heads, dim).bfloat16()
        table = np.arange(blocks * count, dtype=np.int32).reshape(count, blocks)
        batch = AttentionBatch(np.array([(i * rows, rows, context) for i in range(count)]), table)
        jobs = {"a": lambda q=queries, c=cache, b=batch: cpu.attention(q, c, b)}
        tiles, seconds = 0.0, float("inf")
        for _ in range(rounds):
            tiles = max(tiles, cpu.probe("bf16", seconds=0.02))
            seconds = min(seconds, best_seconds(jobs, 3)["a"])
        seen = count * sum(context - rows + i + 1 for i in range(rows))
        lines.append(
            {
                "what": f"attention {count} x {rows} rows at {context}",
                "rows": rows * count,
                "milliseconds": seconds * 1e3,
                "teraflops": seen * heads * dim * 4 / seconds / 1e12,
                "of bf16 tile peak": seen * heads * dim * 4 / seconds / tiles if tiles else None,
                "cache GB/s": count * context * kv_heads * dim * 4 / seconds / 1e9,
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--threads", type=int, default=0, help="0: one per physical core")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cpu = CpuKernels(threads=options.threads)
    torch.set_num_threads(cpu.num_threads)
    with torch.inference_mode():
        lines = linear_lines(cpu, options.shape, options.rounds) + large_lines(cpu, options.rounds)
        lines += attention_lines(cpu, options.shape, options.rounds)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    ).stdout.strip()
    head = {"shape": options.shape, "isa": cpu.isa, "threads": cpu.num_threads, "commit": commit, "argv": sys.argv[1:]}
    if options.json:
        print(json.dumps({**head, "lines": lines}))
        return
    print("  ".join(f"{key} {value}" for key, value in head.items()))
    for line in lines:
        rest = "  ".join(f"{k} {v:.2f}" for k, v in line.items() if isinstance(v, float))
        print(f"{line['what']!s:34} rows {line['rows']:4}  {rest}")


if __name__ == "__main__":
    main()
