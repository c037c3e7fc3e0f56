"""Nobody waits without end: a request's first token comes within 2.5 times the work that was in front of it.

That work is what the requests that came before it and had not ended took alone on the machine, one after the other, and
its own prompt. Of 2.5, two are the half of a step's prompt time that goes to short prompts first, whenever they came.
Beside that it may wait for a step under way: four targets where nobody decodes, or a whole token budget.

Histories are drawn by a seed and not by hypothesis, whose favourites, few and equal requests, do not contend.
"""

from __future__ import annotations

import random
from functools import cache

import pytest
from tests.sim.test_contention import MACHINE, config, request

from pellucid.core.cost import FittedCost
from pellucid.core.request import Request
from pellucid.sim.replay import replay

BOUND = 2.5
STEP = 0.3


@cache
def alone(prompt: int, output: int) -> tuple[float, float]:
    """Seconds to the first token and to the end."""
    outcome = replay(config(), FittedCost(MACHINE), [request("alone", prompt, output, 0.0)])["alone"]
    assert outcome.ended is not None
    return outcome.token_times[0], outcome.ended


def history(rng: random.Random) -> list[Request]:
    """Four of five prompts are short, some a few hundred tokens long, a few are documents."""
    rate, now, requests = rng.choice([5, 15, 40]), 0.0, []
    for number in range(80):
        now += rng.expovariate(rate)
        length = rng.choice([16, 64, 64, 128] * 8 + [300, 500, 600, 1500] * 2 + [3000, 6000])
        requests.append(request(f"r{number}", length, rng.choice([4, 16, 64]), now))
    return requests


@pytest.mark.parametrize("places", [2, 8])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("seed", range(4))
def test_no_request_waits_longer_than_what_is_in_front_of_it(policy: str, places: int, seed: int) -> None:
    rng = random.Random(seed)
    requests = history(rng)
    setting = config(policy=policy, max_running=places, num_blocks=rng.choice([512, 4096]))
    outcomes = replay(setting, FittedCost(MACHINE), requests)
    for number, asked in enumerate(requests):
        outcome = outcomes[asked.id]
        ahead = [r for r in requests[:number] if (outcomes[r.id].ended or 0.0) > asked.arrival]
        work = sum(alone(len(r.prompt), r.sampling.max_tokens)[1] for r in ahead)
        work += alone(len(asked.prompt), asked.sampling.max_tokens)[0]
        assert outcome.reason == "length"
        assert outcome.ttft <= BOUND * work + STEP, (asked.id, len(asked.prompt), len(ahead))
