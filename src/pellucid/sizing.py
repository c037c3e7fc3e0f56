"""What an engine is told of its machine before it starts: how much cache fits, and what its steps will probably take.

The one place where a model's files, the runtime's choices and the planner's arithmetic meet; no torch. The shape is
that of the model *as the engine holds it*: in its files' formats where the kernels read them, else in the runtime's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pellucid.core.errors import ConfigError
from pellucid.kernels.gguf_types import packed_bytes
from pellucid.kernels.processors import native
from pellucid.models.gguf_header import read_gguf_header
from pellucid.models.json_object import read_object
from pellucid.planner.config_shape import shape_from_config
from pellucid.planner.fit import FREE_SHARE, cache_memory
from pellucid.planner.formats import number_format
from pellucid.planner.gguf_shape import TensorEntry, shape_from_gguf, weight_bytes
from pellucid.planner.hardware import Device
from pellucid.planner.memory import Batching
from pellucid.planner.prior import StepTimePrior, step_time_prior
from pellucid.planner.profile import default_path, read_profile
from pellucid.planner.shape import ModelShape, weights_in
from pellucid.runtime.config import RuntimeConfig
from pellucid.runtime.machine import available_bytes

# With one scale per 32 inputs, for 4 bits a minimum too, as in these types.
_PACKED_ON_REQUEST = {"bf16": "bf16", "int8": "q8_0", "int4": "q4_1"}


def shape_at(path: Path, *, name: str | None = None) -> ModelShape:
    """The shape of the model at `path`, a directory with config.json or a `.gguf`. Raises ModelError."""
    if path.is_dir():
        return shape_in(path / "config.json", name=name or path.resolve().name)
    header = read_gguf_header(path)
    return shape_from_gguf(header.metadata, header.tensors, name=name or path.stem, origin=str(path))


def shape_in(path: Path, *, name: str) -> ModelShape:
    """The shape that a config.json describes. Raises ModelError."""
    return shape_from_config(read_object(path), name=name, origin=str(path))


def served_shape(path: Path, runtime: RuntimeConfig) -> ModelShape:
    """The shape of the model at `path` as an engine with this (resolved) configuration holds it in memory.

    Formats keep the names under which `pellucid measure` stores their rates: those of the files, unless the user asked
    for others. Bytes are those of the packed weights, which are not quite those of the file (`kernels/gguf_types.py`).
    """
    precision = {"float32": "fp32", "bfloat16": "bf16"}[runtime.dtype]
    shape = shape_at(path).cached_as(runtime.cache_dtype)
    if not _runs_native(runtime):
        return shape.stored_as(precision)
    if runtime.weights != "auto":
        return shape.stored_as(_PACKED_ON_REQUEST[runtime.weights])
    if path.is_dir():  # floats of any width are kept as bfloat16
        return replace(shape, weights=weights_in(shape, number_format("bf16"), number_format("bf16")))
    return replace(shape, weights=weight_bytes(read_gguf_header(path).tensors, _packed_bytes))


def _packed_bytes(tensor: TensorEntry) -> float:
    """Bytes of an element in memory: vectors are float32, and matrices what the native kernels make of them."""
    return 4.0 if len(tensor.shape) == 1 else packed_bytes(tensor.type)


def cache_bytes(
    asked: int,
    path: Path,
    runtime: RuntimeConfig,
    *,
    batching: Batching,
    context: int,
    environment: Mapping[str, str],
    host_tier: int = 0,
) -> int:
    """Bytes for the KV cache: `asked`, or with 0 as much as is free beside everything else and can be used. `host_tier`
    bytes are taken by blocks that leave the cache.

    Only memory of the host is looked at; on another device `asked` stands. Raises ConfigError, with every term, where
    it does not fit, and where "as much as is free" cannot be told.
    """
    free = available_bytes() if runtime.device == "cpu" else None
    if free is None:
        if not asked:
            raise ConfigError(
                f"how much memory is free on {runtime.device} is not known; pass --kv-memory with a size, such as 2GiB"
            )
        return asked
    if host_tier >= free:
        raise ConfigError(
            f"--swap-memory asks for {host_tier / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free; ask for less"
        )
    free -= host_tier
    host = host_device(free if asked else int(free * FREE_SHARE), environment)
    return cache_memory(served_shape(path, runtime), host, batching, kv_bytes=asked or None, context=context)


def host_device(num_bytes: int, environment: Mapping[str, str]) -> Device:
    """This machine's memory as a device of `num_bytes`, with what its profile knows of a serving process."""
    path = default_path(environment)
    profile = read_profile(path) if path.exists() else None
    process = profile.process_bytes if profile is not None and profile.accelerator is None else None
    return Device("this-machine", "this machine", memory=num_bytes, runtime_memory=process)


def engine_prior(path: Path, runtime: RuntimeConfig, environment: Mapping[str, str]) -> StepTimePrior:
    """What this engine's steps are expected to take. A profile counts where it was measured as this engine runs: best
    kernels, as many threads."""
    path_of_profile = default_path(environment)
    as_measured = _runs_native(runtime) and runtime.isa == "auto" and not runtime.deterministic
    device = None
    if as_measured and path_of_profile.exists():
        profile = read_profile(path_of_profile)
        if profile.accelerator is None and profile.num_threads == runtime.threads:
            device = profile.device()
    return step_time_prior(served_shape(path, runtime), device, num_cores=runtime.threads)


def _runs_native(runtime: RuntimeConfig) -> bool:
    """Whether the native kernels can be expected to serve (a model with odd dimensions is still refused by them)."""
    return (
        runtime.device == "cpu" and runtime.isa != "reference" and runtime.dtype == "bfloat16" and native() is not None
    )
