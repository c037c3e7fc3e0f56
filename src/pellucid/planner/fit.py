"""What to pass to `serve` so that a model and its cache fit a given amount of memory.

The cache gets what weights, activations and the process leave, but no more than the running sequences can fill. The
context is the model's own, or what the cache can hold if that is less; as many sequences run at once as can each have
an even share of at least a block.
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


def fit_serve(
    shape: ModelShape, model: str, host: Device, *, kv_bytes: int | None = None, context: int | None = None
) -> Advice:
    """Advice for serving `model` within `host.memory`, or with `kv_bytes` of cache whatever the rest takes.
    Raises ConfigError where the memory does not even hold the weights, or the cache not one sequence of `context`."""
    if context is not None and context < 1:
        raise ConfigError(f"--context is {context}; it must be at least 1")
    batching = Batching(token_budget=_TOKEN_BUDGET, max_running=_MAX_RUNNING, memory_fraction=1.0)
    memory = plan_memory(shape, host, batching=batching)
    room = memory.kv_bytes if kv_bytes is None else float(kv_bytes)
    block = batching.block_size
    if kv_bytes is not None and kv_bytes < shape.kv_bytes(block):
        raise ConfigError(
            f"--kv-memory is {format_bytes(kv_bytes)}, and one block of {block} tokens takes "
            f"{format_bytes(shape.kv_bytes(block))}; give more"
        )
    if room < shape.kv_bytes(block):
        terms = ", ".join(f"{t.name} {format_bytes(t.num_bytes)}" for t in memory.terms)
        total = format_bytes(memory.total_bytes)
        raise ConfigError(f"{total} do not hold {shape.name}: {terms}; give more memory or a smaller --dtype")
    wanted = context or min(shape.max_context or _DEFAULT_CONTEXT, _DEFAULT_CONTEXT)
    if kv_bytes is None:
        # Beyond what all running sequences fill at their longest, memory would only keep prefixes nobody waits for.
        room = min(room, _MAX_RUNNING * shape.kv_bytes(wanted))
    granted = int(room) // _GRANULE * _GRANULE or int(room)
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
        *(f"{t.name}: {format_bytes(t.num_bytes)} ({t.formula})" for t in memory.terms if kv_bytes is None),
        f"KV cache: {format_bytes(granted)} = {tokens:,} tokens of {per_token:,.0f} B",
        f"{min(full, running):,} sequences of {longest:,} tokens at once"
        + (f"; up to {running} shorter ones run together" if running > full else ""),
    )
    size = f"{granted // _GRANULE}MiB" if granted >= _GRANULE else str(granted)
    flags = ("--kv-memory", size, "--max-context", str(longest), "--max-running", str(running))
    return Advice(("pellucid", "serve", model, *flags), reasons, granted, tokens, longest, running, full)
