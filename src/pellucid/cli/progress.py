"""Progress on stderr: a line that is replaced while something loads, and plain lines where stderr is no terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status

stderr = Console(stderr=True, highlight=False)


class Loading:
    """Shows what is going on. Call it with a text; `say` prints a line that stays."""

    def __init__(self, status: Status | None) -> None:
        self._status = status

    def __call__(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)

    def stop(self) -> None:
        """Nothing more to show."""
        if self._status is not None:
            self._status.stop()


@contextmanager
def loading(text: str) -> Iterator[Loading]:
    """Show a spinner with `text` while the block runs."""
    if not stderr.is_terminal:
        stderr.print(text, soft_wrap=True)
        yield Loading(None)
        return
    with stderr.status(text) as status:
        yield Loading(status)
