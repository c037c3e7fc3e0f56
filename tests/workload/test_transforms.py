"""What each transform changes, what it leaves alone, and that the header tells it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.workload import transforms
from pellucid.workload.prefix import AccessCollector, HitRates, infinite_hit_rates
from pellucid.workload.trace import TraceError, TraceHeader, TraceRequest
from pellucid.workload.transforms import Stage


def row(at: float, *blocks: int | str, **more: object) -> TraceRequest:
    values: dict[str, object] = {"input_len": 4 * len(blocks) + 1, "output_len": 2, "prefix_block_hash": blocks, **more}
    return TraceRequest(arrival_time=at, **values)  # type: ignore[arg-type]


ROWS = [
    row(0.0, 1, 2),
    row(1.0, 1, 3, session="s", turn=0),
    row(1.0),
    row(2.5, 1, 2, 4, session="s", turn=1),
    row(4.0, 9),
]


def stage(rows: list[TraceRequest] | None = None) -> Stage:
    return Stage(TraceHeader(4, "hand"), ROWS if rows is None else rows)


def rates(rows: list[TraceRequest]) -> HitRates:
    collector = AccessCollector(4, None)
    for item in rows:
        collector.add(item)
    return infinite_hit_rates(collector.result(), len(rows), 4)


def test_slice_by_time_moves_the_start_to_zero() -> None:
    found = transforms.slice_rows(stage(), "abc", start=1.0, end=4.0, first=None, last=None)
    assert [r.arrival_time for r in found.rows] == [0.0, 0.0, 1.5]
    (entry,) = found.header.transforms
    assert (entry.name, entry.arguments, entry.source_sha256) == ("slice", {"start": 1.0, "end": 4.0}, "abc")


def test_slice_by_number_keeps_times() -> None:
    found = list(transforms.slice_rows(stage(), "", start=None, end=None, first=1, last=3).rows)
    assert found == ROWS[1:3]
    with pytest.raises(TraceError, match="not behind"):
        transforms.slice_rows(stage(), "", start=2.0, end=1.0, first=None, last=None)


@given(st.floats(0.01, 100.0))
def test_scale_changes_the_rate_and_nothing_else(speed: float) -> None:
    found = list(transforms.scale(stage(), "", speed=speed).rows)
    assert [r.arrival_time for r in found] == [r.arrival_time / speed for r in ROWS]
    assert [r.prefix_block_hash for r in found] == [r.prefix_block_hash for r in ROWS]


@pytest.mark.parametrize("speed", [0.0, -1.0, float("inf"), float("nan")])
def test_scale_refuses_nonsense(speed: float) -> None:
    with pytest.raises(TraceError, match="must be positive"):
        transforms.scale(stage(), "", speed=speed)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(0, 5))
def test_dequantize_stays_inside_the_tick_and_in_order(ticks: list[int], seed: int) -> None:
    rows = [row(3.0 * tick, i) for i, tick in enumerate(sorted(ticks))]
    found = list(transforms.dequantize(stage(rows), "", tick=3.0, seed=seed).rows)
    assert [r.prefix_block_hash for r in found] == [r.prefix_block_hash for r in rows]
    assert all(0.0 <= after.arrival_time - before.arrival_time < 3.0 for before, after in zip(rows, found))
    assert np.all(np.diff([r.arrival_time for r in found]) >= 0)
    assert found == list(transforms.dequantize(stage(rows), "", tick=3.0, seed=seed).rows)


def test_dequantize_wants_order() -> None:
    with pytest.raises(TraceError, match="--sort"):
        list(transforms.dequantize(stage([row(3.0), row(0.0)]), "", tick=3.0, seed=0).rows)


def test_sample_keeps_sessions_whole_and_is_repeatable() -> None:
    rows = [row(float(i), session=f"s{i % 50}") for i in range(500)]
    found = list(transforms.sample(stage(rows), "", share=0.3, seed=1).rows)
    kept = {r.session for r in found}
    assert 5 <= len(kept) <= 25
    assert len(found) == 10 * len(kept), "all ten turns of each kept session"
    assert found == list(transforms.sample(stage(rows), "", share=0.3, seed=1).rows)
    assert {r.session for r in transforms.sample(stage(rows), "", share=0.3, seed=2).rows} != kept
    assert list(transforms.sample(stage(rows), "", share=1.0, seed=0).rows) == rows


def test_sample_drops_what_cannot_be_served() -> None:
    rows = [row(0.0), row(0.0), row(1.0, output_len=0), row(2.0, input_len=0)]
    kept = transforms.sample(stage(rows), "", share=1.0, seed=0, drop_empty=True, drop_duplicates=True)
    assert list(kept.rows) == rows[:1]
    assert kept.header.transforms[0].arguments == {"share": 1.0, "seed": 0, "drop_empty": True, "drop_duplicates": True}


def test_merge_keeps_time_order_tenants_and_sharing_apart() -> None:
    merged = transforms.merge([stage(), stage()], ["aa", "bb"], tenants=["x", "y"], offsets=[0.0, 0.5])
    found = list(merged.rows)
    assert np.all(np.diff([r.arrival_time for r in found]) >= 0)
    for tenant in ("x", "y"):
        assert rates([r for r in found if r.tenant == tenant]) == rates(ROWS)
    x = {block for r in found if r.tenant == "x" for block in r.prefix_block_hash}
    y = {block for r in found if r.tenant == "y" for block in r.prefix_block_hash}
    assert not x & y
    assert {r.session for r in found} == {"", "0/s", "1/s"}
    assert merged.header.origin == "hand + hand"
    same = list(transforms.merge([stage(), stage()], ["aa", "aa"], tenants=[], offsets=[0.0, 0.5]).rows)
    assert rates(same).engine > 0.5, "the same file twice shares its blocks"
    with pytest.raises(TraceError, match="block sizes differ"):
        transforms.merge([stage(), Stage(TraceHeader(16), [])], ["a", "b"], tenants=[], offsets=[0.0, 0.0])


def test_anonymize_keeps_sharing_and_drops_the_rest() -> None:
    rows = [
        row(0.0, "aa", "bb", tenant="acme", session="bob", id="r1", extra={"user": "bob"}, outcome={"x": 1}),
        row(1.0, "aa", "cc", tenant="acme", input_token_ids=(1,) * 9, output_token_ids=(2, 3), parent="r1"),
        row(2.0, "aa", tenant="other"),
    ]
    found = list(transforms.anonymize(stage(rows), "", key=b"12345678").rows)
    assert rates(found) == rates(rows)
    assert [r.tenant for r in found] == ["t0", "t0", "t1"]
    assert found[1].parent == found[0].id != "r1"
    text = repr(found)
    assert not any(secret in text for secret in ("acme", "other", "bob", "'aa'", "r1", "input_token_ids=("))
    assert [r.prefix_block_hash for r in transforms.anonymize(stage(rows), "", key=b"87654321").rows] != [
        r.prefix_block_hash for r in found
    ]
    assert [(r.arrival_time, r.input_len, r.output_len) for r in found] == [
        (r.arrival_time, r.input_len, r.output_len) for r in rows
    ]
    with pytest.raises(TraceError, match="fewer than 8"):
        transforms.anonymize(stage(rows), "", key=b"1234567")


def test_chain_makes_equal_blocks_after_different_prefixes_differ() -> None:
    rows = [row(0.0, 1, 2), row(1.0, 3, 2), row(2.0, 1, 2)]
    a, b, c = (r.prefix_block_hash for r in transforms.chain(stage(rows), "").rows)
    assert a == c
    assert a[1] != b[1]


@pytest.mark.parametrize(
    "step", [transforms.sort_rows, transforms.from_zero, transforms.chain, transforms.without_tokens]
)
def test_every_repair_is_recorded(step: Callable[[Stage, str], Stage]) -> None:
    found = step(stage([row(3.0, 1, input_token_ids=(1,) * 5), row(2.0, 1)]), "ff")
    assert [t.source_sha256 for t in found.header.transforms] == ["ff"]
    rows = list(found.rows)
    if step is transforms.sort_rows:
        assert [r.arrival_time for r in rows] == [2.0, 3.0]
    if step is transforms.from_zero:
        assert [r.arrival_time for r in rows] == [0.0, -1.0]
    if step is transforms.without_tokens:
        assert rows[0].input_token_ids is None
        assert rows[0].prefix_block_hash == (1,)
