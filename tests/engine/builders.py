"""Engines for tests, as importable functions: an engine process is given one of these."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.core.fakes import EOS, FakeExecutor

from pellucid.core.config import SchedulerConfig
from pellucid.core.errors import ModelError
from pellucid.core.plan import StepPlan, StepResult
from pellucid.core.scheduler import Scheduler
from pellucid.engine.engine import Engine
from pellucid.telemetry.recorder import StepRecorder

CONFIG = SchedulerConfig(
    num_blocks=64, block_size=4, max_context=128, max_running=8, token_budget=16, eos_token_ids=(EOS,)
)


class SlowExecutor(FakeExecutor):
    """Takes `seconds` a step, so that a test can act in the middle of a request."""

    def __init__(self, num_blocks: int, block_size: int, seconds: float) -> None:
        super().__init__(num_blocks, block_size)
        self.seconds = seconds

    def collect(self, ticket: StepResult) -> StepResult:
        time.sleep(self.seconds)
        return ticket


class FailingExecutor(FakeExecutor):
    def launch(self, plan: StepPlan) -> StepResult:
        if plan.step_id == 3:
            raise RuntimeError("the device fell off the bus")
        return super().launch(plan)


def fake_engine(progress: Callable[[str], None]) -> Engine:
    progress("warming up")
    return Engine(Scheduler(CONFIG), SlowExecutor(64, 4, 0.002), time.monotonic, recorder=StepRecorder(32))


def failing_engine(progress: Callable[[str], None]) -> Engine:
    return Engine(Scheduler(CONFIG), FailingExecutor(64, 4), time.monotonic)


def failing_recorded_engine(directory: Path, progress: Callable[[str], None]) -> Engine:
    recorder = StepRecorder(32, directory)
    return Engine(Scheduler(CONFIG), FailingExecutor(64, 4), time.monotonic, recorder=recorder)


def broken_model(progress: Callable[[str], None]) -> Engine:
    raise ModelError("model.gguf is 17 bytes long; expected a GGUF file")


def killed_at_start(progress: Callable[[str], None]) -> Engine:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


_warm: list[str] = []


def warm_up() -> None:
    _warm.append("warm")


def warm_engine(progress: Callable[[str], None]) -> Engine:
    return Engine(Scheduler(CONFIG), SlowExecutor(64, 4, 0.002), time.monotonic, description="".join(_warm))


def broken_library() -> None:
    raise ImportError("no such library")
