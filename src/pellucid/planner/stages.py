"""Prefill beside decode, row by row: the one table a newcomer needs."""

from __future__ import annotations

from typing import NamedTuple

from pellucid.planner.plan import Plan
from pellucid.planner.quantity import format_bytes, format_flops, format_rate, format_seconds
from pellucid.planner.roofline import StepCost


class StageRow(NamedTuple):
    """One property of both stages."""

    name: str
    prefill: str
    decode: str


def stages(plan: Plan) -> list[StageRow]:
    """The table for one prompt and for one decode step of one stream."""
    scenario = plan.scenario
    first, step = plan.prefill[-1], plan.single.cost
    new = scenario.prompt - scenario.num_cached
    in_step = min(scenario.chunk or new, new)
    return [
        StageRow("input of a step", f"{in_step:,} tokens of the prompt", "1 token, the one just sampled"),
        StageRow("operation", f"GEMM: {in_step:,} rows x weights", "GEMV: 1 row x weights"),
        StageRow("FLOPs", format_flops(first.flops), format_flops(step.flops)),
        StageRow("bytes moved", format_bytes(first.bytes), format_bytes(step.bytes)),
        StageRow("intensity", f"{first.intensity:.4g} FLOP/B", f"{step.intensity:.4g} FLOP/B"),
        StageRow("bound by", first.binding, step.binding),
        StageRow("compute in use", *(_share(c.compute_seconds, c) for c in (first, step))),
        StageRow("bandwidth in use", *(_share(c.memory_seconds, c) for c in (first, step))),
        StageRow("time of a step", format_seconds(first.seconds), format_seconds(step.seconds)),
        StageRow("drives", "TTFT: time to first token", "ITL: time between tokens"),
        StageRow(
            "remedy",
            "prefix cache, chunking, more FLOP/s, 8-bit arithmetic",
            "batching, fewer bytes per weight, more bandwidth, KV in 8 bits",
        ),
    ]


def measured_rates(plan: Plan) -> str:
    """The rates behind the table, in a line."""
    device, peak = plan.device, plan.roofline.peak
    rate = "rate unknown" if peak is None else f"{format_flops(peak, 'FLOP/s')} {plan.roofline.compute_format}"
    bandwidth = "bandwidth unknown" if device.bandwidth is None else format_rate(device.bandwidth)
    return f"{device.title}: {rate}, {bandwidth}" + (f" ({device.sources[0]})" if device.sources else "")


def _share(seconds: float | None, cost: StepCost) -> str:
    return "unknown" if seconds is None else f"{seconds / cost.seconds:.1%}"
