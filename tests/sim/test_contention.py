"""What scheduling promises under contention, proved on a modelled machine: a real scheduler, virtual time.

The machine is about a two-core server with a small model: a step has a floor of 4 ms, a knee, and attention that costs
with context. The scheduler starts from a prior that is wrong by a factor and has to learn it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import count, pairwise
from statistics import median

import pytest

from pellucid.core import scheduler as scheduler_module
from pellucid.core.config import SchedulerConfig
from pellucid.core.cost import CostPrior, FittedCost
from pellucid.core.policy import Fcfs
from pellucid.core.request import Request, SamplingParams
from pellucid.core.scheduler import Scheduler
from pellucid.core.sequence import Sequence
from pellucid.core.service import OUTPUT_WEIGHT, PROMPT_WEIGHT
from pellucid.core.tenants import Tenant
from pellucid.sim.replay import Outcome, replay

TABLE = tuple(max(4e-3, 3e-3 + 2.1e-4 * 2**i) for i in range(12))
MACHINE = CostPrior(TABLE, attended=8e-8, context=1e-8, sequence=2e-4, sample=1e-4, copied_byte=2.5e-10)
WRONG = CostPrior(
    tuple(0.5 * t for t in TABLE), attended=2e-8, context=5e-8, sequence=1e-5, sample=1e-5, copied_byte=1e-9
)
TARGET = 0.05
BYTES_PER_BLOCK = 368_640


def request(
    name: str,
    prompt: int,
    output: int,
    arrival: float,
    *,
    words: Iterable[int] = (),
    tenant: str = "",
    priority: int = 0,
) -> Request:
    """A request of `prompt` tokens that begins with `words` and is otherwise nobody else's."""
    rng = random.Random(name)
    tokens = [*words]
    tokens += [rng.randrange(1 << 30) for _ in range(prompt - len(tokens))]
    sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    return Request(
        name, tuple(tokens), sampling, arrival=arrival, tenant=tenant, priority=priority, cache_key=tenant.encode()
    )


def config(**options: object) -> SchedulerConfig:
    defaults = {"num_blocks": 4096, "step_target": TARGET, "cost_prior": WRONG, "bytes_per_block": BYTES_PER_BLOCK}
    return SchedulerConfig(**{**defaults, **options})


def percentile(values: list[float], share: float) -> float:
    values = sorted(values)
    return values[min(len(values) - 1, round(share * (len(values) - 1)))]


def documents_and_chats(doc_tokens: int) -> list[Request]:
    chats = [request(f"chat{i}", 64, 3000, 0.01 * i) for i in range(4)]
    shorts = [request(f"short{i}", 64, 16, 0.5 * i) for i in range(60)]
    documents = [request(f"doc{i}", doc_tokens, 4, 6.0 + 0.3 * i) for i in range(3)]
    return chats + shorts + documents


