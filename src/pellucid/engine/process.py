"""The engine's process, seen from the one that starts it: begun early, told what to build when that is known.

Loading PyTorch takes longer than everything else that a start does, and needs to know nothing. So the process is
started first and loads its libraries while the starter reads the model and imports the server; then it gets its orders.

Its objects lie on huge pages (`HUGE_PAGES`): the weights that stream by in a step push page tables out of the
processor's caches too, and each page of 4 KiB that Python touches afterwards waits for them again.

Invariants: a process that is never given orders ends with its starter, or when this object is closed; this module
imports nothing slow, since the start waits for it.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pellucid.engine.worker import EngineBuilder


# Environment of the process: Python asks the C library for memory, and that asks for huge pages (glibc 2.35 and later).
HUGE_PAGES = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class EngineProcess:
    """`endpoint` is the address on which the starter listens for the process. `warm_up` runs in the process at once;
    it must be a function of a module."""

    def __init__(self, warm_up: Callable[[], None] | None = None) -> None:
        self._directory = tempfile.mkdtemp(prefix="pellucid-")
        self.endpoint = f"ipc://{self._directory}/engine"
        spawn = multiprocessing.get_context("spawn")
        orders, self._orders = spawn.Pipe(duplex=False)
        arguments = (warm_up, orders, self.endpoint)
        self.process = spawn.Process(target=_enter, args=arguments, name="pellucid-engine")
        with _environment(HUGE_PAGES):
            self.process.start()
        orders.close()

    def build(self, build: EngineBuilder) -> None:
        """Have the engine built, once. `build` must be picklable (a function of a module, or a `functools.partial` of
        one)."""
        with suppress(BrokenPipeError):  # it has died already: whoever watches it will say so
            self._orders.send(build)

    def close(self) -> None:
        """End the process if it has not ended. A second call does nothing."""
        self._orders.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _environment(extra: dict[str, str]) -> Iterator[None]:
    """For processes that are started meanwhile; what the user has set stands."""
    added = [name for name in extra if name not in os.environ]
    os.environ.update((name, extra[name]) for name in added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _enter(warm_up: Callable[[], None] | None, orders: Connection, endpoint: str) -> None:
    """What the process does."""
    from pellucid.engine import worker

    worker.run(warm_up, orders, endpoint)
