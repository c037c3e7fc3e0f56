"""Stop strings against a naive search that reads one character at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.text.stop import StopMatcher


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, the longest of those; and which it was."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


letters = st.text(alphabet="ab\n", max_size=25)


@given(pieces=st.lists(letters, max_size=8), stops=st.lists(letters.filter(bool).map(lambda s: s[:5]), max_size=4))
def test_equals_naive_search(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    seen = ""
    for piece in pieces:
        shown += matcher.push(piece)
        seen += piece
        expected, found = naive(seen, stops)
        assert matcher.found == found
        assert expected.startswith(shown)
        if found is None:
            assert len(shown) > len(seen) - max(map(len, stops), default=1), "held back more than could matter"
    shown += matcher.flush()
    assert (shown, matcher.found) == naive(seen, stops)


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        (["\n\n"], ["one\n", "\ntwo"], ["one", ""]),
        (["</s>"], ["a<", "/", "b"], ["a", "", "</b"]),
        (["STOP"], ["xSTO", "STOP"], ["x", "STO"]),
        (["observation:"], ["obs", "erve"], ["", "observe"]),
        ([], ["any", "thing"], ["any", "thing"]),
    ],
)
def test_held_back_until_decided(stops: list[str], pieces: list[str], shown: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert [matcher.push(piece) for piece in pieces] == shown
