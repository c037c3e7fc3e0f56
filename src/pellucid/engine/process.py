"""The engine's process, seen from the one that starts it: begun early, told what to build when that is known.

Loading PyTorch takes longer than everything else that a start does, and needs to know nothing. So the process is
started first and loads its libraries while the starter reads the model and imports the server; then it gets its orders.

Invariants: a process that is never given orders ends with its starter, or when this object is closed; this module
imports nothing slow, since the start waits for it.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pellucid.engine.worker import EngineBuilder


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


def _enter(warm_up: Callable[[], None] | None, orders: Connection, endpoint: str) -> None:
    """What the process does."""
    from pellucid.engine import worker

    worker.run(warm_up, orders, endpoint)
