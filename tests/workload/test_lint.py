"""Each defect is found where it is planted, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pellucid.workload.formats import ReadOptions, open_trace
from pellucid.workload.lint import LintReport, clock_tick, lint
from pellucid.workload.trace import TraceHeader, TraceRequest, write_trace


def clean_rows() -> list[TraceRequest]:
    rng = np.random.default_rng(1)
    times = np.cumsum(rng.exponential(0.5, 200))
    return [
        TraceRequest(
            arrival_time=float(at),
            input_len=40 + i,
            output_len=5,
            prefix_block_hash=(0, *range(100 * i + 1, 100 * i + (40 + i) // 16)),
        )
        for i, at in enumerate(times)
    ]


def check(tmp_path: Path, rows: list[TraceRequest]) -> LintReport:
    write_trace(tmp_path / "t.jsonl", TraceHeader(16), rows)
    return lint(open_trace(tmp_path / "t.jsonl"))


def test_a_clean_trace_has_no_findings(tmp_path: Path) -> None:
    report = check(tmp_path, clean_rows())
    assert report.num_requests == 200
    assert report.findings == ()


def _change(rows: list[TraceRequest], index: int, **fields: object) -> list[TraceRequest]:
    values = {name: getattr(rows[index], name) for name in TraceRequest.__struct_fields__} | fields
    return [*rows[:index], TraceRequest(**values), *rows[index + 1 :]]


@pytest.mark.parametrize(
    ("code", "spoil"),
    [
        ("negative-time", lambda rows: _change(rows, 0, arrival_time=-1.0)),
        ("unsorted", lambda rows: _change(rows, 7, arrival_time=0.001)),
        ("zero-length", lambda rows: _change(rows, 3, output_len=0)),
        ("hash-count", lambda rows: _change(rows, 3, input_len=100)),
        ("duplicate-rows", lambda rows: [*rows, rows[-1]]),
        ("unchained-hashes", lambda rows: _change(rows, 5, prefix_block_hash=(301, 12))),
        ("no-clock", lambda rows: [r for i in range(200) for r in _change(rows, i, arrival_time=0.0)[i : i + 1]]),
        (
            "uniform-arrivals",
            lambda rows: [r for i in range(200) for r in _change(rows, i, arrival_time=i / 2)[i : i + 1]],
        ),
        (
            "quantised-clock",
            lambda rows: [r for i in range(200) for r in _change(rows, i, arrival_time=float(i // 3))[i : i + 1]],
        ),
    ],
)
def test_each_defect_is_found_alone(
    tmp_path: Path, code: str, spoil: Callable[[list[TraceRequest]], list[TraceRequest]]
) -> None:
    report = check(tmp_path, spoil(clean_rows()))
    assert [finding.code for finding in report.findings] == [code]
    (finding,) = report.findings
    assert finding.num_rows >= 1
    assert finding.consequence
    assert finding.mend.startswith("trace ") or code == "hash-count"


def test_a_row_finding_names_its_line(tmp_path: Path) -> None:
    (finding,) = check(tmp_path, _change(clean_rows(), 3, output_len=0)).findings
    assert finding.place.endswith("t.jsonl:5"), "line 1 is the header"


def test_clock_tick() -> None:
    rng = np.random.default_rng(0)
    ticks = np.arange(0, 300, 3.0)
    assert clock_tick(ticks) == 3.0
    assert clock_tick(ticks + rng.choice([-0.001, 0.0, 0.001], len(ticks))) == pytest.approx(3.0, abs=0.002)
    assert clock_tick(np.cumsum(rng.exponential(1.0, 1000))) is None
    assert clock_tick(np.array([5.0])) is None


def test_shared_traces(shared_traces: Path) -> None:
    options = ReadOptions(encode=lambda text: list(text.encode()))
    expected = {
        "mooncake_conversation.jsonl": {"quantised-clock", "duplicate-rows"},
        "mooncake_synthetic.jsonl": set(),
        "azure_llm_2023_conv.csv": set(),
        "sharegpt_qwen3_sps10_tokenids.jsonl.gz": set(),
        "lmcache_agent_miniswe_taubench.tar.gz": {"unsorted", "zero-length"},
    }
    for name, codes in expected.items():
        report = lint(open_trace(shared_traces / name, options=options))
        assert {finding.code for finding in report.findings} == codes, name
        for finding in report.findings:
            if finding.code == "quantised-clock":
                assert "every 3 s" in finding.message
                assert "28 requests" in finding.message
