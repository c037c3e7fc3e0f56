"""The analysis as a whole: its stable names, the ladder's order, and the published ceilings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import pytest

from pellucid.workload import prefix
from pellucid.workload.analyze import Question, Room, Rung, analyze
from pellucid.workload.formats import ReadOptions, open_trace
from pellucid.workload.own_cache import own_mask
from pellucid.workload.trace import TraceHeader, TraceRequest, write_trace


class ToyDevice:
    """A device on which a token costs 20 us, a pair of tokens 10 ns, and a step of the weights 10 us.

    `room_per_device` KV tokens fit on each device, from the second one on.
    """

    def __init__(self, room_per_device: int) -> None:
        self.room_per_device = room_per_device

    def rungs(self, requests: Iterable[tuple[int, int, int]], batch: float) -> Sequence[Rung]:
        linear = attention = weights = 0.0
        for num_input, num_output, num_cached in requests:
            new = num_input - num_cached + num_output
            linear += 2e-5 * new
            attention += 1e-8 * new * (num_input + num_output)
            weights += 1e-5 * num_output / batch
        compute = linear + attention
        return [
            Rung("parameters", linear, linear, None, ""),
            Rung("attention", compute, compute, None, ""),
            Rung("bandwidth", compute, compute, 1.0, ""),
            Rung("capacity", max(compute, weights), compute, weights, ""),
        ]

    def room(self, num_devices: int, context: int) -> Room:
        return Room((num_devices - 1) * self.room_per_device, 1)


def test_stable_names_and_order_of_the_ladder(data: Path) -> None:
    trace = open_trace(data / "mooncake_conversation_300.jsonl")
    document = analyze(trace, Question(ceilings=ToyDevice(200_000))).document
    assert document["num_requests"] == 300
    assert 0 < document["prefix"]["token_hit_infinite"] < 1
    assert 0 < document["prefix"]["block_hit_infinite"] < 1
    for point in document["prefix"]["curve"]:
        assert {"cache_tokens", "lru", "belady"} <= point.keys()
        assert point["lru"] <= point["belady"]
        assert point["pellucid"] <= point["belady"] + 1e-9
    assert [rung["rung"] for rung in document["ladder"]] == [
        "parameters",
        "attention",
        "bandwidth",
        "capacity",
        "policy",
    ]
    seconds = [rung["device_seconds"] for rung in document["ladder"]]
    assert seconds == sorted(seconds), "each rung knows more than the one before"
    assert document["ladder_no_reuse"][1]["device_seconds"] > seconds[1]
    msgspec.json.encode(document)


def test_a_sampled_ladder_is_close_to_the_exact_one(shared_traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    question = Question(cache_sizes=(1_000_000,), ceilings=ToyDevice(2_000_000))
    trace = open_trace(shared_traces / "mooncake_synthetic.jsonl")
    exact = analyze(trace, question).document
    monkeypatch.setattr(prefix, "EXACT_ACCESSES", 10_000)
    monkeypatch.setattr(prefix, "SAMPLE_ACCESSES", 40_000)
    sampled = analyze(trace, question).document
    assert sampled["prefix"]["sampled"]
    assert not exact["prefix"]["sampled"]
    for guess, truth in zip(sampled["ladder"], exact["ladder"], strict=True):
        assert guess["device_seconds"] == pytest.approx(truth["device_seconds"], rel=0.06), truth["rung"]


def test_the_least_number_of_devices_is_enough_and_least(data: Path) -> None:
    trace = open_trace(data / "mooncake_conversation_300.jsonl")
    document = analyze(trace, Question(ceilings=ToyDevice(1000))).document
    least, span = document["num_devices"], document["span_seconds"]
    policy = document["ladder"][-1]["device_seconds"]
    assert least >= policy / span * 0.97, "enough, up to the difference between LRU and our own policy"
    assert least <= policy / span * 1.1 + 1
    assert document["perfect_scheduler"]["trace_speed"] == pytest.approx(span * least / policy)


def test_a_model_that_never_fits_ends_the_ladder(data: Path) -> None:
    document = analyze(open_trace(data / "azure_2023_conv_300.csv"), Question(ceilings=ToyDevice(0))).document
    assert len(document["ladder"]) == 3
    assert "do not fit" in document["ladder_stops_because"]


def test_a_trace_too_heavy_for_any_fleet_says_so(tmp_path: Path) -> None:
    rows = [TraceRequest(arrival_time=i * 1e-6, input_len=100_000, output_len=10) for i in range(9)]
    write_trace(tmp_path / "t.jsonl", TraceHeader(0), rows)
    document = analyze(open_trace(tmp_path / "t.jsonl"), Question(ceilings=ToyDevice(10**9))).document
    assert "too few" in document["ladder_stops_because"]


def test_a_trace_without_blocks_says_so(data: Path) -> None:
    document = analyze(open_trace(data / "azure_2023_conv_300.csv"), Question()).document
    assert document["prefix"]["token_hit_infinite"] is None
    assert "no block hashes" in document["prefix"]["unknown_because"]
    assert document["prefix"]["curve"] == []
    assert "ladder" not in document


def test_rows_out_of_order_are_analysed_in_order(tmp_path: Path) -> None:
    rows = [
        TraceRequest(arrival_time=at, input_len=33, output_len=1, prefix_block_hash=ids)
        for at, ids in ((5.0, (1, 2)), (0.0, (1, 2)), (9.0, (1, 3)))
    ]
    write_trace(tmp_path / "a.jsonl", TraceHeader(16), rows)
    write_trace(tmp_path / "b.jsonl", TraceHeader(16), sorted(rows, key=lambda row: row.arrival_time))
    mixed, ordered = (analyze(open_trace(tmp_path / name), Question()).document for name in ("a.jsonl", "b.jsonl"))
    assert (mixed["sorted"], ordered["sorted"]) == (False, True)
    assert mixed["prefix"] == ordered["prefix"]
    assert mixed["span_seconds"] == 9.0


def test_generated_tokens_of_earlier_turns(tmp_path: Path) -> None:
    """Turn 1 is 16 + 16 tokens; turn 2 repeats all 32 and adds 16: with answers cached 32 of 48 are known, else 16."""
    first, answer, more = tuple(range(16)), tuple(range(100, 116)), tuple(range(200, 216))
    rows = [
        TraceRequest(arrival_time=0.0, input_len=16, output_len=16, input_token_ids=first, output_token_ids=answer),
        TraceRequest(
            arrival_time=1.0, input_len=48, output_len=16, input_token_ids=first + answer + more, output_token_ids=more
        ),
    ]
    write_trace(tmp_path / "t.jsonl", TraceHeader(16), rows)
    reuse = analyze(open_trace(tmp_path / "t.jsonl"), Question()).document["prefix"]
    assert reuse["engine_hit_infinite"] == pytest.approx(16 / 64)
    assert reuse["with_generated"] == {"rate": pytest.approx(32 / 64), "basis": "token ids"}
    plain = [
        TraceRequest(arrival_time=r.arrival_time, input_len=r.input_len, output_len=16, session="s", turn=i)
        for i, r in enumerate(rows)
    ]
    write_trace(tmp_path / "s.jsonl", TraceHeader(0), plain)
    reuse = analyze(open_trace(tmp_path / "s.jsonl"), Question()).document["prefix"]
    assert reuse["with_generated"] == {"rate": pytest.approx(32 / 64), "basis": "sessions (assumed)"}


def test_bounds_for_other_block_sizes(tmp_path: Path) -> None:
    """Two prompts of 1,100 tokens share one 512-block: they share 512 to 1,023 tokens."""
    rows = [
        TraceRequest(arrival_time=0.0, input_len=1100, output_len=1, prefix_block_hash=ids, tail_block_hash=tail)
        for ids, tail in (((1, 2), 3), ((1, 4), 5))
    ]
    write_trace(tmp_path / "t.jsonl", TraceHeader(512), rows)
    trace = open_trace(tmp_path / "t.jsonl")
    small = analyze(trace, Question(engine_block=16)).document["prefix"]["bounds"]
    assert (small["lower"], small["upper"]) == (512 / 2200, (1023 // 16 * 16 + 511 // 16 * 16) / 2200)
    large = analyze(trace, Question(engine_block=2048)).document["prefix"]["bounds"]
    assert (large["lower"], large["upper"]) == (0.0, 0.0)


def test_our_own_cache_is_lru_in_effect(data: Path) -> None:
    """The engine's manager, run over a trace, hits as often as LRU over full blocks does."""
    trace = open_trace(data / "mooncake_synthetic_150.jsonl.gz")
    collector = prefix.AccessCollector(512, None)
    for row in trace:
        collector.add(msgspec.structs.replace(row, tail_block_hash=None))
    accesses = collector.result()
    longest = max(len(row.prefix_block_hash) for row in trace)
    for num_blocks in (longest, 2 * longest, 1000, 100_000):
        own, lru = own_mask(accesses, num_blocks), prefix.lru_mask(accesses, num_blocks)
        assert abs(int(own.sum()) - int(lru.sum())) <= 0.02 * lru.sum() + 1
        assert own.sum() <= prefix.belady_mask(accesses, num_blocks).sum()


