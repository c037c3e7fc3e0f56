"""Reuse distances and curves against brute force, and against the published figures of the Mooncake traces."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.workload import prefix
from pellucid.workload.formats import open_trace
from pellucid.workload.prefix import (
    AccessCollector,
    Accesses,
    belady_hits,
    capacity_curve,
    infinite_hit_rates,
    larger_before,
    numeric_ids,
    reuse_distances,
)
from pellucid.workload.trace import TraceRequest

BLOCK = 4


def collect(path: Path, limit: int | None = None) -> tuple[AccessCollector, Accesses]:
    trace = open_trace(path)
    collector = AccessCollector(trace.header.block_size, limit)
    for row in trace:
        collector.add(row)
    return collector, collector.result()


@st.composite
def chained_traces(draw: st.DrawFn) -> list[TraceRequest]:
    """Rows over a small random tree of blocks: each id has one parent, as real prefix hashes do."""
    num_nodes = draw(st.integers(1, 12))
    parents = [draw(st.integers(-1, node - 1)) for node in range(num_nodes)]
    rows = []
    for _ in range(draw(st.integers(1, 25))):
        node = draw(st.integers(-1, num_nodes - 1))
        chain: list[int] = []
        while node >= 0:
            chain.insert(0, node)
            node = parents[node]
        tail = draw(st.integers(0, BLOCK - 1))
        rows.append(
            TraceRequest(
                arrival_time=0.0,
                input_len=len(chain) * BLOCK + tail,
                output_len=1,
                prefix_block_hash=tuple(chain),
                tail_block_hash=1000 + (chain[-1] if chain else -1) * 10 + tail if tail else None,
            )
        )
    return rows


def accesses_of(rows: list[TraceRequest]) -> Accesses:
    collector = AccessCollector(BLOCK, None)
    for row in rows:
        collector.add(row)
    return collector.result()


def lru_hits(rows: list[TraceRequest], num_blocks: int) -> int:
    """The plain simulation: look up the whole prefix first, then touch from the last block to the first, then evict."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for row in rows:
        for block in row.prefix_block_hash:
            if block not in cache:
                break
            hits += 1
        tail = () if row.tail_block_hash is None else (row.tail_block_hash,)
        for block in reversed(row.prefix_block_hash + tail):
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > num_blocks:
            cache.popitem(last=False)
    return hits


@given(chained_traces(), st.integers(1, 14))
def test_reuse_distance_gives_the_hits_of_an_lru_cache(rows: list[TraceRequest], num_blocks: int) -> None:
    accesses = accesses_of(rows)
    distances = reuse_distances(accesses)
    full = accesses.tokens == BLOCK
    assert int(((distances >= 0) & (distances < num_blocks) & full).sum()) == lru_hits(rows, num_blocks)


@given(chained_traces(), st.integers(1, 14))
def test_no_policy_beats_belady(rows: list[TraceRequest], num_blocks: int) -> None:
    accesses = accesses_of(rows)
    best = belady_hits(accesses, num_blocks)
    assert best >= lru_hits(rows, num_blocks)
    assert best <= belady_hits(accesses, num_blocks + 1)
    assert belady_hits(accesses, 10_000) == lru_hits(rows, 10_000)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.integers(1, 3))
def test_belady_is_optimal_on_small_histories(blocks: list[int], num_blocks: int) -> None:
    """Against exhaustive search over every choice of what to keep."""
    rows = [TraceRequest(arrival_time=0.0, input_len=BLOCK, output_len=1, prefix_block_hash=(b,)) for b in blocks]
    states = {frozenset[int](): 0}
    for block in blocks:
        following: dict[frozenset[int], int] = {}
        for cache, hits in states.items():
            hits += block in cache
            options = [cache | {block}] if len(cache | {block}) <= num_blocks else []
            options += [(cache | {block}) - {victim} for victim in cache | {block}]
            for option in options:
                if len(option) <= num_blocks:
                    following[option] = max(following.get(option, 0), hits)
        states = following
    assert belady_hits(accesses_of(rows), num_blocks) == max(states.values())


@given(st.lists(st.integers(0, 10_000), unique=True, max_size=60))
def test_larger_before(values: list[int]) -> None:
    expected = [sum(earlier > value for earlier in values[:i]) for i, value in enumerate(values)]
    assert larger_before(np.array(values, np.int64)).tolist() == expected


