"""The quantities that vLLM exposes too, under vLLM's names, so that dashboards and autoscalers made for it work.

Only where the meaning is the same. Buckets are ours, which quantiles over buckets do not notice. `NAMES` says which of
our metrics each name is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family

if TYPE_CHECKING:
    from pellucid.telemetry.prometheus import ServerMetrics

NAMES: dict[str, str] = {
    "vllm:num_requests_running": "pellucid_running",
    "vllm:num_requests_waiting": "sum(pellucid_waiting)",
    "vllm:kv_cache_usage_perc": "active and in_flight pellucid_blocks of the device, over all of it",
    "vllm:prompt_tokens_total": "pellucid_prompt_tokens_total",
    "vllm:generation_tokens_total": "pellucid_generated_tokens_total",
    "vllm:prefix_cache_queries_total": "pellucid_prompt_tokens_total",
    "vllm:prefix_cache_hits_total": "pellucid_cached_tokens_total",
    "vllm:num_preemptions_total": "sum(pellucid_preemptions_total)",
    "vllm:request_success_total": "pellucid_choices_finished_total; `finished_reason` is stop, length, abort or error",
    "vllm:time_to_first_token_seconds": "pellucid_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "pellucid_inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds": "pellucid_inter_token_latency_seconds (the older name of the same)",
    "vllm:request_time_per_output_token_seconds": "pellucid_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds": "pellucid_e2e_seconds",
    "vllm:request_queue_time_seconds": "pellucid_queue_seconds",
    "vllm:iteration_tokens_total": "pellucid_step_tokens (a histogram, in spite of its name)",
}
_REASONS = {"stop": "stop", "length": "length", "disconnect": "abort", "deadline": "abort", "error": "error"}
_LABELS = ("model_name", "engine")


def families(metrics: ServerMetrics, snapshot: Mapping[str, Any], model: str) -> Iterable[Family]:
    """vLLM's families from ours."""
    labels = (model, "0")

    def gauge(name: str, value: float) -> Family:
        family = GaugeMetricFamily(name, f"{NAMES[name]}, under vLLM's name.", labels=_LABELS)
        family.add_metric(labels, value)
        return family

    def counter(name: str, value: float) -> Family:
        family = CounterMetricFamily(name, f"{NAMES[name]}, under vLLM's name.", labels=_LABELS)
        family.add_metric(labels, value)
        return family

    held = snapshot["blocks_active"] + snapshot["blocks_in_flight"]
    total = held + snapshot["blocks_free"] + snapshot["blocks_cached"]
    yield gauge("vllm:num_requests_running", snapshot["num_running"])
    yield gauge("vllm:num_requests_waiting", snapshot["num_waiting"])
    yield gauge("vllm:kv_cache_usage_perc", held / total if total else 0.0)
    yield counter("vllm:prompt_tokens_total", snapshot["prompt_tokens"])
    yield counter("vllm:generation_tokens_total", snapshot["generated_tokens"])
    yield counter("vllm:prefix_cache_queries_total", snapshot["prompt_tokens"])
    yield counter("vllm:prefix_cache_hits_total", snapshot["cached_tokens"])
    yield counter("vllm:num_preemptions_total", snapshot["num_preemptions"])
    yield _success(metrics, labels)
    pairs = tuple(zip(_LABELS, labels, strict=True))
    for name, histogram in (
        ("vllm:time_to_first_token_seconds", metrics.ttft),
        ("vllm:inter_token_latency_seconds", metrics.itl),
        ("vllm:time_per_output_token_seconds", metrics.itl),
        ("vllm:request_time_per_output_token_seconds", metrics.tpot),
        ("vllm:e2e_request_latency_seconds", metrics.e2e),
        ("vllm:request_queue_time_seconds", metrics.queue),
        ("vllm:iteration_tokens_total", metrics.step_tokens),
    ):
        yield histogram.family(name, pairs)


def _success(metrics: ServerMetrics, labels: tuple[str, ...]) -> Family:
    name = "vllm:request_success_total"
    family = CounterMetricFamily(name, f"{NAMES[name]}, under vLLM's name.", labels=(*_LABELS, "finished_reason"))
    counts = dict.fromkeys(_REASONS.values(), 0.0)
    for (reason,), count in metrics.choices.values.items():
        if reason in _REASONS:  # a refused request was none, to vLLM
            counts[_REASONS[reason]] += count
    for reason, count in counts.items():
        family.add_metric((*labels, reason), count)
    return family
