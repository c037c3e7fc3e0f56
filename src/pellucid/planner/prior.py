"""What an engine may expect of its steps and its requests before it has run one: the planner's answer, as numbers.

`step_time_prior` fills in `core.cost.CostPrior`, the table and the prices that the engine's own model starts from.
`alone` is what one request takes on an idle engine, by whatever cost model.

The figures come from this machine's measured kernels where its profile has them for the model's formats. Elsewhere they
are derated ceilings, and meant to be too slow: that costs a few small steps until the engine has measured itself, where
the opposite would break promises.
"""

from __future__ import annotations

from typing import NamedTuple

from pellucid.core.cost import CostModel, CostPrior
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
# Nothing is expected to be free: a price of 0 would never be learnt, since what is learnt is its size.
_LEAST = 1e-7


class StepTimePrior(NamedTuple):
    """The prior, and in a phrase what it rests on."""

    prior: CostPrior
    origin: str


def step_time_prior(shape: ModelShape, device: Device | None, *, num_cores: int = 1) -> StepTimePrior:
    """The prior of `shape`, in the formats the engine holds it in, on `device` (None: a machine that has not been
    measured, of which `num_cores` compute). Raises ConfigError for a bare parameter count, which has no context."""
    if device is None:
        origin = f"assumed for {num_cores} cores, because no profile describes this engine on this machine"
        return StepTimePrior(_guessed(shape, _CORE_FLOPS * num_cores, _CORE_BANDWIDTH * num_cores), origin)
    if device.kernels is not None and Roofline(shape, device).measured:
        return StepTimePrior(_measured(shape, device, device.kernels), ", ".join(device.sources) or device.name)
    peak = device.peak("fp32" if shape.weight_format.compute == "fp32" else "bf16")
    prior = _guessed(shape, _FLOPS_REACHED * peak, _BANDWIDTH_REACHED * device.need_bandwidth())
    missing = f"no kernels for {shape.weight_format.name} weights were measured there"
    return StepTimePrior(prior, f"assumed from the rates of {device.name}, because {missing}")


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


def _measured(shape: ModelShape, device: Device, kernels: KernelRates) -> CostPrior:
    weights, head, cache = shape.weight_format.name, shape.head_format.name, shape.cache_format.name
    overheads = device.overheads

    def head_seconds(rows: int) -> float:
        return kernels.linear_seconds("head", head, rows, shape.hidden * shape.vocab)

    # Logits cost something however few, which stands in the table, and something for each further row.
    sample = (head_seconds(_ROWS) - head_seconds(1)) / (_ROWS - 1)
    fixed = overheads.step_seconds + shape.num_layers * overheads.layer_seconds + max(head_seconds(1) - sample, 0.0)
    layers = [kernels.linear_seconds("layers", weights, rows, shape.num_matrix_params) for rows in KNOTS]
    return CostPrior(
        table=tuple(fixed + seconds for seconds in layers),
        attended=kernels.attention_seconds(cache, _pair_flops(shape), 0.0),
        context=kernels.attention_seconds(cache, 0.0, _CONTEXT * shape.kv_bytes_per_token()) / _CONTEXT,
        sequence=max(overheads.sequence_seconds, _LEAST),
        sample=max(sample, _LEAST),
        copied_byte=1.0 / device.host_link if device.host_link else 2.0 / device.need_bandwidth(),
    )


def _guessed(shape: ModelShape, flops: float, bandwidth: float) -> CostPrior:
    """From rates reached, with nothing hidden behind anything: all reading and all arithmetic, one after the other."""
    head = shape.rank_weights().head / bandwidth

    def layers(tokens: int) -> float:
        return shape.touched_weight_bytes(tokens, 0) / bandwidth + shape.linear_flops(tokens) / flops

    return CostPrior(
        table=tuple(head + layers(tokens) for tokens in KNOTS),
        attended=_pair_flops(shape) / flops,
        context=shape.kv_bytes_per_token() / bandwidth,
        sequence=_LEAST,
        sample=max(shape.head_flops(1) / flops, _LEAST),
        copied_byte=2.0 / bandwidth,
    )


def _pair_flops(shape: ModelShape) -> float:
    """FLOPs of one token attending to one other, over all layers (as if no window cut it off)."""
    return sum(g.num_layers * g.attention.decode_flops(1.0) for g in shape.groups)
