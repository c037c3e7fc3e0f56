"""Percentiles of a sliding minute, against sorting all values."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.telemetry.recent import WINDOW_SECONDS, RecentValues

SHARES = (0.5, 0.9, 0.99)
seen = st.tuples(st.floats(0.0, 200.0), st.floats(1e-4, 1e3), st.integers(1, 4))


@settings(deadline=None)
@given(st.lists(seen, max_size=60))
def test_each_percentile_is_the_true_one_within_a_bucket(values):
    recent = RecentValues()
    values.sort(key=lambda row: row[0])
    for at, value, count in values:
        recent.add(value, at, count)
    now = values[-1][0] if values else 0.0
    kept = sorted(v for at, v, count in values for _ in range(count) if int(at) > int(now) - WINDOW_SECONDS)
    count, found = recent.percentiles(SHARES, now)
    assert count == len(kept)
    expected = [kept[max(1, math.ceil(share * count)) - 1] for share in SHARES] if kept else []
    assert len(found) == len(expected)
    for got, true in zip(found, expected):
        assert true / 1.025 <= got <= true * 1.025


def test_nothing_is_left_after_a_minute_of_silence():
    recent = RecentValues()
    recent.add(0.5, 10.0)
    assert recent.percentiles(SHARES, 69.9)[0] == 1
    assert recent.percentiles(SHARES, 70.0) == (0, [])
