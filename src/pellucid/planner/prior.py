"""What an engine may expect of its steps and its requests before it has run one: the planner's answer, as numbers.

`step_time_prior` lays the time of a step out as the table that a step-time model starts from,

    seconds = knots(tokens) + a * attended + c * context + s * sequences + r * samples + b * copied bytes

so that whoever learns on the job needs nothing but these figures. `alone` is what one request takes on an idle engine.

The figures come from this machine's measured kernels where its profile has them for the model's formats. Elsewhere they
are a derated roofline with a wide spread, and meant to be too slow: that costs a few small steps until the engine has
measured itself, where the opposite would break promises.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

from pellucid.core.cost import CostModel, Prediction, StepFeatures
from pellucid.planner.hardware import Device
from pellucid.planner.kernel_rates import KernelRates
from pellucid.planner.roofline import Roofline, chunks, decode
from pellucid.planner.shape import ModelShape

KNOTS = tuple(1 << power for power in range(12))  # 1 ... 2048 tokens
# Context whose reading sets the price of a cached token: what fits a processor's own cache would be cheaper.
_CONTEXT = 4096
_ROWS = 32  # sampled rows that set the price of one more
# The part of its ceilings that a machine without measured kernels is expected to reach, in arithmetic and in reading.
_FLOPS_REACHED, _BANDWIDTH_REACHED = 0.1, 0.3
# What a core of a machine without a profile is expected to reach: meant to be less than it does.
_CORE_FLOPS, _CORE_BANDWIDTH = 20e9, 4e9
_GUESSED_SPREAD = 1.0


@dataclass(frozen=True, slots=True)
class StepTimePrior:
    """Prices of a step. `knots` are (new tokens, seconds), ascending, without context; what a step that samples costs
    whatever its number of rows is in them. The rest is seconds per unit of `StepFeatures`. `spread` is relative (one
    standard deviation), `origin` says what the figures rest on. It is a `core.cost.CostModel`."""

    knots: tuple[tuple[int, float], ...]
    attended_seconds: float
    context_seconds: float
    sequence_seconds: float
    sample_seconds: float
    copied_byte_seconds: float
    spread: float
    origin: str

    def predict(self, features: StepFeatures) -> Prediction:
        """Seconds of a step: straight lines between the knots and beyond the last, the rest in proportion."""
        seconds = (
            self._at(features.num_tokens)
            + features.num_attended * self.attended_seconds
            + features.num_context * self.context_seconds
            + features.num_sequences * self.sequence_seconds
            + features.num_samples * self.sample_seconds
            + features.copied_bytes * self.copied_byte_seconds
        )
        return Prediction(seconds, seconds * self.spread)

    def _at(self, num_tokens: int) -> float:
        right = min(max(bisect_left(self.knots, (num_tokens, 0.0)), 1), len(self.knots) - 1)
        (x0, y0), (x1, y1) = self.knots[right - 1], self.knots[right]
        return y0 + (y1 - y0) * (max(num_tokens, x0) - x0) / (x1 - x0)


def step_time_prior(shape: ModelShape, device: Device | None, *, num_cores: int = 1) -> StepTimePrior:
    """The prior of `shape`, in the formats the engine holds it in, on `device` (None: a machine that has not been
    measured, of which `num_cores` compute). Raises ConfigError for a bare parameter count, which has no context."""
    if device is None:
        origin = f"assumed for {num_cores} cores, because this machine has not been measured"
        return _guessed(shape, _CORE_FLOPS * num_cores, _CORE_BANDWIDTH * num_cores, origin)
    if device.kernels is not None and Roofline(shape, device).measured:
        return _measured(shape, device, device.kernels)
    peak = device.peak("fp32" if shape.weight_format.compute == "fp32" else "bf16")
    origin = f"assumed from the rates of {device.name}, because no {shape.weight_format.name} kernel was measured there"
    return _guessed(shape, _FLOPS_REACHED * peak, _BANDWIDTH_REACHED * device.need_bandwidth(), origin)


class Alone(NamedTuple):
    """What a request takes on an engine that has nothing else to do, until its first and until its last token."""

    first_token_seconds: float
    total_seconds: float


def alone(cost: CostModel, *, num_prompt: int, num_cached: int, num_output: int, token_budget: int) -> Alone:
    """A request of `num_prompt` tokens, `num_cached` of them found in the cache (fewer than all), and `num_output` of
    output, in steps of at most `token_budget` tokens. With `num_cached` 0: what it would have taken without a cache.

    Decode steps are priced at their mean context, which is exact where context is priced in proportion.
    """
    first = sum(cost.predict(step).seconds for step in chunks(num_prompt - num_cached, num_cached, token_budget))
    steps = num_output - 1
    if steps < 1:
        return Alone(first, first)
    return Alone(first, first + steps * cost.predict(decode(1, num_prompt + (steps + 1) // 2)).seconds)


def _measured(shape: ModelShape, device: Device, kernels: KernelRates) -> StepTimePrior:
    weights, head, cache = shape.weight_format.name, shape.head_format.name, shape.cache_format.name
    overheads = device.overheads

    def head_seconds(rows: int) -> float:
        return kernels.linear_seconds("head", head, rows, shape.hidden * shape.vocab)

    sample = (head_seconds(_ROWS) - head_seconds(1)) / (_ROWS - 1)
    fixed = overheads.step_seconds + shape.num_layers * overheads.layer_seconds + max(head_seconds(1) - sample, 0.0)
    layers = [(t, kernels.linear_seconds("layers", weights, t, shape.num_matrix_params)) for t in KNOTS]
    return StepTimePrior(
        knots=tuple((tokens, fixed + seconds) for tokens, seconds in layers),
        attended_seconds=kernels.attention_seconds(cache, _pair_flops(shape), 0.0),
        context_seconds=kernels.attention_seconds(cache, 0.0, _CONTEXT * shape.kv_bytes_per_token()) / _CONTEXT,
        sequence_seconds=overheads.sequence_seconds,
        sample_seconds=sample,
        copied_byte_seconds=1.0 / device.host_link if device.host_link else 2.0 / device.need_bandwidth(),
        spread=kernels.spread(weights, 1),
        origin=device.sources[0] if device.sources else device.name,
    )


def _guessed(shape: ModelShape, flops: float, bandwidth: float, origin: str) -> StepTimePrior:
    """Rates reached, and nothing hidden behind anything: all reading and all arithmetic, one after the other."""
    head = shape.rank_weights().head / bandwidth

    def layers(tokens: int) -> float:
        return shape.touched_weight_bytes(tokens, 0) / bandwidth + shape.linear_flops(tokens) / flops

    return StepTimePrior(
        knots=tuple((tokens, head + layers(tokens)) for tokens in KNOTS),
        attended_seconds=_pair_flops(shape) / flops,
        context_seconds=shape.kv_bytes_per_token() / bandwidth,
        sequence_seconds=0.0,
        sample_seconds=shape.head_flops(1) / flops,
        copied_byte_seconds=2.0 / bandwidth,
        spread=_GUESSED_SPREAD,
        origin=origin,
    )


def _pair_flops(shape: ModelShape) -> float:
    """FLOPs of one token attending to one other, over all layers (as if no window cut it off)."""
    return sum(g.num_layers * g.attention.decode_flops(1.0) for g in shape.groups)
