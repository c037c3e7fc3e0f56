"""From settings to a running engine, in the process that will run it: the one place that chooses an executor.

Only here is torch loaded, and only inside the functions, so that the process that speaks HTTP can import this module,
hand `build_engine` to the engine's process and never load torch itself.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pellucid.core.config import SchedulerConfig
from pellucid.core.cost import FittedCost, features_of
from pellucid.core.errors import ConfigError
from pellucid.core.input_log import InputLog
from pellucid.core.plan import Chunk, StepPlan
from pellucid.core.scheduler import Scheduler
from pellucid.engine.engine import Engine
from pellucid.planner.profile import state_directory
from pellucid.runtime.loading import load_libraries
from pellucid.settings import EngineSettings
from pellucid.telemetry.recorder import StepRecorder

# As long a chunk may delay a start. A large model on a slow machine takes seconds for a whole budget, beside which the
# fresh memory that its first requests would wait for is nothing.
_WARM_SECONDS = 0.5


def build_engine(
    settings: EngineSettings, path: Path, scheduler: SchedulerConfig, progress: Callable[[str], None]
) -> Engine:
    """An engine with the real executor over the model at `path`. Loads torch and the weights; reports to `progress`."""
    progress("loading PyTorch")
    load_libraries()
    from pellucid.runtime.executor import load_executor
    from pellucid.runtime.step_timing import warm_up

    def loaded(done: int, total: int) -> None:
        progress(f"loading weights: {done} of {total} layers")

    executor = load_executor(
        path,
        settings.runtime(),
        num_blocks=scheduler.num_blocks,
        num_host_blocks=scheduler.num_host_blocks,
        seed=settings.seed,
        progress=loaded,
    )
    progress("warming up")
    warm_up(
        executor,
        num_tokens=_warm_tokens(scheduler),
        num_sequences=scheduler.max_running,
        block_size=scheduler.block_size,
        num_blocks=scheduler.num_blocks,
    )
    log = None if settings.input_log is None else InputLog(_json_lines(settings.input_log))
    recorder = _recorder(settings.step_records, scheduler.step_target)
    return Engine(Scheduler(scheduler, input_log=log), executor, time.monotonic, executor.describe(), recorder=recorder)


def _warm_tokens(scheduler: SchedulerConfig) -> int:
    """The widest chunk, up to the token budget, that is predicted to take no longer than `_WARM_SECONDS`."""
    cost, count = FittedCost(scheduler.cost_prior), scheduler.token_budget
    while count > 1 and cost.predict(features_of(StepPlan(0, (Chunk(0, 0, count, True),)))).seconds > _WARM_SECONDS:
        count //= 2
    return count


def engine_builder(
    settings: EngineSettings, path: Path, scheduler: SchedulerConfig
) -> Callable[[Callable[[str], None]], Engine]:
    """`build_engine` with its arguments, ready to be carried out in another process."""
    return partial(build_engine, settings, path, scheduler)


def _recorder(capacity: int, step_target: float | None) -> StepRecorder | None:
    """The recorder of the last `capacity` steps, which dumps into the state directory; None for 0."""
    if capacity == 0:
        return None
    directory = state_directory(os.environ) / "steps"
    return StepRecorder(capacity, directory, target_seconds=step_target)


def _json_lines(path: Path) -> Callable[[dict[str, Any]], None]:
    """A function that writes a row to `path` as one line of JSON. Raises ConfigError if it cannot be opened."""
    try:
        file = path.open("w", encoding="utf-8", buffering=1)
    except OSError as error:
        raise ConfigError(f"cannot write the input log {path}: {error.strerror}") from None
    return lambda row: print(json.dumps(row, separators=(",", ":")), file=file)
