"""What a view says is what the scheduler's state is, and looking changes nothing."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from tests.core.fakes import FakeExecutor

from pellucid.core.block_pool import BlockPool, BlockState
from pellucid.core.config import SchedulerConfig
from pellucid.core.events import Finished
from pellucid.core.ledger import CAUSES
from pellucid.core.request import Request, SamplingParams
from pellucid.core.scheduler import Scheduler
from pellucid.engine import view
from pellucid.engine.engine import Engine
from pellucid.engine.memory_view import HELD, IN_FLIGHT, IN_TREE, MOST_BRANCHES, SHARED, TreeWalk, read_pool
from pellucid.engine.view import MOST_LANES, MOST_WAITING, EngineView

CONFIG = SchedulerConfig(num_blocks=64, block_size=4, max_context=128, max_running=8, token_budget=32)


class Clock:
    """Moves by a millisecond each time it is read."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def make_engine(config: SchedulerConfig = CONFIG) -> Engine:
    return Engine(Scheduler(config), FakeExecutor(config.num_blocks, config.block_size), Clock())


def ask(engine: Engine, name: str, prompt: list[int], tenant: str = "", max_tokens: int = 8) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    engine.add(Request(name, tuple(prompt), sampling, engine.clock(), tenant=tenant))


def load(engine: Engine, seed: int) -> None:
    """Requests of two tenants, half of which begin alike; more than the pool holds."""
    chance = random.Random(seed)
    head = [chance.randrange(9) + 1 for _ in range(12)]
    for i in range(20):
        tail = [chance.randrange(9) + 1 for _ in range(chance.randrange(1, 40))]
        ask(engine, f"r{i}", (head if i % 2 else []) + tail, tenant="ab"[i % 2], max_tokens=chance.randrange(1, 20))


def state_of(flags: int) -> BlockState:
    if flags & IN_FLIGHT:
        return BlockState.IN_FLIGHT
    if flags & HELD:
        return BlockState.ACTIVE
    return BlockState.CACHED if flags & IN_TREE else BlockState.FREE


def check_pool(seen: EngineView, engine: Engine) -> None:
    pool = engine.scheduler.kv.pool
    names = [tenant.tenant.name for tenant in seen.tenants]
    holders: dict[int, set[str]] = {}
    for sequence in engine.scheduler.running.values():
        for block in sequence.block_table:
            holders.setdefault(block, set()).add(sequence.request.tenant)
    for block in range(pool.num_blocks):
        flags, owner = seen.pool.flags[block], seen.pool.owners[block]
        assert state_of(flags) is pool.state(block)
        assert bool(flags & SHARED) == (pool.refs[block] > 1)
        assert bool(flags & IN_TREE) == pool.in_tree(block)
        if block in holders:
            assert names[owner - 1] in holders[block]


