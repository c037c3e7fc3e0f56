"""Greedy tokens equal those of transformers in float32, for every family, in every mode the scheduler can choose."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.driver import Driver
from tests.runtime.tiny_models import FAMILIES, build, reference_tokens

from pellucid.runtime.config import RuntimeConfig
from pellucid.runtime.executor import load_executor

BLOCK_SIZE, NUM_BLOCKS, COUNT = 4, 400, 10
LENGTHS = (1, 3, 16, 37, 150)


@dataclass(frozen=True)
class Oracle:
    """A model on disk, prompts for it, and what transformers continues them with."""

    path: Path
    prompts: tuple[list[int], ...]
    expected: tuple[list[int], ...]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    path = tmp_path_factory.mktemp(request.param)
    model = build(request.param, path)
    rng = random.Random(0)
    prompts = tuple([rng.randrange(199) for _ in range(length)] for length in LENGTHS)
    return Oracle(path, prompts, tuple(reference_tokens(model, prompt, COUNT) for prompt in prompts))


def driver_for(oracle: Oracle, **options: Any) -> Driver:
    config = RuntimeConfig(dtype="float32", block_size=BLOCK_SIZE, threads=1, **options)
    return Driver(load_executor(oracle.path, config, num_blocks=NUM_BLOCKS), NUM_BLOCKS, BLOCK_SIZE)


def test_alone(oracle: Oracle) -> None:
    driver = driver_for(oracle)
    for i, (prompt, expected) in enumerate(zip(oracle.prompts, oracle.expected)):
        driver.add(i, prompt)
        assert driver.generate(i, COUNT) == expected
        driver.release(i)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_batched_and_chunked(oracle: Oracle, chunk: int, deterministic: bool) -> None:
    driver = driver_for(oracle, deterministic=deterministic)
    for i, prompt in enumerate(oracle.prompts):
        driver.add(i, prompt)
    for i, expected in enumerate(oracle.expected):
        assert driver.generate(i, COUNT, chunk) == expected


def test_prefix_hit(oracle: Oracle) -> None:
    """A sequence that starts with another one's blocks computes only its tail, and says the same."""
    driver = driver_for(oracle)
    first = driver.add(0, oracle.prompts[-1])
    driver.generate(0, COUNT)
    shared = first.blocks[: (len(oracle.prompts[-1]) - 1) // BLOCK_SIZE]
    driver.add(1, oracle.prompts[-1], shared=shared)
    driver.add(2, oracle.prompts[-1], shared=shared[: len(shared) // 2])
    assert driver.generate(1, COUNT, chunk=7) == oracle.expected[-1]
    assert driver.generate(2, COUNT, chunk=7) == oracle.expected[-1]


def test_preemption(oracle: Oracle) -> None:
    """Sequences lose their blocks in mid-prompt and in mid-answer, and come anew with what they had generated."""
    driver = driver_for(oracle)
    for i, prompt in enumerate(oracle.prompts):
        driver.add(i, prompt)
    for step in range(60):
        driver.step(chunk=16)
        if step in (2, 5, 13):
            driver.preempt(step % len(oracle.prompts))
    for i, expected in enumerate(oracle.expected):
        assert driver.generate(i, COUNT) == expected