def storm(outcomes: dict[str, Outcome]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Gaps of chats while documents were read, first tokens of short requests before and during it, documents'."""
    documents = [outcomes[f"doc{i}"] for i in range(3)]
    start, end = 6.0, max(d.token_times[0] for d in documents)
    gaps = [
        later - earlier
        for i in range(4)
        for earlier, later in pairwise(outcomes[f"chat{i}"].token_times)
        if start <= earlier <= end
    ]
    shorts = [outcomes[name] for name in outcomes if name.startswith("short")]
    calm = [s.ttft for s in shorts if 1.0 <= s.request.arrival < 5.0]
    during = [s.ttft for s in shorts if start <= s.request.arrival <= end]
    return gaps, calm, during, [d.ttft for d in documents]


@pytest.mark.parametrize("doc_tokens", [6000, 7900])
def test_documents_do_not_freeze_chats(doc_tokens: int) -> None:
    requests = documents_and_chats(doc_tokens)
    gaps, calm, during, documents = storm(replay(config(), FittedCost(MACHINE), requests))
    _, _, starved, unhindered = storm(replay(config(step_target=None), FittedCost(MACHINE), requests))
    assert percentile(gaps, 0.99) <= 1.5 * TARGET
    assert max(gaps) <= 3 * TARGET
    assert percentile(during, 0.9) <= 2 * percentile(calm, 0.9) + TARGET
    assert percentile(starved, 0.9) > 10 * percentile(during, 0.9), "the avalanche is gone without a target, too"
    assert median(documents) <= 1.5 * median(unhindered)


def test_without_chunks_the_avalanche_is_there() -> None:
    """One step a prompt: chats stand still for as long as a document takes."""
    whole = config(step_target=None, chunked_prefill=False)
    gaps, _, _, _ = storm(replay(whole, FittedCost(MACHINE), documents_and_chats(6000)))
    assert max(gaps) > 1.0


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("length", [300, 2000])
def test_short_prompts_do_not_take_the_places_of_longer_ones(policy: str, length: int) -> None:
    """Places are short and short prompts keep coming: a longer one starts when those before it have started."""
    shorts = [request(f"short{i}", 64, 32, 0.02 * i) for i in range(400)]
    longer = request("longer", length, 32, 2.01)
    outcomes = replay(config(policy=policy, max_running=4), FittedCost(MACHINE), [*shorts, longer])
    behind = outcomes["short101"]
    assert behind.ttft > 1.0, "places are not short"
    started = longer.arrival + outcomes["longer"].ttft
    assert started <= behind.request.arrival + behind.ttft + length * 1e-3
    others = [o for o in outcomes.values() if o.request.arrival > longer.arrival and o.token_times[0] < started]
    assert len(others) <= length / 100, "that many passed it"


@pytest.mark.parametrize(("policy", "fair_to_short"), [("fcfs", True), ("priority", False), ("fair", False)])
def test_short_prompts_pass_longer_ones_unless_these_are_more_urgent(policy: str, fair_to_short: bool) -> None:
    shorts = [request(f"short{i}", 64, 4, 0.04 * i, priority=1) for i in range(150)]
    document = request("document", 4000, 4, 1.0)
    setting = config(policy=policy, max_running=256)
    alone = replay(setting, FittedCost(MACHINE), [document])["document"].ttft
    outcomes = replay(setting, FittedCost(MACHINE), [*shorts, document])
    during = [o.ttft for o in outcomes.values() if 1.0 < o.request.arrival < 1.0 + alone / 2]
    assert (median(during) < 0.2) == fair_to_short
    assert (outcomes["document"].ttft > 1.25 * alone) == fair_to_short


def two_tenants(loud_rate: float, quiet_rate: float, seconds: float, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)

    def arrivals(tenant: str, rate: float) -> Iterator[Request]:
        now = 0.0
        for i in count():
            now += rng.expovariate(rate)
            if now > seconds:
                return
            yield request(f"{tenant}{i}", rng.randrange(40, 400), rng.randrange(20, 80), now, tenant=tenant)

    return [*arrivals("loud", loud_rate), *arrivals("quiet", quiet_rate)]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_loud_tenant_costs_a_quiet_one_little(seed: int) -> None:
    fair = config(policy="fair", tenants=(Tenant("loud"), Tenant("quiet")))
    requests = two_tenants(loud_rate=20.0, quiet_rate=2.0, seconds=20.0, seed=seed)
    together = replay(fair, FittedCost(MACHINE), requests)
    alone = replay(fair, FittedCost(MACHINE), [r for r in requests if r.tenant == "quiet"])

    def first_tokens(outcomes: dict[str, Outcome]) -> list[float]:
        return [o.ttft for name, o in outcomes.items() if name.startswith("quiet")]

    assert all(outcome.reason == "length" for outcome in together.values())
    assert percentile(first_tokens(together), 0.9) <= 2.5 * percentile(first_tokens(alone), 0.9)
    fcfs = replay(config(tenants=fair.tenants), FittedCost(MACHINE), requests)
    assert percentile(first_tokens(fcfs), 0.9) > 2 * percentile(first_tokens(together), 0.9)


def test_backlogged_tenants_are_served_alike() -> None:
    """Both always have requests waiting: service differs by no more than a quantum and one step's charge, after every
    step; and by weight."""
    tenants = (Tenant("a", weight=1.0), Tenant("b", weight=2.0))
    setting = config(policy="fair", tenants=tenants, max_running=16, fair_quantum=1000.0)
    requests = [request(f"a{i}", 300, 8, 0.0, tenant="a") for i in range(60)]
    requests += [request(f"b{i}", 40, 60, 0.0, tenant="b") for i in range(200)]
    step = PROMPT_WEIGHT * setting.token_budget + OUTPUT_WEIGHT * setting.max_running
    worst: list[float] = []

    def watch(scheduler: Scheduler, now: float) -> None:
        waiting = [account for account in scheduler.book.accounts() if account.num_waiting]
        if len(waiting) == 2:
            worst.append(scheduler.book.gap())

    outcomes = replay(setting, FittedCost(MACHINE), requests, watch=watch)
    assert all(outcome.reason == "length" for outcome in outcomes.values())
    assert len(worst) > 100
    assert max(worst) <= setting.fair_quantum + step


def pressed(fate: str, host_blocks: int, num_blocks: int, machine: CostPrior = MACHINE) -> tuple[float, int]:
    """Seconds to serve 24 requests, and preemptions; the working set is 24 x 40 blocks."""
    setting = config(
        num_blocks=num_blocks, num_host_blocks=host_blocks, preemption=fate, cost_prior=machine, max_running=24
    )
    requests = [request(f"r{i}", 320, 320, 0.02 * i) for i in range(24)]
    outcomes = replay(setting, FittedCost(machine), requests)
    assert all(outcome.reason == "length" and len(outcome.token_times) == 320 for outcome in outcomes.values())
    ended = max(outcome.ended or 0.0 for outcome in outcomes.values())
    return ended, sum(outcome.num_preemptions for outcome in outcomes.values())


def test_a_quarter_of_the_memory_slows_down_and_kills_nobody() -> None:
    calm, none = pressed("auto", 0, 24 * 41)
    tight, some = pressed("auto", 1000, 24 * 41 // 4)
    assert none == 0 < some
    assert calm / tight >= 0.6 * 0.25, "a quarter of the slots would explain a quarter of the speed"


@pytest.mark.parametrize("copied_byte", [1e-11, 2.5e-10, 3e-8, 3e-7])
@pytest.mark.parametrize("num_blocks", [240, 500])
def test_auto_is_no_slower_than_the_better_of_both(copied_byte: float, num_blocks: int) -> None:
    machine = MACHINE._replace(copied_byte=copied_byte)
    auto, swap, recompute = (pressed(fate, 1000, num_blocks, machine)[0] for fate in ("auto", "swap", "recompute"))
    assert auto <= 1.02 * min(swap, recompute)


class LongestPrefix(Fcfs):
    """Whoever has most in the cache goes first, whosever it is."""

    def order(self, running: Iterable[Sequence]) -> Iterator[Sequence]:
        yield from sorted(running, key=lambda s: s.id)
        yield from sorted(self._queue, key=lambda s: (-s.num_matched, s.id))


def test_fairness_keeps_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tenants, each with four long prefixes of its own, a pool that holds half of them: `fair` keeps nine tenths
    of the hits of a policy that looks at nothing else, within its bound."""
    rng = random.Random(5)
    heads = {(t, k): [rng.randrange(1 << 30) for _ in range(1600)] for t in range(4) for k in range(4)}
    asked = []
    for i in range(320):
        t, k = rng.randrange(4), rng.randrange(4)
        asked.append(request(f"r{i}", 1640, 16, 0.05 * i, words=heads[t, k], tenant=f"t{t}"))
    setting = config(policy="fair", num_blocks=1000, fair_quantum=4096.0)
    gaps: list[float] = []
    fair = replay(setting, FittedCost(MACHINE), asked, watch=lambda s, now: gaps.append(s.book.gap()))
    monkeypatch.setattr(scheduler_module, "make_policy", lambda config, book: LongestPrefix())
    greedy = replay(setting, FittedCost(MACHINE), asked)
    hits, most = (sum(o.num_cached for o in outcomes.values()) for outcomes in (fair, greedy))
    assert hits >= 0.9 * most
    assert max(gaps) <= 4096 + PROMPT_WEIGHT * setting.token_budget + OUTPUT_WEIGHT * setting.max_running
