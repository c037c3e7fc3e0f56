"""A plan in words: every figure with its label, its printed value, and the formula with its inputs filled in.

The numbers are the plan's; nothing is computed here that is not a division for display. The same list feeds the
terminal (`--explain` adds the formulas) and the documentation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pellucid.planner.fleet import Fleet
from pellucid.planner.memory import MemoryPlan
from pellucid.planner.plan import Plan
from pellucid.planner.quantity import format_bytes, format_ceiling, format_flops, format_rate, format_seconds
from pellucid.planner.roofline import StepCost
from pellucid.planner.shape import HeadedAttention, LatentAttention


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the answer. `name` is stable (the JSON name where there is one); `formula` has its inputs in it."""

    section: str
    name: str
    label: str
    value: str
    formula: str


def figures(plan: Plan) -> list[Figure]:
    """Every figure that this plan can tell, in reading order."""
    return [
        *_memory(plan),
        *_prefill(plan),
        *_decode(plan),
        *_prefix(plan),
        *_parallel(plan),
        *_preemption(plan),
        *_objectives(plan),
    ]


def _memory(plan: Plan) -> Iterator[Figure]:
    shape, scenario = plan.shape, plan.scenario
    layers, head = shape.weight_format, shape.head_format
    formula = f"{shape.num_params:,} parameters x {shape.weights.total / shape.num_params:.6g} B ({layers.name}"
    formula += ")" if layers == head else f", tables {head.name}, scales included)"
    yield Figure("memory", "weights_bytes", "weights", format_bytes(plan.weights_bytes), formula)
    context = scenario.full_context
    if plan.kv_bytes_per_token is not None and plan.kv_bytes_per_request is not None:
        per_token = f"{plan.kv_bytes_per_token:,.0f} B"
        yield Figure("memory", "kv_bytes_per_token", "KV cache per token", per_token, _kv_formula(plan))
        yield Figure(
            "memory",
            "kv_bytes_per_request",
            f"KV cache of {context:,} tokens",
            format_bytes(plan.kv_bytes_per_request),
            "sum over layers of min(window, context) x bytes per token and layer"
            if any(g.attention.window for g in shape.groups)
            else f"{context:,} x {plan.kv_bytes_per_token:,.0f} B",
        )
    memory = plan.memory
    if memory is None:
        return
    yield from _divided(plan, memory)


def _divided(plan: Plan, memory: MemoryPlan) -> Iterator[Figure]:
    scenario, context = plan.scenario, plan.scenario.full_context
    for term in memory.terms:
        if term.name != "weights" or scenario.tp > 1:
            label = "weights per rank" if term.name == "weights" else term.name
            yield Figure("memory", f"memory.{term.name}", label, format_bytes(term.num_bytes), term.formula)
    minus = " - ".join(t.name for t in memory.terms)
    left = format_bytes(memory.kv_bytes) if memory.fits else f"none: {format_bytes(-memory.kv_bytes)} short"
    yield Figure("memory", "kv_bytes", "left for the KV cache", left, f"{format_bytes(memory.total_bytes)} - {minus}")
    yield Figure(
        "memory",
        "kv_tokens",
        "KV tokens",
        f"{memory.kv_tokens(context):,}",
        f"{max(memory.kv_bytes, 0):,.0f} B / {plan.shape.kv_bytes(context, memory.tp) / context:,.0f} B, in blocks of "
        f"{memory.block_size}",
    )
    yield Figure(
        "memory",
        "max_sequences",
        f"sequences of {context:,} tokens at once",
        f"{memory.max_sequences(context):,}",
        f"KV bytes left / KV bytes of {context:,} tokens in whole blocks, rounded down",
    )
    wanted = scenario.concurrency
    if wanted is not None:
        fits = memory.max_sequences(context)
        yield Figure(
            "memory",
            "concurrency",
            f"{wanted:,} at once",
            f"{format_bytes(wanted * plan.shape.kv_bytes(context, memory.tp))} of KV cache: "
            + ("they fit" if wanted <= fits else f"{fits:,} fit, the others wait"),
            f"{wanted:,} x KV bytes of {context:,} tokens, against the room left",
        )


