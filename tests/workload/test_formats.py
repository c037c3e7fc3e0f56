"""Every format is recognised by content and read to known values; every bad row is named exactly."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest

from pellucid.workload import formats
from pellucid.workload.formats import ReadOptions, open_trace
from pellucid.workload.formats.source import Member, rows
from pellucid.workload.trace import (
    TraceError,
    TraceHeader,
    TraceRequest,
    Transform,
    chain_hashes,
    row_to_json,
    to_request,
    write_trace,
)

BYTES = ReadOptions(encode=lambda text: list(text.encode()))


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("name", "form", "num_rows", "block_size"),
    [
        ("mooncake_conversation_300.jsonl", "mooncake", 300, 512),
        ("mooncake_synthetic_150.jsonl.gz", "mooncake", 150, 512),
        ("azure_2023_conv_300.csv", "azure", 300, 0),
        ("sharegpt_llama31_12_tokenids.jsonl.gz", "llmservingsim", 12, 16),
        ("vllm_rtx4090_40.requests.jsonl", "vllm-log", 40, 0),
        ("lmcache_agent_3_sessions.tar.gz", "agent", 40, 16),
    ],
)
def test_excerpts_are_recognised_and_read(data: Path, name: str, form: str, num_rows: int, block_size: int) -> None:
    trace = open_trace(data / name, options=BYTES)
    assert (trace.format_name, trace.header.block_size) == (form, block_size)
    found = list(trace)
    assert len(found) == num_rows
    assert list(trace) == found, "a trace can be read again"


def test_mooncake_row(data: Path) -> None:
    row = next(iter(open_trace(data / "mooncake_conversation_300.jsonl")))
    assert (row.arrival_time, row.input_len, row.output_len) == (0.0, 6758, 500)
    assert row.prefix_block_hash == tuple(range(13)), "13 full blocks of 512"
    assert row.tail_block_hash == 13, "6758 - 13 * 512 = 102 tokens in a partial block"


def test_azure_times_count_from_the_first_row(data: Path) -> None:
    first, second, *_ = open_trace(data / "azure_2023_conv_300.csv")
    assert (first.arrival_time, first.input_len, first.output_len) == (0.0, 374, 44)
    assert second.arrival_time == pytest.approx(4.3145790, abs=1e-6)


def test_azure_2024_offsets(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2024-05-10 00:00:00.009930+00:00,2162,5",
        "2024-05-10 02:00:00.509930+02:00,2399,6",
    )
    assert [round(r.arrival_time, 6) for r in open_trace(path)] == [0.0, 0.5]


def test_bailian_turns_and_parents(tmp_path: Path) -> None:
    base = {"timestamp": 61.5, "input_length": 40, "output_length": 7, "type": "text", "turn": 2, "hash_ids": [4, 5, 6]}
    path = write(
        tmp_path / "q.jsonl", {"chat_id": 9, "parent_chat_id": 3, **base}, {"chat_id": 10, "parent_chat_id": -1, **base}
    )
    trace = open_trace(path)
    child, root = trace
    assert (trace.format_name, trace.header.block_size) == ("bailian", 16)
    assert (child.arrival_time, child.id, child.parent, child.turn) == (61.5, "9", "3", 1)
    assert (child.prefix_block_hash, child.tail_block_hash, child.extra) == ((4, 5), 6, {"type": "text"})
    assert root.parent is None


def test_burstgpt(tmp_path: Path) -> None:
    path = write(
        tmp_path / "b.csv",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "5,ChatGPT,472,18,490,Conversation log",
        "45.5,GPT-4,1087,0,1087,API log",
    )
    first, second = open_trace(path)
    assert (first.arrival_time, first.input_len, first.output_len) == (5.0, 472, 18)
    assert first.extra == {"Model": "ChatGPT", "Log Type": "Conversation log"}
    assert second.output_len == 0


def test_sharegpt_turns_hold_the_history(tmp_path: Path) -> None:
    talk = [
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello"},
        {"from": "human", "value": "Bye"},
        {"from": "gpt", "value": "So soon"},
    ]
    path = write(tmp_path / "s.json", [{"id": "c1", "conversations": talk}, {"id": "c2", "conversations": talk[:1]}])
    first, second = open_trace(path, options=BYTES._replace(block_size=4))
    assert (first.input_len, first.output_len, first.session, first.turn) == (2, 5, "c1", 0)
    assert bytes(second.input_token_ids or ()) == b"HiHelloBye"
    assert second.prefix_block_hash == chain_hashes(b"HiHelloBye", 4)


def test_large_json_lists_are_cut_across_reads(tmp_path: Path) -> None:
    objects = [{"conversations": ["x" * 700_000], "n": i} for i in range(5)]
    path = write(tmp_path / "big.json", objects)
    assert [placed.row["n"] for placed in rows(Member("big", path), "json")] == [0, 1, 2, 3, 4]
    path.write_bytes(path.read_bytes()[:-400_000])
    with pytest.raises(TraceError, match=r"\[4\].*breaks off"):
        list(rows(Member("big", path), "json"))


def test_text_formats_demand_a_tokenizer(data: Path) -> None:
    with pytest.raises(TraceError, match="--tokenizer"):
        list(open_trace(data / "lmcache_agent_3_sessions.tar.gz"))


def test_agent_members_are_merged_by_time(data: Path) -> None:
    found = list(open_trace(data / "lmcache_agent_3_sessions.tar.gz", options=BYTES))
    assert found[0].arrival_time == 0.0
    assert len({row.session for row in found}) == 3
    for row in found:
        assert row.input_len == len(row.input_token_ids or ())
        assert len(row.prefix_block_hash) == row.input_len // 16


def test_vllm_log_keeps_what_was_measured(data: Path) -> None:
    row = next(iter(open_trace(data / "vllm_rtx4090_40.requests.jsonl")))
    assert row.outcome is not None
    assert row.outcome["ttft_s"] == pytest.approx(27537.350135653 - 27536.660701067)
    assert row.outcome["tpot_s"] == pytest.approx((27554.231018618 - 27537.350135653) / 530)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_our_own_format_survives_a_round_trip(tmp_path: Path, suffix: str) -> None:
    header = TraceHeader(16, "made by hand", (Transform("scale", {"speed": 2.0}, "ab"),))
    written = [
        TraceRequest(arrival_time=0.25, input_len=33, output_len=1, prefix_block_hash=("a1", "b2"), tail_block_hash=7),
        TraceRequest(
            arrival_time=1.0,
            input_len=2,
            output_len=3,
            tenant="acme",
            session="s",
            turn=0,
            parent="p",
            priority=-1,
            deadline_s=2.5,
            input_token_ids=(1, 2),
            output_token_ids=(3, 4, 5),
            sampling={"temperature": 0.5},
            outcome={"status": "ok"},
            extra={"colour": "red"},
        ),
    ]
    path = tmp_path / f"t.jsonl{suffix}"
    assert write_trace(path, header, written) == 2
    first_bytes = path.read_bytes()
    trace = open_trace(path)
    assert (trace.format_name, trace.header) == ("pellucid", header)
    assert list(trace) == written
    write_trace(path, trace.header, trace)
    assert path.read_bytes() == first_bytes
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "no half-written file is left"


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def rows_that_break() -> object:
        yield TraceRequest(arrival_time=0.0, input_len=1, output_len=1)
        raise TraceError("stop")

    with pytest.raises(TraceError):
        write_trace(tmp_path / "t.jsonl", TraceHeader(0), rows_that_break())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


GOOD = {"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [0]}


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({**GOOD, "input_length": -3}, r":2: field 'input_length' is -3; expected a whole number of 0 or more"),
        ({**GOOD, "timestamp": "soon"}, r":2: field 'timestamp' is 'soon'; expected a number"),
        ({**GOOD, "hash_ids": [0.5]}, r":2: field 'hash_ids' is 0.5; expected block ids"),
        ({"timestamp": 0}, r":2: field 'input_length' is nothing; expected a whole number"),
        ('{"timestamp": 0,', r":2: not JSON"),
        ("[1]", r":2: a JSON list, not an object"),
        ({**GOOD, "timestamp": float("nan")}, r":2: not JSON"),
    ],
)
def test_bad_rows_are_named_or_counted(tmp_path: Path, second: object, message: str) -> None:
    path = write(tmp_path / "m.jsonl", GOOD, second, GOOD)
    with pytest.raises(TraceError, match=message):
        list(open_trace(path))
    trace = open_trace(path, options=ReadOptions(skip_bad=True))
    assert len(list(trace)) == 2
    assert trace.num_skipped == 1


def test_bad_csv_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.68,12", "x,1,2")
    trace = open_trace(path, options=ReadOptions(skip_bad=True))
    assert list(trace) == []
    assert trace.num_skipped == 2
    with pytest.raises(TraceError, match=r":2: 2 columns where the first line names 3"):
        list(open_trace(path))


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    cases = {
        "empty": (b"", "fit no format"),
        "other": (b'{"a": 1}\n', "it has the fields 'a'.*known formats: pellucid, mooncake"),
        "binary": (b"\x80\x81\x82\n", "not UTF-8"),
        "cut.gz": (gzip.compress(b"x" * 10_000)[:40], "broken or truncated gzip"),
    }
    for name, (content, message) in cases.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(TraceError, match=message):
            list(open_trace(path))
    with pytest.raises(TraceError, match="cannot read"):
        open_trace(tmp_path / "absent")
    with pytest.raises(TraceError, match="is a folder"):
        open_trace(tmp_path)


def test_format_can_be_forced_but_not_falsified(data: Path) -> None:
    assert open_trace(data / "azure_2023_conv_300.csv", format_name="azure").format_name == "azure"
    with pytest.raises(TraceError, match="mooncake needs hash_ids"):
        open_trace(data / "azure_2023_conv_300.csv", format_name="mooncake")
    with pytest.raises(TraceError, match="unknown format 'parquet'; known: pellucid"):
        open_trace(data / "azure_2023_conv_300.csv", format_name="parquet")


def test_archive_members_cannot_escape(tmp_path: Path) -> None:
    path = tmp_path / "evil.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        content = json.dumps(GOOD).encode()
        entry = tarfile.TarInfo("../../escaped.jsonl")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    assert len(list(open_trace(path))) == 1
    assert not (tmp_path.parent.parent / "escaped.jsonl").exists()


def test_header_is_checked(tmp_path: Path) -> None:
    for header, message in (
        ({"pellucid_trace": 2}, "this version reads 1"),
        ({"pellucid_trace": 1, "time_unit": "ms"}, "'time_unit' is 'ms'"),
        ({"pellucid_trace": 1, "block_size": -1}, "'block_size' is -1"),
    ):
        with pytest.raises(TraceError, match=message):
            open_trace(write(tmp_path / "t.jsonl", header))


def test_to_request_with_tokens_and_with_hashes() -> None:
    row = TraceRequest(arrival_time=2.0, input_len=20, output_len=4, prefix_block_hash=(5,), tenant="t", deadline_s=1.5)
    request = to_request(row, request_id="r0")
    assert (len(request.prompt), request.block_keys, request.arrival, request.deadline) == (20, (5,), 2.0, 3.5)
    assert (request.sampling.max_tokens, request.sampling.ignore_eos, request.sampling.greedy) == (4, True, True)
    row = TraceRequest(arrival_time=0.0, input_len=2, output_len=4, input_token_ids=(8, 9), sampling={"top_k": 3})
    request = to_request(row, request_id="r1")
    assert (request.prompt, request.block_keys, request.sampling.top_k) == ((8, 9), None, 3)


def test_to_request_refuses_what_cannot_be_served() -> None:
    with pytest.raises(TraceError, match="output_len 0"):
        to_request(TraceRequest(arrival_time=0.0, input_len=2, output_len=0), request_id="r")
    with pytest.raises(TraceError, match="top_p"):
        to_request(TraceRequest(arrival_time=0.0, input_len=2, output_len=1, sampling={"top_p": 0}), request_id="r")


def test_defaults_are_not_written() -> None:
    row = TraceRequest(arrival_time=1.0, input_len=2, output_len=3)
    assert row_to_json(row) == {"arrival_time": 1.0, "input_len": 2, "output_len": 3}


def test_every_shared_trace_loads(shared_traces: Path) -> None:
    expected = {
        "mooncake_conversation.jsonl": 12_031,
        "mooncake_synthetic.jsonl": 3_993,
        "azure_llm_2023_conv.csv": 19_366,
        "sharegpt_llama31_8b_sps10_tokenids.jsonl.gz": 300,
        "sharegpt_qwen3_sps10_tokenids.jsonl.gz": 300,
        "lmcache_agent_miniswe_taubench.tar.gz": 873,
        "vllm_measured/RTX4090_Llama-3.1-8B.requests.jsonl": 300,
        "vllm_measured/RTXPRO6000_Qwen3-30B-A3B-Instruct-2507.requests.jsonl": 300,
    }
    counts = {name: sum(1 for _ in open_trace(shared_traces / name, options=BYTES)) for name in expected}
    assert counts == expected


@pytest.mark.parametrize(
    "name", ["mooncake_conversation_300.jsonl", "mooncake_synthetic_150.jsonl.gz", "azure_2023_conv_300.csv"]
)
def test_the_share_that_was_read_rises_to_one(data: Path, name: str) -> None:
    trace = open_trace(data / name, options=BYTES)
    for _ in range(2):
        shares = [trace.share_read for _ in trace]
        assert shares == sorted(shares)
        assert shares[0] >= 0.0
        assert trace.share_read == 1.0


def test_an_archive_counts_as_one_file(data: Path) -> None:
    trace = open_trace(data / "lmcache_agent_3_sessions.tar.gz", options=BYTES)
    shares = [trace.share_read for _ in trace]
    assert shares == sorted(shares)
    assert trace.share_read == 1.0


def test_client_profiles_stand_for_their_first_requests(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = data / "servegen_r1_2_clients.tar.gz"
    whole = list(open_trace(path))
    assert "all " in (open_trace(path).note or "")
    monkeypatch.setattr(formats, "SERVEGEN_ROWS", 20)
    trace = open_trace(path)
    assert list(trace) == whole[:20]
    assert trace.share_read == 1.0
    assert trace.header.transforms == (Transform("synth-servegen", {"seed": 0, "requests": 20}),)
    assert "the first 20 of about" in (trace.note or "")
    clients_expected = int((trace.note or "").partition("of about ")[2].partition(" requests")[0].replace(",", ""))
    assert len(whole) == pytest.approx(clients_expected, rel=0.2)