@given(chained_traces())
def test_infinite_rates_by_definition(rows: list[TraceRequest]) -> None:
    seen: set[int] = set()
    token = block = engine = request = started = 0
    for row in rows:
        ids = [*row.prefix_block_hash] + ([row.tail_block_hash] if row.tail_block_hash is not None else [])
        started += len(ids)
        hits = [i for i in ids if i in seen]
        full_hits = [i for i in row.prefix_block_hash if i in seen]
        token += len(full_hits) * BLOCK + (row.input_len % BLOCK if row.tail_block_hash in seen else 0)
        block += len(hits)
        engine += min(len(full_hits), max(0, row.input_len - 1) // BLOCK) * BLOCK
        request += bool(full_hits)
        seen.update(ids)  # type: ignore[arg-type]
    rates = infinite_hit_rates(accesses_of(rows), len(rows), BLOCK)
    total = max(1, sum(row.input_len for row in rows))
    assert rates.token == pytest.approx(token / total)
    assert rates.block == pytest.approx(block / max(1, started))
    assert rates.engine == pytest.approx(engine / total)
    assert rates.request == pytest.approx(request / len(rows))


def test_rows_out_of_order_are_put_in_order() -> None:
    rows = [
        TraceRequest(arrival_time=at, input_len=4 * len(ids), output_len=1, prefix_block_hash=ids)
        for at, ids in ((2.0, (1, 2)), (0.0, (1,)), (1.0, (1, 2, 3)))
    ]
    collector = AccessCollector(BLOCK)
    for row in rows:
        collector.add(row)
    result = collector.result(np.array([1, 2, 0]))
    assert result.ids.tolist() == [1, 3, 2, 1, 2, 1]
    assert result.request.tolist() == [0, 1, 1, 1, 2, 2]


def test_digests_become_numbers_one_to_one() -> None:
    texts = [f"{i:032x}" for i in range(2000)]
    ids = numeric_ids(texts)
    assert len(set(ids)) == 2000
    assert numeric_ids(texts) == ids
    assert numeric_ids((3, 4)) == (3, 4)


@pytest.mark.parametrize(
    ("name", "token", "block", "lru"),
    [
        (
            "mooncake_conversation.jsonl",
            0.374,
            0.366,
            {200_000: 0.043, 1_000_000: 0.054, 3_000_000: 0.139, 10_000_000: 0.291, 30_000_000: 0.366},
        ),
        (
            "mooncake_synthetic.jsonl",
            0.651,
            0.640,
            {500_000: 0.084, 3_000_000: 0.315, 10_000_000: 0.577, 30_000_000: 0.651},
        ),
    ],
)
def test_published_rates(shared_traces: Path, name: str, token: float, block: float, lru: dict[int, float]) -> None:
    collector, accesses = collect(shared_traces / name)
    rates = infinite_hit_rates(accesses, collector.num_requests, 512)
    assert rates.token == pytest.approx(token, abs=0.0005)
    assert rates.block == pytest.approx(block, abs=0.0005)
    for point in capacity_curve(accesses, 512, list(lru)):
        assert point.lru == pytest.approx(lru[point.cache_tokens], abs=0.003)
        assert point.lru <= point.belady <= rates.token


def test_a_sample_is_close_and_says_how_close(shared_traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shared_traces / "mooncake_synthetic.jsonl"
    collector, exact = collect(path)
    monkeypatch.setattr(prefix, "EXACT_ACCESSES", 20_000)
    _, sampled = collect(path, limit=40_000)
    assert sampled.rate < 1.0
    assert len(sampled.ids) <= 40_000
    sizes = [500_000, 3_000_000, 10_000_000]
    for truth, guess in zip(capacity_curve(exact, 512, sizes), capacity_curve(sampled, 512, sizes)):
        assert truth.lru_error == 0.0
        assert guess.lru_error > 0.0
        assert abs(guess.lru - truth.lru) < 4 * guess.lru_error + 0.005
        assert abs(guess.belady - truth.belady) < 4 * guess.belady_error + 0.005
    truth_rates = infinite_hit_rates(exact, collector.num_requests, 512)
    rates = infinite_hit_rates(sampled, collector.num_requests, 512)
    assert rates.token == pytest.approx(truth_rates.token, abs=0.02)
    assert rates.request == pytest.approx(truth_rates.request, abs=0.05)


def test_one_hot_block_does_not_empty_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prompt begins with the same block: its uses alone outgrow the limit."""
    monkeypatch.setattr(prefix, "EXACT_ACCESSES", 1000)
    monkeypatch.setattr(prefix, "MIN_SAMPLED_BLOCKS", 50)
    monkeypatch.setattr(prefix, "_FLUSH_ACCESSES", 500)
    collector = AccessCollector(BLOCK, 100)
    for number in range(5000):
        ids = (0, 10 + number // 2)
        collector.add(TraceRequest(arrival_time=0.0, input_len=2 * BLOCK, output_len=1, prefix_block_hash=ids))
    accesses = collector.result()
    assert accesses.rate < 1.0
    assert len(np.unique(accesses.ids)) > 20
    rates = infinite_hit_rates(accesses, 5000, BLOCK)
    assert rates.token == pytest.approx(0.75, abs=0.05)
