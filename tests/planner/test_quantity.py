"""Quantities: what people write, what is printed back, and that a ceiling is never rounded up."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.core.errors import ConfigError
from pellucid.planner import quantity as q


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (q.parse_rate, "2TB/s", 2e12),
        (q.parse_rate, "50 GB/s", 5e10),
        (q.parse_rate, "1e9", 1e9),
        (q.parse_flops, "989TF", 989e12),
        (q.parse_flops, "1.3PFLOPS", 1.3e15),
        (q.parse_flops, "400 TOPS", 4e14),
        (q.parse_bytes, "80GB", 80_000_000_000),
        (q.parse_bytes, "2GiB", 2 * 2**30),
        (q.parse_bytes, "512MiB", 2**29),
        (q.parse_seconds, "100ms", 0.1),
        (q.parse_seconds, "30s", 30.0),
        (q.parse_seconds, "2m", 120.0),
        (q.parse_count, "70e9", 70_000_000_000),
        (q.parse_count, "70B", 70_000_000_000),
        (q.parse_count, "135M", 135_000_000),
        (q.parse_count, "8k", 8_000),
        (q.parse_count, "4Ki", 4_096),
    ],
)
def test_what_people_write(parse: object, text: str, value: float) -> None:
    assert callable(parse)
    assert parse(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (q.parse_rate, "2TB"),
        (q.parse_rate, "fast"),
        (q.parse_rate, "-1GB/s"),
        (q.parse_flops, "989TB"),
        (q.parse_bytes, "80 G B"),
        (q.parse_bytes, ""),
        (q.parse_seconds, "1 fortnight"),
        (q.parse_count, "1.5"),
        (q.parse_count, "1e400"),
    ],
)
def test_what_is_not_a_quantity_is_refused(parse: object, text: str) -> None:
    assert callable(parse)
    with pytest.raises(ConfigError):
        parse(text)


@given(st.floats(0.001, 1e9))
def test_a_ceiling_is_never_rounded_up_and_loses_less_than_a_hundredth(value: float) -> None:
    printed = float(q.format_ceiling(value).replace(",", ""))
    assert printed <= value * (1 + 1e-11)
    assert printed > value - 0.01 - 1e-9


@pytest.mark.parametrize(("value", "text"), [(1 / 0.07, "14.28"), (0.28 * 100, "28.00"), (1234.567, "1,234.56")])
def test_ceilings_that_were_got_wrong_elsewhere(value: float, text: str) -> None:
    assert q.format_ceiling(value) == text


@given(st.floats(1, 1e17))
def test_bytes_come_back(value: float) -> None:
    assert math.isclose(q.parse_bytes(q.format_bytes(value)), value, rel_tol=2e-3, abs_tol=1)


def test_durations_of_every_size() -> None:
    assert [q.format_seconds(s) for s in (0, 3e-9, 2.5e-6, 0.07, 1.25, 9000)] == [
        "0 s",
        "3 ns",
        "2.5 µs",
        "70 ms",
        "1.25 s",
        "2.5 h",
    ]
