"""Several devices side by side, and the compute paradox in one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from pellucid.planner.hardware import Device
from pellucid.planner.plan import Plan, Scenario


@dataclass(frozen=True, slots=True)
class Comparison:
    """One device's row. None where a figure cannot be told."""

    device: Device
    flops: float | None
    ridge: float | None
    max_sequences: int | None
    decode_seconds_per_token: float
    prefill_seconds: float | None
    binding_prefill: str
    binding_decode: str
    throughput: float | None

    @property
    def single_stream_tokens_per_second(self) -> float:
        return 1.0 / self.decode_seconds_per_token


def compare(scenario: Scenario, devices: Sequence[Device]) -> tuple[Comparison, ...]:
    """The scenario on each device. Raises ConfigError for a device on which it cannot be."""
    return tuple(_row(Plan(replace(scenario, device=device))) for device in devices)


def paradox(rows: Sequence[Comparison]) -> str | None:
    """The two devices where a higher rate helps a single stream least, in a sentence; None where no two can be
    compared."""
    known = [r for r in rows if r.flops and r.prefill_seconds]
    pairs = [(a, b) for a, b in permutations(known, 2) if (b.flops or 0) > (a.flops or 0)]
    if not pairs:
        return None
    less, more = max(pairs, key=lambda pair: _disagreement(*pair))
    flops = (more.flops or 1) / (less.flops or 1)
    stream = less.decode_seconds_per_token / more.decode_seconds_per_token
    prefill = (less.prefill_seconds or 1) / (more.prefill_seconds or 1)
    text = (
        f"{more.device.name} has {_times(flops)} x the FLOP/s of {less.device.name}, but a single stream runs at "
        f"{_times(stream)} x its speed, because each token reads every weight once and only bandwidth helps there; "
        f"prefill, which multiplies, runs at {_times(prefill)} x"
    )
    if less.throughput and more.throughput:
        text += f", and the largest batch that fits at {_times(more.throughput / less.throughput)} x"
    return text + "."


def _row(plan: Plan) -> Comparison:
    device, largest = plan.device, plan.max_sequences
    known = plan.roofline.peak is not None and device.bandwidth is not None
    return Comparison(
        device=device,
        flops=plan.roofline.peak,
        ridge=device.ridge(plan.roofline.compute_format) if known else None,
        max_sequences=largest,
        decode_seconds_per_token=plan.decode_seconds_per_token,
        prefill_seconds=plan.prefill_seconds,
        binding_prefill=plan.prefill[-1].binding,
        binding_decode=plan.single.cost.binding,
        throughput=plan.decode_at(largest).tokens_per_second if largest else None,
    )


def _times(ratio: float) -> str:
    """Two digits, without an exponent where the ratio is large."""
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.2g}"


def _disagreement(less: Comparison, more: Comparison) -> float:
    """How far the gain in one stream falls behind the gain in rate (logarithms of both ratios)."""
    stream = less.decode_seconds_per_token / more.decode_seconds_per_token
    return math.log((more.flops or 1) / (less.flops or 1)) - math.log(stream)
