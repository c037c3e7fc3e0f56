"""The trace commands as users run them: results on stdout, errors as one line that says what to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from pellucid.cli.trace import app
from pellucid.core.errors import PellucidError
from pellucid.workload.formats import open_trace
from pellucid.workload.trace import TraceHeader, TraceRequest, write_trace

DATA = Path(__file__).parents[1] / "data"
CONVERSATION = DATA / "mooncake_conversation_300.jsonl"


def run(*arguments: object, status: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result


def document(*arguments: object, status: int = 0) -> dict[str, Any]:
    found = json.loads(run(*arguments, "--json", status=status).stdout)
    assert isinstance(found, dict)
    return found


def test_lint_finds_the_ticking_clock_and_the_mend_mends_it(tmp_path: Path) -> None:
    found = document("lint", CONVERSATION, status=1)
    assert [finding["code"] for finding in found["findings"]] == ["quantised-clock"]
    assert "trace dequantize" in run("lint", CONVERSATION, status=1).stdout
    run("dequantize", CONVERSATION, "-o", tmp_path / "fine.jsonl")
    assert document("lint", tmp_path / "fine.jsonl")["findings"] == []
    header = open_trace(tmp_path / "fine.jsonl").header
    assert header.transforms[0].name == "dequantize"
    assert header.transforms[0].arguments["tick"] == pytest.approx(3.0, abs=0.01)


def test_analyze_has_its_stable_names() -> None:
    found = document("analyze", CONVERSATION, "--cache-sizes", "500k,2M")
    assert found["num_requests"] == 300
    assert [point["cache_tokens"] for point in found["prefix"]["curve"]] == [500_000, 2_000_000]
    assert 0 < found["prefix"]["block_hit_infinite"] < found["prefix"]["token_hit_infinite"] < 1
    text = run("analyze", CONVERSATION).stdout
    assert "best possible" in text
    assert "engine-legal" in text


def test_analyze_with_the_planners_ladder() -> None:
    pytest.importorskip("pellucid.planner.ceilings")
    found = document("analyze", CONVERSATION, "--model", "llama-3.1-8b", "--hardware", "h100")
    assert [set(rung) >= {"rung", "device_seconds"} for rung in found["ladder"]] == [True] * 5
    assert found["perfect_scheduler"]["trace_speed"] > 0


def test_analyze_writes_a_page_that_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "report.html"
    run("analyze", CONVERSATION, "--html", page)
    text = page.read_text()
    assert text.count("Plotly.newPlot") >= 4
    assert "<script src=" not in text
    assert "Capacity curve" in text


def test_every_transform_chains_into_the_header(tmp_path: Path) -> None:
    steps: list[tuple[str, ...]] = [
        ("convert", "--drop-token-ids"),
        ("slice", "--end", "40"),
        ("scale", "--rate", "10"),
        ("sample", "--share", "0.5", "--drop-empty"),
        ("anonymize", "--key", "a secret of ours"),
    ]
    source = CONVERSATION
    for number, (name, *options) in enumerate(steps):
        target = tmp_path / f"{number}.jsonl.gz"
        run(name, source, "-o", target, *options)
        source = target
    trace = open_trace(source)
    names = [transform.name for transform in trace.header.transforms]
    assert names == ["convert", "drop-token-ids", "slice", "scale", "sample", "anonymize"]
    assert all(len(t.source_sha256) == 64 for t in trace.header.transforms if t.name != "drop-token-ids")
    rows = list(trace)
    assert 10 < len(rows) < 200
    assert trace.header.block_size == 512


def test_equal_commands_write_equal_bytes(tmp_path: Path) -> None:
    for target in ("a.jsonl.gz", "b.jsonl.gz"):
        run("synth", "-o", tmp_path / target, "--requests", 50, "--pattern", "chat:3:64:5", "--tenants", "a=2,b=1")
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


def test_merge_and_synth_from_lengths(tmp_path: Path) -> None:
    run("synth", "-o", tmp_path / "a.jsonl", "--duration", 20, "--rate", 5, "--lengths-from", CONVERSATION)
    pairs = {(row.input_len, row.output_len) for row in open_trace(CONVERSATION)}
    assert {(row.input_len, row.output_len) for row in open_trace(tmp_path / "a.jsonl")} <= pairs
    run(
        "merge",
        tmp_path / "a.jsonl",
        tmp_path / "a.jsonl",
        "-o",
        tmp_path / "m.jsonl",
        "--tenants",
        "x,y",
        "--offsets",
        "0,1",
    )
    rows = list(open_trace(tmp_path / "m.jsonl"))
    assert {row.tenant for row in rows} == {"x", "y"}


def test_servegen_archives_generate(tmp_path: Path) -> None:
    archive = DATA / "servegen_r1_2_clients.tar.gz"
    run("synth", "-o", tmp_path / "s.jsonl", "--servegen", archive, "--requests", 20, "--seed", 3)
    trace = open_trace(tmp_path / "s.jsonl")
    assert len(list(trace)) == 20
    assert trace.header.transforms[0].arguments == {"seed": 3, "start": 0.0, "requests": 20}


def test_output_to_stdout_is_the_trace_alone() -> None:
    lines = run("slice", CONVERSATION, "-o", "-", "--last", 2).stdout.splitlines()
    assert [next(iter(json.loads(line))) for line in lines] == ["pellucid_trace", "arrival_time", "arrival_time"]


def test_skip_bad_counts(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(CONVERSATION.read_bytes() + b'{"timestamp": "x"}\n')
    with pytest.raises(PellucidError, match=r"bad.jsonl:301: field 'timestamp'"):
        run("lint", path)
    assert document("lint", path, "--skip-bad", status=1)["num_skipped"] == 1
    assert "skipped 1 bad rows" in run("convert", path, "-o", tmp_path / "c.jsonl", "--skip-bad").stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["slice", CONVERSATION, "-o", "-"], "slice needs --start"),
        (["scale", CONVERSATION, "-o", "-"], "exactly one of --speed and --rate"),
        (["scale", CONVERSATION, "-o", "-", "--speed", "0"], "must be positive"),
        (["dequantize", DATA / "azure_2023_conv_300.csv", "-o", "-"], "does not tick"),
        (["merge", CONVERSATION, "-o", "-"], "two or more"),
        (["merge", CONVERSATION, CONVERSATION, "-o", "-", "--tenants", "a"], "--tenants names 1"),
        (["merge", CONVERSATION, CONVERSATION, "-o", "-", "--offsets", "0;1"], "--offsets '0;1'"),
        (["synth", "-o", "-"], "--requests or --duration"),
        (["synth", "-o", "-", "--requests", "5", "--pattern", "x"], "--pattern 'x'"),
        (["synth", "-o", "-", "--requests", "5", "--start", "9"], "--start has no meaning without --servegen"),
        (["synth", "-o", "-", "--servegen", "x.tar", "--rate", "9"], "--rate has no meaning with --servegen"),
        (["synth", "-o", "-", "--lengths-from", "x", "--input-len", "9"], "--input-len has no meaning with"),
        (["analyze", CONVERSATION, "--hardware", "h100"], "--hardware needs --model"),
        (["analyze", CONVERSATION, "--cache-sizes", "big"], "--cache-sizes 'big'"),
        (["lint", DATA / "lmcache_agent_3_sessions.tar.gz"], "--tokenizer"),
        (["lint", DATA / "lmcache_agent_3_sessions.tar.gz", "--tokenizer", "none.json"], "no such file"),
        (["lint", DATA / "README.md"], "fit no format"),
        (["convert", CONVERSATION, "-o", "/nowhere/x.jsonl"], "does not exist"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: list[object], message: str) -> None:
    with pytest.raises(PellucidError, match=message) as caught:
        run(*arguments)
    assert "\n" not in str(caught.value)


def test_a_trace_is_never_written_onto_itself(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, TraceHeader(0), [TraceRequest(arrival_time=0.0, input_len=1, output_len=1)])
    before = path.read_bytes()
    with pytest.raises(PellucidError, match="is the file that is read"):
        run("scale", path, "-o", path, "--speed", 2)
    assert path.read_bytes() == before


def test_bytes_as_tokens() -> None:
    found = document("analyze", DATA / "lmcache_agent_3_sessions.tar.gz", "--tokenizer", "bytes")
    assert found["num_requests"] == 40
    assert found["prefix"]["with_generated"]["basis"] == "token ids"
    assert found["sessions"]["num_sessions"] == 3
