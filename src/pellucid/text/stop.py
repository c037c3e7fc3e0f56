"""Stop strings, found in text that arrives in pieces of any size.

Text ends before the stop string that is complete first (of several complete at the same character, the longest).
A piece may end in the middle of one, so the longest end of the text that could still become a stop string is held back
until it does or does not.

Invariants: what comes out does not depend on how the text was cut into pieces, never contains a stop string, and is
never more than the longest stop string behind what went in.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches one stream of text for any of `stops` (none of them empty; there may be none at all)."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> str:
        """The text that may be shown now. Once `found` is set the stream has ended and nothing more comes out."""
        if not self._stops:
            return text
        if self.found is not None:
            return ""
        text = self._held + text
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            _, start, self.found = min(matches)
            self._held = ""
            return text[:start]
        shown = len(text) - max(_overlap(text, stop) for stop in self._stops)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """What was held back, when no text follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