def test_every_shared_trace_is_analysed(shared_traces: Path) -> None:
    options = ReadOptions(encode=lambda text: list(text.encode()))
    for name in (
        "sharegpt_llama31_8b_sps10_tokenids.jsonl.gz",
        "lmcache_agent_miniswe_taubench.tar.gz",
        "vllm_measured/RTX4090_Llama-3.1-8B.requests.jsonl",
    ):
        trace = open_trace(shared_traces / name, options=options._replace(block_size=256))
        document = analyze(trace, Question(cache_sizes=(100_000,), ceilings=ToyDevice(100_000))).document
        assert document["num_requests"] > 0
        assert document["ladder"][1]["device_seconds"] > 0


@pytest.mark.parametrize(
    ("name", "model", "no_reuse", "reuse", "devices"),
    [
        ("mooncake_conversation.jsonl", "llama-3.1-8b", 3393, 2225, (0.96, 0.63)),
        ("mooncake_conversation.jsonl", "llama-3.1-70b", 27054, 17548, (7.65, 4.96)),
        ("mooncake_synthetic.jsonl", "llama-3.1-8b", 1481, 495, (1.45, 0.48)),
        ("azure_llm_2023_conv.csv", "llama-3.1-8b", 393, 393, (0.11, 0.11)),
    ],
)
def test_published_ceilings(
    shared_traces: Path, name: str, model: str, no_reuse: float, reuse: float, devices: tuple[float, float]
) -> None:
    pytest.importorskip("pellucid.planner.ceilings")
    from pellucid.cli.ceilings import PlannerCeilings
    from pellucid.planner.hardware import device_by_name
    from pellucid.planner.named_shapes import shape_by_name

    ceilings = PlannerCeilings(shape_by_name(model), device_by_name("h100"))
    question = Question(cache_sizes=(1_000_000,), ceilings=ceilings)
    document = analyze(open_trace(shared_traces / name), question).document
    assert document["ladder_no_reuse"][1]["device_seconds"] == pytest.approx(no_reuse, rel=0.002)
    assert document["ladder"][1]["device_seconds"] == pytest.approx(reuse, rel=0.002)
    assert document["ladder_no_reuse"][1]["devices_for_span"] == pytest.approx(devices[0], abs=0.006)
    assert document["ladder"][1]["devices_for_span"] == pytest.approx(devices[1], abs=0.006)
