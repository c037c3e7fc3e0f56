"""From settings to an engine: the one place that chooses an executor and tells the rooms the sizes they need.

    EngineSettings ──load_model──> LoadedModel ──plan_engine──> SchedulerConfig ──build_engine──> Engine

Only `build_engine` loads torch, so a server process can do all the rest (it needs the tokenizer and the limits) and
hand `build_engine` to the engine's own process.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pellucid.core.config import PolicyName, PreemptionFate, SchedulerConfig
from pellucid.core.errors import ConfigError
from pellucid.core.input_log import InputLog
from pellucid.core.scheduler import Scheduler
from pellucid.core.tenants import Tenant
from pellucid.engine.engine import Engine
from pellucid.models.config import ModelConfig, load_model_config
from pellucid.models.gguf_header import read_gguf_header
from pellucid.models.sources import DEFAULT_MODEL, ModelFiles, resolve
from pellucid.planner.memory import Batching
from pellucid.planner.profile import default_path, read_profile, state_directory
from pellucid.planner.quantity import parse_bytes, parse_seconds
from pellucid.planner.roofline import ACTIVATION_BYTES, LOGIT_BYTES
from pellucid.planner.shape import ModelShape
from pellucid.runtime.config import RuntimeConfig
from pellucid.runtime.config import resolve as resolve_runtime
from pellucid.runtime.memory import blocks_that_fit
from pellucid.sizing import cache_bytes, engine_prior, served_shape
from pellucid.telemetry.machine_use import MachineLimits, MachineUse, StepWork
from pellucid.telemetry.recorder import StepRecorder
from pellucid.text.chat_template import ChatTemplate, chat_template_from_gguf, load_chat_template
from pellucid.text.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf

OnOff = Literal["on", "off"]


def _setting(default: Any, help: str, **more: Any) -> Any:
    """A field whose flag, environment variable and configuration key are all made from it (see `cli/options.py`)."""
    return field(default=default, metadata={"help": help, **more})


def parse_seconds_or_off(text: str) -> float:
    """Seconds above 0, or 0.0 for "off"."""
    if text in ("off", "0", "0.0"):
        return 0.0
    return parse_seconds(text)


def _parse_kv_memory(text: str) -> int:
    """A size; "auto" is 0. Raises ConfigError."""
    return 0 if text == "auto" else parse_bytes(text)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What a user may choose about an engine. The same names serve as flags, variables and configuration keys."""

    device: str = _setting("cpu", "Where the model runs.")
    dtype: Literal["auto", "float32", "bfloat16"] = _setting(
        "auto", "Precision of weights, activations and KV cache; auto takes bfloat16 where the processor has it."
    )
    threads: int = _setting(0, "Threads that compute; 0 takes one per physical core.")
    block_size: int = _setting(16, "Tokens in a KV block: the unit of allocation and of sharing.")
    kv_memory: int = _setting(
        2 * 2**30,
        "Memory of the KV cache, such as 2GiB; auto takes what is free beside the model, if it can be used.",
        parser=_parse_kv_memory,
        shown="2GiB",
    )
    max_context: int = _setting(0, "Most tokens of one request, prompt and output; 0 takes what the model allows.")
    max_running: int = _setting(64, "Most requests that are computed in one step.")
    token_budget: int = _setting(512, "Most tokens computed in one step: bounds how long a prompt may hold up others.")
    deterministic: bool = _setting(
        False, "Make a request's tokens independent of what else is in its batch; slower.", flag="--deterministic"
    )
    seed: int = _setting(0, "Seed of requests that bring none.")
    prefix_cache: OnOff = _setting("on", "Reuse the KV blocks of prompts and replies that begin alike.")
    step_target: float = _setting(
        0.05,
        "Time that prompts may stretch a step to, such as 50ms: bounds the gaps between tokens that users see; off "
        "fills steps up to the token budget.",
        parser=parse_seconds_or_off,
        metavar="TIME|off",
        shown="50ms",
    )
    policy: Literal["auto", "fcfs", "priority", "fair"] = _setting(
        "auto", "Order in which prompts are served: auto is fair where tenants are configured, else fcfs."
    )
    max_waiting: int = _setting(4096, "Most requests that wait; further ones are answered 503 with Retry-After.")
    swap_memory: int = _setting(
        0,
        "Host memory for KV blocks that leave the cache but will probably be wanted again, such as 1GiB.",
        parser=parse_bytes,
        shown="0",
    )
    preemption: PreemptionFate = _setting(
        "auto", "How preempted requests come back: by swap, by recompute, or whichever is predicted to be cheaper."
    )
    chunked_prefill: OnOff = _setting("on", "Cut long prompts into steps; off computes a prompt in one step.")
    weights: Literal["auto", "bf16", "int8", "int4"] = _setting(
        "auto", "How the native kernels hold weights; auto keeps the precision of the model's files."
    )
    isa: str = _setting(
        "auto", "Kernels: auto, portable, avx2, avx512 or amx for the native ones, reference for plain PyTorch."
    )
    step_records: int = _setting(
        2048, "Steps that the recorder keeps for `pellucid steps` and for dumps on anomalies; 0 keeps none."
    )
    input_log: Path | None = _setting(
        None, "Write every call into the scheduler to this file (JSON lines), from which the run can be replayed."
    )

    def runtime(self) -> RuntimeConfig:
        """The executor's part, with "auto" decided for this machine."""
        return resolve_runtime(
            RuntimeConfig(
                device=self.device,
                dtype=self.dtype,
                block_size=self.block_size,
                threads=self.threads,
                deterministic=self.deterministic,
                isa=self.isa,
                weights=self.weights,
            )
        )


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model as far as a process without torch needs it: files, shape, and how its text is handled."""

    files: ModelFiles
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None


def load_model(model: str = DEFAULT_MODEL, *, progress: bool = True) -> LoadedModel:
    """Find `model` (fetching it if need be) and read everything but its weights. Raises ModelError."""
    files = resolve(model, progress=progress)
    config = load_model_config(files.path)
    if files.kind == "dir":
        tokenizer = load_tokenizer(files.path)
        return LoadedModel(files, config, tokenizer, load_chat_template(files.path, tokenizer))
    metadata = read_gguf_header(files.path).metadata
    tokenizer = tokenizer_from_gguf(metadata, str(files.path))
    return LoadedModel(files, config, tokenizer, chat_template_from_gguf(metadata, tokenizer))


def plan_engine(settings: EngineSettings, model: LoadedModel) -> SchedulerConfig:
    """The scheduler's configuration: how many blocks the KV memory holds, and how long a request may be. Raises
    ConfigError where model and cache do not fit the memory that is free."""
    runtime, config = settings.runtime(), model.config
    limit = config.max_context if config.sliding_window is None else min(config.max_context, config.sliding_window)
    max_context = settings.max_context or limit
    config.check_context(max_context)
    batching = Batching(
        token_budget=settings.token_budget if settings.chunked_prefill == "on" else max_context,
        max_running=settings.max_running,
        block_size=settings.block_size,
        memory_fraction=1.0,
    )
    kv_bytes = cache_bytes(
        settings.kv_memory,
        model.files.path,
        runtime,
        batching=batching,
        context=max_context,
        environment=os.environ,
        host_tier=settings.swap_memory,
    )
    spec = config.cache_spec(runtime.element_bytes)
    return SchedulerConfig(
        num_blocks=blocks_that_fit(kv_bytes, spec, settings.block_size),
        block_size=settings.block_size,
        max_context=max_context,
        max_running=settings.max_running,
        token_budget=settings.token_budget,
        prefix_cache=settings.prefix_cache == "on",
        chunked_prefill=settings.chunked_prefill == "on",
        step_target=settings.step_target or None,
        cost_prior=engine_prior(model.files.path, runtime, os.environ).prior,
        policy="fcfs" if settings.policy == "auto" else settings.policy,
        max_waiting=settings.max_waiting,
        num_host_blocks=settings.swap_memory // (spec.bytes_per_token * settings.block_size),
        preemption=settings.preemption,
        bytes_per_block=spec.bytes_per_token * settings.block_size,
        eos_token_ids=config.eos_token_ids,
    )


def give_tenants(scheduler: SchedulerConfig, settings: EngineSettings, tenants: tuple[Tenant, ...]) -> SchedulerConfig:
    """`scheduler` for a server whose tenants come from a file: it serves them fairly unless told otherwise."""
    policy: PolicyName = "fair" if settings.policy == "auto" else settings.policy
    return replace(scheduler, tenants=tenants, policy=policy)


def build_engine(
    settings: EngineSettings, path: Path, scheduler: SchedulerConfig, progress: Callable[[str], None]
) -> Engine:
    """An engine with the real executor over the model at `path`. Loads torch and the weights; reports to `progress`."""
    progress("loading PyTorch")
    # OpenMP threads that spin at each barrier lose whole time slices where something else wants the cores: a step of
    # 30 ms was seen to take over a second. Read by OpenMP when it is loaded; a user's own choice stands.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from pellucid.runtime.executor import load_executor

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
    log = None if settings.input_log is None else InputLog(_json_lines(settings.input_log))
    recorder = _recorder(settings.step_records, scheduler.step_target)
    return Engine(Scheduler(scheduler, input_log=log), executor, time.monotonic, executor.describe(), recorder=recorder)


def engine_builder(
    settings: EngineSettings, path: Path, scheduler: SchedulerConfig
) -> Callable[[Callable[[str], None]], Engine]:
    """`build_engine` with its arguments, ready to be carried out in another process."""
    return partial(build_engine, settings, path, scheduler)


def machine_use(settings: EngineSettings, model: LoadedModel) -> MachineUse:
    """What `/metrics` counts of the machine's use: the model's FLOPs and bytes as this engine holds it, beside the
    measured limits where `pellucid measure` has left a profile with them."""
    shape = served_shape(model.files.path, settings.runtime())
    path = default_path(os.environ)
    if not path.exists():
        return MachineUse(step_work(shape))
    profile = read_profile(path)
    device, compute = profile.device(), shape.weight_format.compute
    rate = device.flops.get(compute)
    if rate is None:
        return MachineUse(step_work(shape))
    limits = MachineLimits(rate, device.need_bandwidth(), compute, profile.machine, profile.measured_at)
    return MachineUse(step_work(shape), limits)


def step_work(shape: ModelShape) -> StepWork:
    """What the steps of a model cost, as numbers: `Roofline.cost` on one rank, taken apart by features. Exact for dense
    attention without a window and for dense layers, which is what the runtime serves."""
    attention = sum(group.num_layers * group.attention.decode_flops(1) for group in shape.groups)
    cached, stream = shape.kv_bytes_per_token(), 4.0 * shape.num_layers * shape.hidden * ACTIVATION_BYTES
    return StepWork(
        flops_per_token=shape.linear_flops(1),
        flops_per_attended=attention,
        flops_per_sample=shape.head_flops(1),
        bytes_per_step=shape.touched_weight_bytes(1, 0),
        bytes_per_sampling_step=shape.weights.head,
        bytes_per_token=cached + stream,
        bytes_per_context=cached,
        bytes_per_sample=shape.vocab * LOGIT_BYTES,
    )


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