def _prefill(plan: Plan) -> Iterator[Figure]:
    if plan.prefill_seconds is None:
        return
    scenario, shape = plan.scenario, plan.shape
    steps, new = plan.prefill, scenario.prompt - scenario.num_cached
    flops = sum(c.flops for c in steps)
    attention = sum(c.attention_flops for c in steps)
    pairs = f"c = {scenario.num_cached:,}, q = {new:,}"
    share = f"; attention is {attention / flops:.0%}" if shape.has_layers else ""
    formula = f"2*P*q + attention(q*c + q*(q+1)/2) + 2*h*V, P = {shape.num_matrix_params:,.0f}, {pairs}{share}"
    yield Figure("prefill", "prefill.flops", f"FLOPs of {new:,} tokens", format_flops(flops), _per_rank(plan, formula))
    yield Figure(
        "prefill",
        "prefill_seconds",
        "time to first token, idle device",
        format_seconds(plan.prefill_seconds),
        _time_formula(plan, steps[-1]) + (f", summed over {len(steps)} chunks" if len(steps) > 1 else ""),
    )
    yield Figure("prefill", "binding.prefill", "bound by", steps[-1].binding, _binding_formula(steps[-1]))


def _decode(plan: Plan) -> Iterator[Figure]:
    cost, context = plan.single.cost, plan.scenario.full_context
    parts = [f"weights {format_bytes(cost.weight_bytes)}"]
    if plan.shape.has_layers:
        parts.append(f"KV of {context:,} tokens {format_bytes(cost.kv_read_bytes + cost.kv_write_bytes)}")
        parts.append(f"activations {format_bytes(cost.activation_bytes)}")
    moved = " + ".join(parts)
    yield Figure("decode", "decode.bytes", "bytes moved per token, one stream", format_bytes(cost.bytes), moved)
    yield Figure(
        "decode",
        "decode_seconds_per_token",
        "time per token, one stream",
        format_seconds(cost.seconds),
        _time_formula(plan, cost),
    )
    yield Figure(
        "decode",
        "single_stream_tokens_per_second",
        "ceiling of one stream" if not plan.roofline.measured else "one stream",
        f"{format_ceiling(plan.single_stream_tokens_per_second)} tokens/s",
        f"1 / {format_seconds(cost.seconds)}, rounded down",
    )
    yield Figure("decode", "binding.decode", "bound by", cost.binding, _binding_formula(cost))
    if plan.roofline.measured:
        yield Figure(
            "decode",
            "decode_floor_seconds",
            "floor of this machine",
            format_seconds(cost.roofline_seconds),
            f"{format_bytes(cost.bytes)} / {format_rate(plan.device.need_bandwidth())}: what no kernel can beat",
        )
    if plan.roofline.peak is None or plan.device.bandwidth is None:
        return
    ridge = plan.roofline.peak / plan.device.bandwidth
    rates = f"{format_flops(plan.roofline.peak, 'FLOP/s')} / {format_rate(plan.device.bandwidth)}"
    yield Figure("decode", "ridge", "ridge", f"{ridge:.4g} FLOP/B", f"{rates}: below it memory binds, above it compute")
    alone, loaded = plan.weights_compute_bound_from, plan.compute_bound_from
    yield Figure(
        "decode",
        "compute_bound_from",
        "compute binds from batch",
        f"{alone or 'never'} counting weights alone"
        + (f"; {loaded or 'never'} with KV of {context:,} tokens each" if plan.shape.has_layers else ""),
        "the smallest batch whose FLOPs / peak exceed its bytes / bandwidth",
    )