def check_lanes(seen: EngineView) -> None:
    for lane in seen.lanes:
        assert lane.spans[0].start == pytest.approx(lane.arrival)
        for before, after in zip(lane.spans, lane.spans[1:]):
            assert before.end == after.start
        if lane.status in ("waiting", "running", "swapped"):
            assert lane.spans[-1].end == seen.now
        for span in lane.spans:
            assert sum(seconds for _, seconds in span.causes) == pytest.approx(span.end - span.start, abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_a_view_is_the_state_and_leaves_it_as_it_was(seed):
    watched, alone = make_engine(), make_engine()
    load(watched, seed)
    load(alone, seed)
    seen_causes: set[str] = set()
    while watched.has_work:
        seen = watched.look()
        check_pool(seen, watched)
        check_lanes(seen)
        seen_causes |= {cause for lane in seen.lanes for span in lane.spans for cause, _ in span.causes}
        assert sum(seen.waiting.values()) == watched.scheduler.num_waiting
        assert sum((Counter(tenant.waiting) for tenant in seen.tenants), Counter()) == Counter(seen.waiting)
        watched.clock.now = alone.clock.now
        assert watched.step() == alone.step()
    assert not alone.has_work
    check_lanes(watched.look())
    assert {"queue.memory", "prefill.own", "decode.own", "decode.batch"} <= seen_causes <= set(CAUSES)


def test_a_lane_is_its_ledger_however_often_it_was_looked_at():
    engine = make_engine()
    load(engine, 3)
    engine.look()
    reports = {}
    for step in range(10_000):
        if not engine.has_work:
            break
        reports |= {event.request_id: event.ledger for event in engine.step() if isinstance(event, Finished)}
        if step % 3 == 0:
            engine.look()
    lanes = {lane.request_id: lane for lane in engine.look().lanes}
    assert len(lanes) == 20
    for name, lane in lanes.items():
        drawn: Counter[str] = Counter()
        for span in lane.spans:
            drawn.update(dict(span.causes))
        assert dict(drawn) == pytest.approx(dict(reports[name].causes), abs=1e-9)
        assert lane.status == "length"


def test_the_host_tier_and_whose_blocks_are_cached_are_seen():
    """A pool that is too small for what is asked twice, beside a host tier that keeps it."""
    config = replace(CONFIG, num_blocks=24, num_host_blocks=64, bytes_per_block=1, preemption="swap")
    executor = FakeExecutor(24, 4, num_host_blocks=64)
    engine = Engine(Scheduler(config), executor, Clock())
    seen_host: set[BlockState] = set()
    for turn in range(2):
        for i, tenant in enumerate("abab"):
            ask(engine, f"{turn}{i}", [i + 1] * 40, tenant=tenant, max_tokens=20)
        while engine.has_work:
            engine.step()
            seen = engine.look()
            check_pool(seen, engine)
            assert seen.host is not None
            host = engine.scheduler.kv.host
            assert [state_of(flags) for flags in seen.host.flags] == [host.state(i) for i in range(64)]
            seen_host |= {state_of(flags) for flags in seen.host.flags}
    assert {BlockState.FREE, BlockState.CACHED} <= seen_host
    assert [tenant.tenant.name for tenant in seen.tenants] == ["a", "b"]
    assert {owner for owner, flags in zip(seen.host.owners, seen.host.flags) if flags & IN_TREE} == {1, 2}


def test_in_flight_blocks_are_seen():
    pool = BlockPool(300)
    block, other = pool.allocate(2)
    pool.begin_transfer(block)
    for _ in range(300):  # more holders than a byte counts
        pool.ref(other)
    flags = read_pool(pool, bytes(300)).flags
    assert flags[block] == HELD | IN_FLIGHT
    assert flags[other] == HELD | SHARED
    assert Counter(flags)[0] == 298


def weight(node) -> int:
    return 1 + sum(weight(child) for child in (node.children or {}).values())


def test_branches_are_the_tree_without_its_forks():
    engine = make_engine()
    head = [1, 2, 3, 4, 5, 6, 7, 8]
    engine.look()
    ask(engine, "a", [*head, 1, 1, 1, 1, 9], max_tokens=1)
    while engine.has_work:
        engine.step()
    ask(engine, "b", [*head, 2, 2, 2, 2, 9], max_tokens=1)
    ask(engine, "c", [*head, 1, 1, 1, 1, 8], max_tokens=9)
    engine.step()
    for _ in range(view.LOOKS_PER_WALK):
        seen = engine.look(tokens=True)
    top, *below = seen.branches
    assert (top.parent, top.start, top.num_blocks, top.num_below) == (-1, 0, 2, 4)
    assert top.head == (1, 2, 3, 4)
    assert {branch.head for branch in below} == {(1, 1, 1, 1), (2, 2, 2, 2)}
    assert {(branch.parent, branch.start, branch.num_blocks, branch.num_below) for branch in below} == {(0, 2, 1, 1)}
    assert top.num_hits == 2
    assert sorted(branch.num_hits for branch in below) == [0, 1]
    assert top.num_users >= 1


def test_branches_of_a_busy_tree_add_up():
    engine = make_engine()
    load(engine, 7)
    while engine.has_work:
        engine.step()
    tree = engine.scheduler.kv.tree
    branches = TreeWalk(tree, 64, 0, {}).heaviest()
    roots = [child for root in tree.roots().values() for child in root.children.values()]
    heaviest = max(map(weight, roots))
    assert branches[0].num_below == heaviest
    assert all(branch.parent < i for i, branch in enumerate(branches))
    assert [branch.num_below for branch in branches] == sorted((b.num_below for b in branches), reverse=True)
    assert len(branches) <= MOST_BRANCHES


def test_a_view_is_bounded_however_many_wait():
    engine = make_engine()
    for i in range(400):
        ask(engine, f"r{i}", [1 + i % 9] * 5, max_tokens=30)
    engine.step()
    seen = engine.look()
    assert sum(seen.waiting.values()) == engine.scheduler.num_waiting > 390
    assert len(seen.lanes) == len(engine.scheduler.running) + MOST_WAITING
    for _ in range(200):
        engine.step()
    assert len(engine.look().lanes) <= MOST_LANES


def test_token_ids_leave_the_engine_only_when_asked_for():
    engine = make_engine()
    ask(engine, "a", [5, 6, 7, 8, 9, 1, 2, 3], max_tokens=9)
    engine.step()
    seen = engine.look()
    assert all(lane.head == () for lane in seen.lanes)
    assert all(branch.head == () for branch in seen.branches)
    engine.look()
    engine.look()
    seen = engine.look(tokens=True)
    assert [lane.head for lane in seen.lanes] == [(5, 6, 7, 8, 9, 1, 2, 3)]
    assert seen.branches[0].head == (5, 6, 7, 8)


def test_nothing_is_recorded_for_nobody():
    engine = make_engine()
    ask(engine, "a", [1] * 9, max_tokens=3)
    while engine.has_work:
        engine.step()
    assert engine.look().lanes == ()
    ask(engine, "b", [2] * 9, max_tokens=3)
    while engine.has_work:
        engine.step()
    assert [lane.request_id for lane in engine.look().lanes] == ["b"]
    ask(engine, "c", [3] * 9, max_tokens=3)
    engine.clock.now += view.SECONDS_WATCHED
    while engine.has_work:  # nobody has looked for long
        engine.step()
    assert engine.look().lanes == ()
