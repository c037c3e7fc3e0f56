"""How plans look: tables for people (rich, on stdout) and one JSON document for programs. No arithmetic."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pellucid.planner.compare import Comparison
from pellucid.planner.figures import figures, fleet_figures
from pellucid.planner.fit import Advice
from pellucid.planner.fleet import Fleet
from pellucid.planner.hardware import Device
from pellucid.planner.plan import BatchPoint, Plan, Scenario
from pellucid.planner.quantity import format_bytes, format_ceiling, format_flops, format_rate, format_seconds
from pellucid.planner.roofline import StepCost
from pellucid.planner.stages import measured_rates, stages

_PIPE_WIDTH = 120  # a pipe has no width of its own


def print_plan(plan: Plan, fleet: Fleet | None, *, explain: bool) -> None:
    """The whole answer; with `explain` each figure is followed by its formula."""
    console = _console()
    _heading(console, plan)
    rows = figures(plan) + (fleet_figures(fleet) if fleet else [])
    for section, group in groupby(rows, key=lambda f: f.section):
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        for figure in group:
            value = Text(figure.value)
            if explain:
                value.append(f"\n= {figure.formula}", style="cyan")
            table.add_row(figure.label, value)
        console.print(Text(section, style="bold"))
        console.print(table)
    console.print(_steps_table(plan))
    _legend(console, plan)


def print_stages(plan: Plan, measured: Plan | None) -> None:
    """Prefill beside decode; beside them this machine, where it has been measured."""
    console = _console()
    _heading(console, plan)
    console.print(_stages_table(plan))
    if measured is not None:
        console.print(_stages_table(measured))
    elif plan.device.name != "this-machine":
        console.print("This machine has not been measured; `pellucid measure` puts its own rates beside these.")


def print_comparison(scenario: Scenario, rows: Sequence[Comparison], sentence: str | None, *, as_json: bool) -> None:
    """Devices side by side, and the compute paradox in a sentence."""
    if as_json:
        document = {"devices": [_comparison_json(row) for row in rows], "paradox": sentence}
        print(json.dumps(document, indent=2))
        return
    console = _console()
    console.print(Text(f"{scenario.shape.name} on {len(rows)} devices", style="bold"))
    table = Table(box=None, padding=(0, 1))
    for name in ("device", "rate", "bandwidth", "FLOP/B", "one stream", "first token", "fit", "all together"):
        table.add_column(name, justify="left" if name == "device" else "right")
    for row in rows:
        table.add_row(
            row.device.name,
            "?" if row.flops is None else format_flops(row.flops, "FLOP/s"),
            "?" if row.device.bandwidth is None else format_rate(row.device.bandwidth),
            "?" if row.ridge is None else f"{row.ridge:.0f}",
            f"{format_ceiling(row.single_stream_tokens_per_second)} tok/s",
            "?" if row.prefill_seconds is None else format_seconds(row.prefill_seconds),
            "?" if row.max_sequences is None else f"{row.max_sequences:,}",
            "-" if row.throughput is None else f"{row.throughput:,.0f} tok/s",
        )
    console.print(table)
    if any(row.max_sequences == 0 for row in rows):
        console.print(
            "Where 0 fit, the times are those of a device with the same rates and enough memory.", style="dim"
        )
    if sentence:
        console.print(sentence)


def print_advice(advice: Advice, *, as_json: bool) -> None:
    """The `serve` command that fits, and why."""
    if as_json:
        print(json.dumps(advice.to_json(), indent=2))
        return
    console = _console()
    for line in advice.reasons:
        console.print(line, style="dim", highlight=False)
    print(shlex.join(advice.command))


def print_names(shapes: Mapping[str, Mapping[str, Any]], devices: Mapping[str, Device]) -> None:
    """Every model and device shipped, with their sources."""
    console = _console()
    for title, rows in (
        ("models", [(name, str(row["source"])) for name, row in shapes.items()]),
        ("devices", [(name, f"{d.title}: {'; '.join(d.sources)}") for name, d in devices.items()]),
    ):
        table = Table(box=None, show_header=False, padding=(0, 2))
        for row in rows:
            table.add_row(row[0], Text(row[1], style="dim"))
        console.print(Text(title, style="bold"))
        console.print(table)


def to_json(plan: Plan, fleet: Fleet | None) -> dict[str, Any]:
    """The plan as one document. Names are stable; what cannot be told is null. Bytes, seconds and FLOP are unscaled."""
    scenario, swap = plan.scenario, plan.swap_or_recompute
    document: dict[str, Any] = {
        "model": plan.shape.name,
        "hardware": plan.device.name,
        "tp": scenario.tp,
        "context": scenario.full_context,
        "num_params": plan.shape.num_params,
        "weights_bytes": plan.weights_bytes,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "kv_bytes_per_request": plan.kv_bytes_per_request,
        "kv_tokens": plan.kv_tokens,
        "max_sequences": plan.max_sequences,
        "decode_seconds_per_token": plan.decode_seconds_per_token,
        "single_stream_tokens_per_second": plan.single_stream_tokens_per_second,
        "prefill_seconds": plan.prefill_seconds,
        "binding": {"prefill": plan.prefill[-1].binding, "decode": plan.single.cost.binding},
        "predicted_from": "measured kernels" if plan.roofline.measured else "roofline",
        "floor": {
            "decode_seconds_per_token": plan.single.cost.roofline_seconds,
            "prefill_seconds": sum(c.roofline_seconds for c in plan.prefill),
        },
        "memory": None if plan.memory is None else {t.name: t.num_bytes for t in plan.memory.terms},
        "steps": [_step_json("prefill", None, c) for c in plan.prefill]
        + [_step_json("decode", p.batch, p.cost) for p in plan.batches],
        "compute_bound_from_batch": plan.compute_bound_from,
        "compute_bound_from_batch_weights_alone": plan.weights_compute_bound_from,
        "prefix_hit": {
            "num_cached": scenario.num_cached,
            "saved_seconds": _saved(plan),
        },
        "communication_seconds_per_step": plan.single.cost.communication_seconds,
        "preemption": None
        if swap is None
        else {
            "recompute_seconds_per_token": swap.recompute_seconds,
            "swap_round_trip_seconds_per_token": swap.round_trip_seconds,
            "break_even_link_bytes_per_second": swap.break_even_link,
        },
        "slo": {"ttft_met": plan.ttft_met, "largest_batch": plan.slo_batch},
    }
    if fleet is not None:
        document["fleet"] = _fleet_json(fleet)
    return document


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def _heading(console: Console, plan: Plan) -> None:
    shape, scenario = plan.shape, plan.scenario
    where = f"{scenario.tp} x {plan.device.title}" if scenario.tp > 1 else plan.device.title
    console.print(Text.assemble((shape.name, "bold"), " on ", (where, "bold")))
    about = f"{scenario.prompt:,} tokens in, {scenario.output:,} out, context {scenario.full_context:,}"
    if scenario.num_cached:
        about += f", {scenario.num_cached:,} of the prompt cached"
    if shape.max_context is not None and scenario.full_context > shape.max_context:
        about += f" (the model was made for {shape.max_context:,})"
    console.print(about, style="dim")
    if shape.has_layers is False:
        console.print("Only the number of parameters is known: attention and KV cache are left out.", style="dim")


def _steps_table(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 1), title="one step", title_justify="left", title_style="bold")
    columns = ("", "FLOP", "bytes", "FLOP/B", "compute", "memory", "step", "bound by", "tok/s each", "tok/s all")
    for name in columns:
        table.add_column(name, justify="left" if name in ("", "bound by") else "right", no_wrap=True)
    if plan.prefill_seconds is not None:
        table.add_row(
            "last chunk of the prompt" if len(plan.prefill) > 1 else "prefill", *_step_cells(plan.prefill[-1]), "", ""
        )
    for point in plan.batches:
        label = f"decode x {point.batch:,}" + (", full" if point.batch == plan.max_sequences else "")
        table.add_row(label, *_step_cells(point.cost), *_speed_cells(point))
    return table


def _step_cells(cost: StepCost) -> tuple[str, ...]:
    return (
        format_flops(cost.flops, "", digits=3),
        format_bytes(cost.bytes, digits=3),
        f"{cost.intensity:.3g}" if cost.intensity < 100 else f"{cost.intensity:,.0f}",
        "?" if cost.compute_seconds is None else format_seconds(cost.compute_seconds, digits=3),
        "?" if cost.memory_seconds is None else format_seconds(cost.memory_seconds, digits=3),
        format_seconds(cost.seconds, digits=3),
        cost.binding.removesuffix(" bandwidth"),
    )


def _speed_cells(point: BatchPoint) -> tuple[str, str]:
    return format_ceiling(1 / point.cost.seconds), format_ceiling(point.tokens_per_second, 1)


def _legend(console: Console, plan: Plan) -> None:
    kind = "those of the engine's measured kernels" if plan.roofline.measured else "floors: no engine is faster"
    console.print(f"Times are {kind}. {measured_rates(plan)}.", style="dim")


def _stages_table(plan: Plan) -> Table:
    table = Table(title=measured_rates(plan), title_justify="left", box=None, padding=(0, 2))
    for name in ("", "prefill", "decode"):
        table.add_column(name, style="dim" if not name else "")
    for row in stages(plan):
        table.add_row(*row)
    return table


def _step_json(stage: str, batch: int | None, cost: StepCost) -> dict[str, Any]:
    return {
        "stage": stage,
        "batch": batch,
        "flops": cost.flops,
        "bytes": cost.bytes,
        "intensity": cost.intensity,
        "compute_seconds": cost.compute_seconds,
        "memory_seconds": cost.memory_seconds,
        "communication_seconds": cost.communication_seconds,
        "seconds": cost.seconds,
        "binding": cost.binding,
    }


def _comparison_json(row: Comparison) -> dict[str, Any]:
    return {
        "hardware": row.device.name,
        "flops": row.flops,
        "bandwidth": row.device.bandwidth,
        "ridge": row.ridge,
        "max_sequences": row.max_sequences,
        "decode_seconds_per_token": row.decode_seconds_per_token,
        "single_stream_tokens_per_second": row.single_stream_tokens_per_second,
        "prefill_seconds": row.prefill_seconds,
        "binding": {"prefill": row.binding_prefill, "decode": row.binding_decode},
        "tokens_per_second": row.throughput,
    }


def _fleet_json(fleet: Fleet) -> dict[str, Any]:
    names = (
        "batch",
        "gap_seconds",
        "requests_per_second",
        "concurrency",
        "users_per_replica",
        "replicas_needed",
        "replicas",
        "dollars_per_hour",
        "dollars_per_million_input",
        "dollars_per_million_output",
        "dollars_per_million_output_all_in",
    )
    return {name: getattr(fleet, name) for name in names}


def _saved(plan: Plan) -> float | None:
    if plan.prefill_seconds is None:
        return None
    return sum(c.seconds for c in plan.prefill_steps(0)) - plan.prefill_seconds
