"""What to pass to `serve` so that a model and its cache fit a given amount of memory.

The cache gets what weights, activations and the process leave, but no more than the running sequences can fill. The
context is the model's own, or what the cache can hold if that is less; as many sequences run at once as can each have
an even share of at least a block. `cache_memory` is the same rule for an engine that is about to start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pellucid.core.errors import ConfigError
from pellucid.planner.hardware import Device
from pellucid.planner.memory import Batching, plan_memory
from pellucid.planner.quantity import format_bytes
from pellucid.planner.shape import ModelShape

_DEFAULT_CONTEXT = 8192
_MAX_RUNNING = 64
_TOKEN_BUDGET = 512
_GRANULE = 1 << 20  # --kv-memory is given in whole MiB
# Of the memory that is free when nobody says how much to take; the rest is for what else may start.
FREE_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Advice:
    """A `serve` command with its reasons, one a line, and the sizes behind it."""

    command: tuple[str, ...]
    reasons: tuple[str, ...]
    kv_memory_bytes: int
    kv_tokens: int
    max_context: int
    max_running: int
    full_length_sequences: int

    def to_json(self) -> dict[str, Any]:
        """The advice under stable names."""
        return {
            "command": list(self.command),
            "kv_memory_bytes": self.kv_memory_bytes,
            "kv_tokens": self.kv_tokens,
            "max_context": self.max_context,
            "max_running": self.max_running,
            "max_sequences": self.full_length_sequences,
        }


def cache_memory(shape: ModelShape, host: Device, batching: Batching, *, kv_bytes: int | None, context: int) -> int:
    """Bytes for the cache within `host.memory`: `kv_bytes`, if they fit beside everything else, or with None what is
    left, up to what all running sequences of `context` tokens fill: beyond that, memory would only keep prefixes that
    nobody waits for. Raises ConfigError, term by term, where it does not fit."""
    memory = plan_memory(shape, host, batching=batching)
    room = memory.kv_bytes
    terms = ", ".join(f"{t.name} {format_bytes(t.num_bytes)}" for t in memory.terms)
    if room < shape.kv_bytes(batching.block_size):
        total = format_bytes(memory.total_bytes)
        raise ConfigError(f"{total} do not hold {shape.name}: {terms}; give more memory or a smaller --dtype")
    if kv_bytes is None:
        return _granted(min(room, batching.max_running * shape.kv_bytes(context)))
    if kv_bytes > room:
        raise ConfigError(
            f"{format_bytes(kv_bytes)} of KV cache do not fit: of {format_bytes(memory.total_bytes)} that are free, "
            f"{terms} leave {format_bytes(room)}; pass --kv-memory {_option(_granted(room))} or less, or auto"
        )
    return kv_bytes


def _granted(room: float) -> int:
    """`room` in whole MiB, where it is as much as one."""
    return int(room) // _GRANULE * _GRANULE or int(room)


def _option(num_bytes: int) -> str:
    """As --kv-memory takes it."""
    return f"{num_bytes // _GRANULE}MiB" if num_bytes >= _GRANULE else str(num_bytes)


def fit_serve(
    shape: ModelShape, model: str, host: Device, *, kv_bytes: int | None = None, context: int | None = None
) -> Advice:
    """Advice for serving `model` within `host.memory`, or with `kv_bytes` of cache whatever the rest takes.
    Raises ConfigError where the memory does not even hold the weights, or the cache not one sequence of `context`."""
    if context is not None and context < 1:
        raise ConfigError(f"--context is {context}; it must be at least 1")
    batching = Batching(token_budget=_TOKEN_BUDGET, max_running=_MAX_RUNNING, memory_fraction=1.0)
    block = batching.block_size
    if kv_bytes is not None and kv_bytes < shape.kv_bytes(block):
        raise ConfigError(
            f"--kv-memory is {format_bytes(kv_bytes)}, and one block of {block} tokens takes "
            f"{format_bytes(shape.kv_bytes(block))}; give more"
        )
    wanted = context or min(shape.max_context or _DEFAULT_CONTEXT, _DEFAULT_CONTEXT)
    if kv_bytes is None:
        granted = cache_memory(shape, host, batching, kv_bytes=None, context=wanted)
        terms = plan_memory(shape, host, batching=batching).terms
    else:
        granted, terms = _granted(kv_bytes), ()
    per_token = shape.kv_bytes(wanted) / wanted
    tokens = int(granted / per_token) // block * block
    if context is not None and tokens < context:
        raise ConfigError(
            f"a sequence of {context:,} tokens needs {format_bytes(shape.kv_bytes(context))} of KV cache and "
            f"{format_bytes(granted)} are left; give more memory, a smaller --dtype, or a shorter --context"
        )
    longest = min(wanted, tokens)
    full = tokens // longest
    running = max(1, min(_MAX_RUNNING, tokens // block))
    reasons = (
        *(f"{t.name}: {format_bytes(t.num_bytes)} ({t.formula})" for t in terms),
        f"KV cache: {format_bytes(granted)} = {tokens:,} tokens of {per_token:,.0f} B",
        f"{min(full, running):,} sequences of {longest:,} tokens at once"
        + (f"; up to {running} shorter ones run together" if running > full else ""),
    )
    flags = ("--kv-memory", _option(granted), "--max-context", str(longest), "--max-running", str(running))
    kv_dtype = ("--kv-dtype", "int8") if shape.cache_format.name == "int8" else ()
    return Advice(("pellucid", "serve", model, *flags, *kv_dtype), reasons, granted, tokens, longest, running, full)
