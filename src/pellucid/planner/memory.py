"""Where a device's memory goes, term by term, and how many tokens and sequences are left room for.

    KV bytes = memory * fraction - weights - activations - logits - runtime - communication buffers

Each term is listed with its formula, so that a reader can disagree with one of them. A pool of pages has no external
fragmentation; what a sequence wastes is the rest of its last block, which is counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pellucid.core.errors import ConfigError
from pellucid.planner.hardware import Device
from pellucid.planner.shape import Experts, HeadedAttention, ModelShape

# Memory a CUDA process holds before it allocates a tensor: context, module code, library workspaces. 551 MB is what
# ai-dynamo/aiconfigurator measured before it raised its reserve to 3.5 GB "for safer deployment" (systems/*.yaml).
RUNTIME_BYTES = 551_000_000
# Buffers of the communication library by number of ranks (same source).
_COMMUNICATION_BYTES = {1: 0, 2: 358_612_992}
_COMMUNICATION_BYTES_MANY = 411_041_792


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    """One claim on memory, in bytes, and how it came about."""

    name: str
    num_bytes: float
    formula: str


@dataclass(frozen=True, slots=True)
class Batching:
    """What an engine may do in one step, as far as memory is concerned: tokens, sequences, block size, and the part of
    the device's memory that it may take."""

    token_budget: int = 2048
    max_running: int = 256
    block_size: int = 16
    memory_fraction: float = 0.9

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_running", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(f"memory fraction is {self.memory_fraction}; it must lie in (0, 1]")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The terms of one rank, and what they leave for the cache (negative where the model does not fit)."""

    shape: ModelShape
    tp: int
    block_size: int
    total_bytes: int
    terms: tuple[MemoryTerm, ...]

    @property
    def kv_bytes(self) -> float:
        """Bytes left for the cache, per rank."""
        return self.total_bytes - sum(t.num_bytes for t in self.terms)

    @property
    def fits(self) -> bool:
        """Whether anything is left for a cache."""
        return self.kv_bytes > 0

    def kv_tokens(self, context: int) -> int:
        """Tokens that the pool holds, in whole blocks, as sequences of `context` tokens each fill it. (The length only
        matters where some layers keep no more than a window.)"""
        per_token = self.shape.kv_bytes(context, self.tp) / context
        return max(0, int(self.kv_bytes / per_token) // self.block_size * self.block_size)

    def max_sequences(self, context: int) -> int:
        """Sequences of `context` tokens that fit at once, each rounded up to whole blocks."""
        padded = math.ceil(context / self.block_size) * self.block_size
        return max(0, int(self.kv_bytes / self.shape.kv_bytes(padded, self.tp)))


def plan_memory(shape: ModelShape, device: Device, *, tp: int = 1, batching: Batching | None = None) -> MemoryPlan:
    """Divide the device's memory. Raises ConfigError where its size is unknown."""
    batching = batching or Batching()
    total = device.need_memory()
    outside = device.runtime_memory
    weights = shape.rank_weights(tp).total
    terms = (
        MemoryTerm("kept free", total * (1 - batching.memory_fraction), f"memory * (1 - {batching.memory_fraction:g})"),
        MemoryTerm("weights", weights, _weights_formula(shape, tp)),
        MemoryTerm("activations", *_activations(shape, tp, batching.token_budget)),
        MemoryTerm(
            "logits",
            batching.max_running * shape.vocab * (2 + 4 + 4) / tp,
            f"{batching.max_running} rows * V * (2 + 4 + 4) B: 16-bit, float32, probabilities",
        ),
        MemoryTerm(
            "runtime",
            RUNTIME_BYTES if outside is None else outside,
            "device context and libraries, " + ("assumed" if outside is None else "measured"),
        ),
        MemoryTerm(
            "communication",
            _COMMUNICATION_BYTES.get(tp, _COMMUNICATION_BYTES_MANY),
            f"buffers for {tp} rank{'s' if tp > 1 else ''}",
        ),
    )
    return MemoryPlan(shape, tp, batching.block_size, total, tuple(t for t in terms if t.num_bytes))


def _weights_formula(shape: ModelShape, tp: int) -> str:
    text = f"{shape.num_params:,} parameters, layers in {shape.weight_format.name}"
    return text if tp == 1 else f"{text}, over {tp} ranks"


def _activations(shape: ModelShape, tp: int, num_tokens: int) -> tuple[float, str]:
    """Peak of what is alive at once in a layer: the residual stream, its normed copy, and the wider of the two inner
    parts (Q, K, V and attention's output; or gate, up and their product), in 16 bits."""
    widest = 0.0
    for group in shape.groups:
        attention, forward = group.attention, group.feed_forward
        if isinstance(attention, HeadedAttention):
            inner = 2 * attention.num_heads * attention.head_dim / tp + attention.cache_elements(tp)
        else:
            per_head = 2 * (attention.nope_dim + attention.rope_dim) + 2 * attention.value_dim
            inner = attention.num_heads * per_head / tp + attention.cache_elements()
        if isinstance(forward, Experts):
            width = max(forward.num_active * forward.width, forward.shared_width)
        else:
            width = forward.width
        widest = max(widest, inner, (3 if forward.gated else 2) * width / tp)
    elements = 2 * shape.hidden + widest
    return num_tokens * elements * 2, f"{num_tokens} tokens * (2*h + {widest:,.0f}) * 2 B"
