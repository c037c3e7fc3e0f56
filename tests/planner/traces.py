"""The public traces that reference figures were computed from, where a checkout has them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "traces"


def need(name: str) -> Path:
    """The trace file `name`; skips the test where it is not there."""
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"{name} is not beside this checkout (looked in {TRACES})")
    return path


def mooncake(name: str, *, reuse: bool) -> Iterator[tuple[int, int, int]]:
    """(input, output, cached) of a Mooncake trace, with an infinite prefix cache or without one. Only full blocks of
    512 tokens hit, and at least one token is computed."""
    seen: set[int] = set()
    for line in need(name).read_text().splitlines():
        row = json.loads(line)
        num_input, ids, hit = row["input_length"], row["hash_ids"], 0
        if reuse:
            while hit < min(len(ids), num_input // 512) and ids[hit] in seen:
                hit += 1
            seen.update(ids)
        yield num_input, row["output_length"], min(hit * 512, num_input - 1)


def azure(name: str) -> Iterator[tuple[int, int, int]]:
    """(input, output, 0) of an Azure trace."""
    with need(name).open(newline="") as file:
        for row in csv.DictReader(file):
            yield int(row["ContextTokens"]), int(row["GeneratedTokens"]), 0
