"""Generators: repeatable, at the rate asked for, sharing exactly what they say."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.core.errors import ConfigError
from pellucid.workload.formats import open_trace, servegen
from pellucid.workload.formats.source import members
from pellucid.workload.prompts import expected_cached
from pellucid.workload.synthetic import (
    Arrivals,
    LengthDistribution,
    Pattern,
    Segment,
    SynthSpec,
    generate,
    independent_lengths,
    lengths_of_rows,
    parse_tenants,
    segment_hashes,
)
from pellucid.workload.trace import TraceError

LENGTHS = independent_lengths(LengthDistribution("fixed", 50), LengthDistribution("fixed", 10))


def spec(pattern: str = "independent", arrivals: str = "poisson", rate: float = 5.0, **more: object) -> SynthSpec:
    values: dict[str, object] = {"num_requests": 400, "lengths": LENGTHS, **more}
    return SynthSpec(arrivals=Arrivals.parse(arrivals, rate), pattern=Pattern.parse(pattern), **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        ("poisson", 1.0),
        ("constant", 0.0),
        ("gamma:2", 2.0),
        ("weibull:0.7", 1.46),
        ("onoff:5:15", None),
        ("diurnal:40:0.8", None),
    ],
)
def test_arrivals_keep_their_rate_and_burstiness(arrivals: str, cv: float | None) -> None:
    rng = np.random.default_rng(3)
    times = np.array(list(itertools.islice(Arrivals.parse(arrivals, 5.0).times(rng), 20_000)))
    assert np.all(np.diff(times) >= 0)
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.05)
    if cv is not None:
        gaps = np.diff(times)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.1)
    if arrivals.startswith("onoff"):
        assert np.all(times % 20.0 <= 5.0), "nothing arrives in a pause"


@pytest.mark.parametrize("pattern", ["independent", "system:4:100", "rag:20:32:3", "chat:4:32:5", "agent:6:64"])
def test_equal_specs_give_equal_rows_in_order(pattern: str) -> None:
    rows = list(generate(spec(pattern)))
    assert rows == list(generate(spec(pattern)))
    assert rows != list(generate(spec(pattern, seed=1)))
    assert len(rows) == 400
    assert np.all(np.diff([row.arrival_time for row in rows]) >= 0)
    for row in rows:
        assert len(row.prefix_block_hash) == row.input_len // 16


def test_changing_the_rate_leaves_lengths_and_sharing() -> None:
    lengths = independent_lengths(LengthDistribution("uniform", 10, 90), LengthDistribution("lognormal", 20, 1.0, 99))
    slow, fast = (list(generate(spec("system:3:64", rate=rate, lengths=lengths))) for rate in (1.0, 50.0))
    assert [(r.input_len, r.output_len, r.prefix_block_hash) for r in slow] == [
        (r.input_len, r.output_len, r.prefix_block_hash) for r in fast
    ]
    assert {10 <= r.input_len - 64 <= 90 for r in slow} == {True}
    assert max(r.output_len for r in slow) <= 99


def test_system_prompts_share_their_whole_blocks() -> None:
    rows = list(generate(spec("system:4:100")))
    assert len({row.prefix_block_hash[:6] for row in rows}) == 4, "6 full blocks of 16 in 100 tokens"
    assert len({row.prefix_block_hash[6] for row in rows}) == 400, "block 7 mixes in the own part"
    assert sum(expected_cached(rows, 16)) == (400 - 4) * 96


def test_chat_turns_repeat_all_that_was_said() -> None:
    rows = list(generate(spec("chat:5:32:2")))
    sessions: dict[str, list[int]] = {}
    by_id = {}
    for row in rows:
        turns = sessions.setdefault(row.session, [])
        assert row.turn == len(turns)
        assert row.input_len == 32 + 50 * (row.turn + 1) + 10 * row.turn
        if turns:
            before = by_id[row.session]
            shared = before.input_len // 16
            assert row.prefix_block_hash[:shared] == before.prefix_block_hash
        turns.append(row.input_len)
        by_id[row.session] = row
    assert np.mean([len(turns) for turns in sessions.values()]) > 2


def test_rag_documents_share_only_as_a_prefix() -> None:
    rows = list(generate(spec("rag:5:32:2")))
    first_documents = {row.prefix_block_hash[:2] for row in rows}
    assert len(first_documents) == 5
    assert len({row.prefix_block_hash[:4] for row in rows}) == 5 * 4, "ordered pairs of different documents"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), max_size=5), st.integers(1, 16))
def test_segments_share_a_block_exactly_when_they_share_its_tokens(
    parts: list[tuple[str, int]], block_size: int
) -> None:
    segments = [Segment(f"{name}{number}", number) for name, number in parts]
    tokens = [(s.name, i) for s in segments for i in range(s.num_tokens)]
    ids = segment_hashes(segments, block_size)
    assert len(ids) == len(tokens) // block_size
    longer = [*segments, Segment("more", 7)]
    assert segment_hashes(longer, block_size)[: len(ids)] == ids
    other = segment_hashes([Segment("x", 1), *segments], block_size)
    assert not set(ids) & set(other)


def test_tenants_by_weight_and_ends() -> None:
    rows = list(generate(spec(tenants=parse_tenants("big=3,small"), duration=30.0, num_requests=None)))
    assert rows[-1].arrival_time < 30.0
    big = sum(row.tenant == "big" for row in rows)
    assert 0.6 < big / len(rows) < 0.9
    with pytest.raises(ConfigError, match="--requests or --duration"):
        spec(num_requests=None)


def test_lengths_of_a_trace_stay_paired() -> None:
    draw = lengths_of_rows([(10, 1), (20, 2)])
    rng = np.random.default_rng(0)
    assert {draw(rng) for _ in range(50)} == {(10, 1), (20, 2)}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Arrivals.parse("poison", 1.0),
        lambda: Arrivals.parse("gamma", 1.0),
        lambda: Arrivals.parse("diurnal:10:2", 1.0),
        lambda: Arrivals.parse("poisson", 0.0),
        lambda: LengthDistribution.parse("many", "--input-len"),
        lambda: LengthDistribution.parse("uniform:9:3", "--input-len"),
        lambda: LengthDistribution.parse("0", "--input-len"),
        lambda: Pattern.parse("system:4"),
        lambda: Pattern.parse("rag:2:10:3"),
        lambda: Pattern.parse("crowd"),
        lambda: parse_tenants("a=none"),
        lambda: lengths_of_rows([]),
    ],
)
def test_bad_descriptions_are_refused(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]


def test_servegen_clients_generate_at_their_rate(data: Path) -> None:
    path = data / "servegen_r1_2_clients.tar.gz"
    with members(path) as files:
        clients = servegen.load_clients(files)
    assert [client.name for client in clients] == ["deepseek-r1/000002", "deepseek-r1/000004"]
    rows = list(servegen.generate(clients, seed=0))
    assert rows == list(servegen.generate(clients, seed=0))
    assert np.all(np.diff([row.arrival_time for row in rows]) >= 0)
    for client in clients:
        expected = sum(window.rate * 600.0 for window in client.windows)
        found = sum(row.tenant == client.name for row in rows)
        assert abs(found - expected) < 6 * expected**0.5 + 10, client.name
    known = {int(v) for client in clients for _, inputs, _ in client.lengths for v in inputs.values}
    assert {row.input_len for row in rows} <= known
    part = list(servegen.generate(clients, seed=0, start=3600.0, duration=7200.0))
    assert [r.arrival_time + 3600.0 for r in part] == pytest.approx(
        [r.arrival_time for r in rows if 3600 <= r.arrival_time < 10800]
    )
    assert list(open_trace(path)) == rows, "read as a trace, an archive is what seed 0 generates"


def test_a_servegen_file_that_is_none(tmp_path: Path) -> None:
    import tarfile

    (tmp_path / "chunk-0-trace.csv").write_text("0,fast,1,Gamma,1,1\n")
    (tmp_path / "chunk-0-dataset.json").write_text('{"0": {"input_tokens": "{1: 1.0}", "output_tokens": "{2: 1.0}"}}')
    with tarfile.open(tmp_path / "s.tar.gz", "w:gz") as archive:
        for name in ("chunk-0-trace.csv", "chunk-0-dataset.json"):
            archive.add(tmp_path / name, name)
    with pytest.raises(TraceError, match=r"chunk-0-trace.csv:1: .*expected window_start"):
        list(open_trace(tmp_path / "s.tar.gz"))
