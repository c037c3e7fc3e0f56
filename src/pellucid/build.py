"""From settings to what an engine needs to know before it starts: the model's text side, and the sizes of everything.

    EngineSettings ──load_model──> LoadedModel ──plan_engine──> SchedulerConfig ──assembly.build_engine──> Engine

No torch: a server process does all of this itself (it needs the tokenizer and the limits) and has the rest done by
the engine's own process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from pellucid.core.config import PolicyName, SchedulerConfig
from pellucid.core.tenants import Tenant
from pellucid.models.config import ModelConfig, load_model_config
from pellucid.models.gguf_header import read_gguf_header
from pellucid.models.sources import DEFAULT_MODEL, ModelFiles, resolve
from pellucid.planner.memory import Batching
from pellucid.planner.profile import default_path, read_profile
from pellucid.planner.roofline import ACTIVATION_BYTES, LOGIT_BYTES
from pellucid.planner.shape import ModelShape
from pellucid.runtime.memory import blocks_that_fit
from pellucid.settings import EngineSettings
from pellucid.sizing import cache_bytes, engine_prior, served_shape
from pellucid.telemetry.machine_use import MachineLimits, MachineUse, StepWork
from pellucid.text.chat_template import ChatTemplate, chat_template_from_gguf, load_chat_template
from pellucid.text.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf


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
    spec = config.cache_spec(runtime.cache_dtype)
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