def _prefix(plan: Plan) -> Iterator[Figure]:
    scenario = plan.scenario
    if not scenario.num_cached or plan.prefill_seconds is None:
        return
    cold = sum(c.seconds for c in plan.prefill_steps(0))
    hit = scenario.num_cached
    yield Figure(
        "prefix hit",
        "prefix_hit.saved_seconds",
        f"saved by {hit:,} cached tokens",
        f"{format_seconds(cold - plan.prefill_seconds)} of {format_seconds(cold)}",
        "prefill with c = 0 minus prefill of the tail: the hit tokens' FLOPs and KV writes; reading them remains",
    )
    yield Figure(
        "prefix hit",
        "prefix_hit.untouched",
        "left untouched",
        f"{scenario.output:,} decode steps of {format_seconds(plan.decode_seconds_per_token)}, the tail, queueing",
        "a decode step reads all weights and the whole context, wherever the prompt's KV entries came from",
    )


def _parallel(plan: Plan) -> Iterator[Figure]:
    tp = plan.scenario.tp
    if tp == 1:
        return
    seconds = plan.single.cost.communication_seconds
    alpha = plan.device.all_reduce_seconds
    latency = f"alpha = {format_seconds(alpha)}" if alpha else "alpha unknown, taken as 0: a lower bound"
    link = format_rate(plan.device.link or 0)
    yield Figure(
        "tensor parallel",
        "communication_seconds",
        f"communication per decode step, {tp} ranks",
        format_seconds(seconds),
        f"2*L*(alpha + 2*(n-1)/n * h * 2 B / {link}) + gather of the logits; {latency}",
    )
    share = seconds / plan.single.cost.seconds
    yield Figure("tensor parallel", "communication_share", "its share of the step", f"{share:.0%}", "above / step time")


def _preemption(plan: Plan) -> Iterator[Figure]:
    choice = plan.swap_or_recompute
    if choice is None:
        return
    context = plan.scenario.full_context
    yield Figure(
        "preemption",
        "recompute_seconds_per_token",
        "recompute, per token",
        format_seconds(choice.recompute_seconds),
        f"prefill of {context:,} tokens / {context:,}",
    )
    yield Figure(
        "preemption",
        "swap_seconds_per_token",
        "swap out and back, per token",
        f"{format_seconds(choice.round_trip_seconds)} ({format_seconds(choice.copy_seconds)} one way)",
        f"2 x {plan.kv_bytes_per_token:,.0f} B / {format_rate(choice.link)}",
    )
    better = "swap" if choice.round_trip_seconds < choice.recompute_seconds else "recompute"
    slower = max(choice.round_trip_seconds, choice.recompute_seconds)
    ratio = slower / min(choice.round_trip_seconds, choice.recompute_seconds)
    yield Figure(
        "preemption",
        "preemption",
        "cheaper",
        f"{better}, {ratio:.2g} x (round trip); break-even host link {format_rate(choice.break_even_link)}",
        "link x round trip / recompute; holds until the link saturates at link / KV bytes per token",
    )


def _objectives(plan: Plan) -> Iterator[Figure]:
    scenario = plan.scenario
    if scenario.slo_ttft_seconds is not None and plan.prefill_seconds is not None:
        slack = scenario.slo_ttft_seconds - plan.prefill_seconds
        verdict = f"met on an idle device, {format_seconds(slack)} left for queueing" if plan.ttft_met else "missed"
        formula = f"{format_seconds(plan.prefill_seconds)} against {format_seconds(scenario.slo_ttft_seconds)}"
        yield Figure("objectives", "slo_ttft", "first token", verdict, formula)
    if scenario.slo_itl_seconds is not None:
        batch = plan.slo_batch or 0
        verdict = f"kept up to batch {batch:,}" if batch else "missed by a single stream"
        if batch and batch == plan.max_sequences:
            verdict += " (memory ends first)"
        formula = f"largest batch whose decode step takes at most {format_seconds(scenario.slo_itl_seconds)}"
        yield Figure("objectives", "slo_itl", "between tokens", verdict, formula)


