"""One scenario worked through: a model, a device, a kind of request, and every number that follows.

`Plan` holds numbers only; `figures.py` puts them into words with their formulas. A number that cannot be told (no
memory size, no rate, a bare parameter count) is None, never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from pellucid.core.errors import ConfigError
from pellucid.planner.hardware import Device
from pellucid.planner.memory import Batching, MemoryPlan, plan_memory
from pellucid.planner.roofline import Roofline, StepCost, chunks, decode
from pellucid.planner.shape import ModelShape

BATCHES = (1, 8, 32, 128)
_MOST_CHUNKS = 100_000
_LARGEST_BATCH = 1 << 20  # beyond this a "batch where compute binds" is no answer any more


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is asked. `context` is what a sequence occupies when it ends (None: prompt + output); `prefix_hit` the share
    of the prompt found in the cache; `chunk` the prompt tokens computed in one step (None: all of them)."""

    shape: ModelShape
    device: Device
    tp: int = 1
    prompt: int = 1024
    output: int = 256
    context: int | None = None
    concurrency: int | None = None
    prefix_hit: float = 0.0
    chunk: int | None = None
    slo_ttft_seconds: float | None = None
    slo_itl_seconds: float | None = None
    batching: Batching = field(default_factory=Batching)

    def __post_init__(self) -> None:
        for name in ("prompt", "output", "context", "concurrency", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name} is {value}; it must be at least 1")
        if self.context is not None and self.context < self.prompt:
            raise ConfigError(
                f"a prompt of {self.prompt:,} tokens does not fit a --context of {self.context:,}, which is what a "
                f"sequence ends with; pass a shorter --prompt"
            )
        if self.chunk is not None and self.full_context > self.chunk * _MOST_CHUNKS:
            raise ConfigError(
                f"{self.full_context:,} tokens in chunks of {self.chunk:,} are too many steps to add up; "
                f"pass a --chunk of more tokens"
            )
        if not 0.0 <= self.prefix_hit <= 1.0:
            raise ConfigError(f"--prefix-hit is {self.prefix_hit}; it is a share of the prompt, between 0 and 1")
        for name in ("slo_ttft_seconds", "slo_itl_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"--{name.removesuffix('_seconds').replace('_', '-')} must be more than 0 seconds")

    @property
    def full_context(self) -> int:
        """Tokens that a sequence occupies when it ends."""
        return self.context or self.prompt + self.output

    @property
    def num_cached(self) -> int:
        """Prompt tokens that a prefix hit spares; at least one token is always computed."""
        return min(self.prompt - 1, math.floor(self.prompt * self.prefix_hit))


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """One decode step of `batch` sequences, all at the scenario's context."""

    batch: int
    cost: StepCost

    @property
    def tokens_per_second(self) -> float:
        """Over all sequences of the batch."""
        return self.batch / self.cost.seconds


@dataclass(frozen=True, slots=True)
class SwapOrRecompute:
    """What giving a sequence of `context` tokens its cache back costs, per token: computing it anew, or copying it."""

    recompute_seconds: float
    copy_seconds: float
    link: float

    @property
    def round_trip_seconds(self) -> float:
        """Out and back, as a preemption by swapping pays."""
        return 2 * self.copy_seconds

    @property
    def break_even_link(self) -> float:
        """Host link in bytes/s below which recomputing is cheaper than the round trip."""
        return self.link * self.round_trip_seconds / self.recompute_seconds


class Plan:
    """The scenario's numbers, computed when asked for. Raises ConfigError on construction for what cannot be."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.shape = scenario.shape
        self.device = scenario.device
        self.roofline = Roofline(scenario.shape, scenario.device, tp=scenario.tp)

    # --- memory -------------------------------------------------------------------------------------------------

    @cached_property
    def memory(self) -> MemoryPlan | None:
        """None where the device's memory or the model's layers are unknown."""
        if self.device.memory is None or not self.shape.has_layers:
            return None
        return plan_memory(self.shape, self.device, tp=self.scenario.tp, batching=self.scenario.batching)

    @property
    def weights_bytes(self) -> float:
        """All weights, resident once, over all ranks together."""
        return self.shape.weights.total

    @property
    def kv_bytes_per_token(self) -> float | None:
        """Per rank."""
        return self.shape.kv_bytes_per_token(self.scenario.tp) if self.shape.has_layers else None

    @property
    def kv_bytes_per_request(self) -> float | None:
        """Per rank, at the full context."""
        if not self.shape.has_layers:
            return None
        return self.shape.kv_bytes(self.scenario.full_context, self.scenario.tp)

    @property
    def kv_tokens(self) -> int | None:
        return self.memory.kv_tokens(self.scenario.full_context) if self.memory else None

    @property
    def max_sequences(self) -> int | None:
        return self.memory.max_sequences(self.scenario.full_context) if self.memory else None

    # --- time ---------------------------------------------------------------------------------------------------

    @cached_property
    def prefill(self) -> tuple[StepCost, ...]:
        """The steps that compute one prompt on an idle device, prefix hit taken off."""
        return self.prefill_steps(self.scenario.num_cached)

    def prefill_steps(self, num_cached: int) -> tuple[StepCost, ...]:
        """The steps that compute the prompt behind `num_cached` cached tokens."""
        new = self.scenario.prompt - num_cached
        return tuple(self.roofline.cost(step) for step in chunks(new, num_cached, self.scenario.chunk or new))

    @property
    def prefill_seconds(self) -> float | None:
        """Time to the first token of one request on an idle device. None without a compute rate: then the time that
        memory alone would take would say nothing."""
        if self.roofline.peak is None:
            return None
        return sum(cost.seconds for cost in self.prefill)

    def decode_at(self, batch: int) -> BatchPoint:
        """One decode step of `batch` sequences at the full context."""
        return BatchPoint(batch, self.roofline.cost(decode(batch, self.scenario.full_context)))

    @cached_property
    def single(self) -> BatchPoint:
        """One stream."""
        return self.decode_at(1)

    @property
    def decode_seconds_per_token(self) -> float:
        """Time between two tokens of a single stream."""
        return self.single.cost.seconds

    @property
    def single_stream_tokens_per_second(self) -> float:
        """The ceiling of one stream, however many FLOP/s the device has."""
        return 1.0 / self.decode_seconds_per_token

    @property
    def batches(self) -> tuple[BatchPoint, ...]:
        """Decode at the usual batches, at the asked-for concurrency, and at the largest batch that fits."""
        wanted = {*BATCHES, *(b for b in (self.scenario.concurrency,) if b)}
        largest = self.max_sequences
        if largest is not None:
            wanted = {b for b in wanted if b <= largest} | ({largest} if largest else set())
        return tuple(self.decode_at(b) for b in sorted(wanted))

    @property
    def compute_bound_from(self) -> int | None:
        """The smallest decode batch at which compute takes longer than memory; None if there is none."""
        return _first(self._compute_binds)

    @property
    def weights_compute_bound_from(self) -> int | None:
        """The same with weights alone, as if the context cost nothing: about pi/beta * bytes per weight / 2."""
        if self.roofline.peak is None or self.device.bandwidth is None:
            return None
        per_row = self.shape.linear_flops(1) + self.shape.head_flops(1)
        peak, bandwidth, tp = self.roofline.peak, self.device.bandwidth, self.scenario.tp

        def binds(batch: int) -> bool:
            memory = self.shape.touched_weight_bytes(batch, batch, tp) / bandwidth
            return batch * per_row / tp / peak > memory

        return _first(binds)

    def _compute_binds(self, batch: int) -> bool:
        cost = self.decode_at(batch).cost
        return (cost.compute_seconds or 0.0) > (cost.memory_seconds or math.inf)

    @property
    def swap_or_recompute(self) -> SwapOrRecompute | None:
        """None without layers, a compute rate and a host link."""
        link, context = self.device.host_link, self.scenario.full_context
        if link is None or self.roofline.peak is None or not self.shape.has_layers:
            return None
        compute = sum(
            c.seconds for c in (self.roofline.cost(s) for s in chunks(context, 0, self.scenario.chunk or context))
        )
        return SwapOrRecompute(compute / context, self.shape.kv_bytes(context, self.scenario.tp) / context / link, link)

    # --- service levels -----------------------------------------------------------------------------------------

    @property
    def slo_batch(self) -> int | None:
        """The largest batch whose step keeps the inter-token objective, memory permitting; None without an objective,
        0 where even one stream misses it."""
        slo = self.scenario.slo_itl_seconds
        if slo is None:
            return None
        limit = self.max_sequences if self.max_sequences is not None else _LARGEST_BATCH
        broken = _first(lambda batch: batch > limit or self.decode_at(batch).cost.seconds > slo)
        return (broken or _LARGEST_BATCH) - 1

    @property
    def ttft_met(self) -> bool | None:
        """Whether one request on an idle device keeps the first-token objective; None where that cannot be told."""
        slo, seconds = self.scenario.slo_ttft_seconds, self.prefill_seconds
        return None if slo is None or seconds is None else seconds <= slo


def _first(holds: Callable[[int], bool]) -> int | None:
    """The smallest batch for which `holds`, a condition that stays true once it is; None if none does."""
    high = 1
    while not holds(high):
        high *= 2
        if high > _LARGEST_BATCH:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
