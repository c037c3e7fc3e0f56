"""Progress on stderr: a line that is replaced while something loads, and plain lines where stderr is no terminal; and
bars for what takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
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


@contextmanager
def progress_bars() -> Iterator[Callable[[str, float], None]]:
    """One bar a stage: call what is yielded with the stage and the share of it that is done. A new stage ends the one
    before it. Silent where stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, *times, console=stderr, disable=not stderr.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(stage: str, share: float) -> None:
            if stage not in tasks:
                for task in tasks.values():
                    bars.update(task, completed=1.0)
                tasks[stage] = bars.add_task(stage, total=1.0)
            bars.update(tasks[stage], completed=share)

        yield tell
        for task in tasks.values():
            bars.update(task, completed=1.0)