def fleet_figures(fleet: Fleet) -> list[Figure]:
    """Replicas and cost in words."""
    demand = fleet.demand
    rows = [
        ("batch", "batch per replica at full load", f"{fleet.batch:,}", "largest that memory and objectives allow"),
        ("gap_seconds", "between tokens there", format_seconds(fleet.gap_seconds), "t(B) + B * p / N_out"),
        (
            "requests_per_second",
            "requests per second",
            f"{fleet.requests_per_second:.3g} ({fleet.requests_per_second_per_replica:.3g} per replica)",
            "lambda(B) = 1 / (p + N_out * t(B) / B)",
        ),
        ("concurrency", "requests in service at once", f"{fleet.concurrency:,.1f}", "lambda * residence (Little)"),
        (
            "replicas",
            "replicas",
            f"{fleet.replicas:,} = {fleet.replicas_needed:,} + 1 spare, {fleet.devices_per_replica} device(s) each",
            f"{demand.users:,} users / {fleet.users_per_replica:,.1f} per replica, rounded up, and one spare",
        ),
    ]
    for name, label, value in (
        ("dollars_per_hour", "fleet per hour", fleet.dollars_per_hour),
        ("dollars_per_million_input", "per million input tokens, full load", fleet.dollars_per_million_input),
        ("dollars_per_million_output", "per million output tokens, full load", fleet.dollars_per_million_output),
        (
            "dollars_per_million_output_all_in",
            "per million output tokens, whole bill",
            fleet.dollars_per_million_output_all_in,
        ),
    ):
        if value is not None:
            rows.append((name, label, f"{value:,.4g}", f"at {demand.price_per_hour:,.4g} per device and hour"))
    return [Figure("fleet", f"fleet.{name}", label, value, formula) for name, label, value, formula in rows]


def _kv_formula(plan: Plan) -> str:
    fmt, tp = plan.shape.cache_format, plan.scenario.tp
    parts, scale = [], fmt.vector_bytes
    for group in plan.shape.groups:
        attention = group.attention
        if isinstance(attention, LatentAttention):
            stored = f"({attention.latent_dim} + {attention.rope_dim}) x {fmt.element_bytes:g} B"
            stored = f"({stored} + 2 x {scale:g} B)" if scale else stored
            parts.append(f"{group.num_layers} layers x {stored}")
        elif isinstance(attention, HeadedAttention):
            split = min(tp, attention.num_kv_heads)
            over = f" / {split}" if split > 1 else ""
            stored = f"{attention.head_dim} x {fmt.element_bytes:g} B"
            stored = f"({stored} + {scale:g} B)" if scale else stored
            parts.append(
                f"2 x {group.num_layers} layers x {attention.num_kv_heads} KV heads x {stored}{over}"
                + (f" (window {attention.window:,})" if attention.window else "")
            )
    return " + ".join(dict.fromkeys(parts))


def _time_formula(plan: Plan, cost: StepCost) -> str:
    parts = []
    if cost.compute_seconds is not None and plan.roofline.peak:
        parts.append(f"{format_flops(cost.flops)} / {format_flops(plan.roofline.peak, 'FLOP/s')}")
    if cost.memory_seconds is not None and plan.device.bandwidth:
        parts.append(f"{format_bytes(cost.bytes)} / {format_rate(plan.device.bandwidth)}")
    formula = f"max({', '.join(parts)})" if len(parts) > 1 else parts[0]
    if cost.kernel_seconds is not None:
        formula = f"measured kernels {format_seconds(cost.kernel_seconds)} (roofline: {formula})"
    if cost.communication_seconds:
        formula += f" + communication {format_seconds(cost.communication_seconds)}"
    if cost.overhead_seconds:
        formula += f" + overheads {format_seconds(cost.overhead_seconds)}"
    return formula


def _binding_formula(cost: StepCost) -> str:
    parts = [
        f"{name} {format_seconds(seconds)}"
        for name, seconds in (("compute", cost.compute_seconds), ("memory", cost.memory_seconds))
        if seconds is not None
    ]
    return f"{' against '.join(parts)}; {cost.intensity:.3g} FLOP/B"


def _per_rank(plan: Plan, formula: str) -> str:
    return formula if plan.scenario.tp == 1 else f"({formula}) / {plan.scenario.tp} ranks"
