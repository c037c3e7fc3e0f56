"""What `/metrics` says is what happened; the catalogue is what `/metrics` has."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import asdict
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.telemetry.reports import report, stored
from tests.telemetry.steps import summary

from pellucid.core.errors import RequestRejected
from pellucid.core.ledger import TokenCounts
from pellucid.engine.engine import EngineStats
from pellucid.telemetry import catalogue, vllm_names
from pellucid.telemetry.choice_times import ChoiceTimes
from pellucid.telemetry.machine_use import MachineLimits, MachineUse, StepWork
from pellucid.telemetry.prometheus import MOST_TENANTS, ServerMetrics

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
WORK = StepWork(2.0, 3.0, 5.0, 100.0, 50.0, 7.0, 11.0, 13.0)


def metrics(stats: EngineStats | None = None, **options: Any) -> ServerMetrics:
    return ServerMetrics(lambda: asdict(stats or EngineStats()), **options)


def samples(shown: ServerMetrics) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(shown.render().decode()):
        for sample in family.samples:
            found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


def value(shown: ServerMetrics, name: str, **labels: str) -> float:
    return samples(shown)[name, frozenset(labels.items())]


def by_label(shown: ServerMetrics, name: str, label: str) -> dict[str, float]:
    return {dict(labels)[label]: number for (found, labels), number in samples(shown).items() if found == name}


def full(**options: Any) -> ServerMetrics:
    """Everything that can be shown: each counter with labels has been counted once."""
    shown = metrics(machine=MachineUse(WORK, MachineLimits(1e6, 1e6)), clock=lambda: 12.0, **options)
    shown.count_reply("/v1/completions", 200)
    shown.count_rejection(RequestRejected("queue_full", "no", retry_after=1.0, limit="machine"))
    shown.steps([summary(1), summary(2)])
    streamed(shown).end("stop")
    shown.ended(stored("r", LEDGER, tenant="acme"))
    return shown


def streamed(shown: ServerMetrics) -> ChoiceTimes:
    """Arrives at 1, is expected at 3.5, has its first of 5 tokens at 4, and all at 6."""
    times = shown.choice(1.0)
    times.predicted(2.0, 1.5)
    times.tokens(1, 4.0)
    times.tokens(4, 6.0)
    return times


LEDGER = report(
    {"queue.memory": 1.5, "engine.gap": 0.25, "queue.fairness": 0.5},
    {"prefill.own": 0.75},
    {"decode.own": 3.0},
    tokens=TokenCounts(prompt=100, cached=48, cached_host=16, recomputed=7, output=20),
)


def test_a_choice_while_it_streams():
    shown = metrics()
    streamed(shown).end("stop")
    assert value(shown, "pellucid_time_to_first_token_seconds_sum") == 3.0
    assert value(shown, "pellucid_inter_token_latency_seconds_count") == 4
    assert value(shown, "pellucid_inter_token_latency_seconds_sum") == 2.0
    assert value(shown, "pellucid_time_per_output_token_seconds_sum") == 0.5
    assert value(shown, "pellucid_time_to_first_token_prediction_ratio_sum") == 1.25
    assert value(shown, "pellucid_choices_finished_total", reason="stop") == 1


def test_a_ledger_that_closes():
    shown = metrics()
    shown.ended(stored("r", LEDGER, tenant="acme"))
    assert value(shown, "pellucid_e2e_seconds_sum") == 6.0
    assert value(shown, "pellucid_queue_seconds_sum") == 2.0
    causes = {
        dict(labels)["cause"]: v for (n, labels), v in samples(shown).items() if n == "pellucid_cause_seconds_total"
    }
    assert sum(causes.values()) == 6.0, "they sum to the end-to-end time"
    assert causes["queue.memory"] == 1.5
    tokens = by_label(shown, "pellucid_tokens_total", "source")
    assert tokens == {"computed": 52, "cached_device": 32, "cached_host": 16, "recomputed": 7, "output": 20}


def test_a_request_that_left_before_its_first_token_computed_nobody_knows_how_much():
    shown = metrics()
    shown.choice(1.0).end("disconnect")
    shown.ended(stored("r", report({"queue.capacity": 1.0}, tokens=TokenCounts(100, 0, 0, 0, 0)), reason="disconnect"))
    assert set(by_label(shown, "pellucid_tokens_total", "source")) == {"output", "recomputed"}
    assert value(shown, "pellucid_time_to_first_token_seconds_count") == 0
    assert value(shown, "pellucid_e2e_seconds_count") == 1


def test_a_refused_choice_is_a_rejection_and_no_latency():
    shown = metrics()
    times = shown.choice(1.0)
    times.rejected(RequestRejected("tenant_waiting", "no", retry_after=1.0, limit="tenant"))
    times.end("rejected")
    assert value(shown, "pellucid_rejections_total", limit="tenant", code="tenant_waiting") == 1
    assert value(shown, "pellucid_time_to_first_token_seconds_count") == 0
    shown.count_rejection(RequestRejected("context_length_exceeded", "no"))
    assert value(shown, "pellucid_rejections_total", limit="request", code="context_length_exceeded") == 1


def test_no_number_of_tenants_makes_more_series_than_the_bound():
    shown = metrics()
    for index in range(3 * MOST_TENANTS):
        shown.ended(stored("r", LEDGER, tenant=f"t{index}"))
    shown.ended(stored("r", LEDGER, tenant="t0"))
    tenants = {dict(labels)["tenant"] for name, labels in samples(shown) if name == "pellucid_tokens_total"}
    assert len(tenants) == MOST_TENANTS + 1
    assert value(shown, "pellucid_tokens_total", tenant="other", source="output") == 20 * 2 * MOST_TENANTS
    assert value(shown, "pellucid_tokens_total", tenant="t0", source="output") == 40


def test_steps():
    shown = metrics()
    shown.steps([summary(0), summary(1, seconds=0.02, predicted_seconds=0.01, num_prompt_tokens=2)])
    assert value(shown, "pellucid_step_seconds_sum") == pytest.approx(0.03)
    assert value(shown, "pellucid_step_predicted_seconds_sum") == pytest.approx(0.018)
    assert value(shown, "pellucid_step_prediction_ratio_sum") == pytest.approx(1.25 + 2.0)
    assert value(shown, "pellucid_step_seconds_bucket", le="0.012") == 1
    assert value(shown, "pellucid_step_seconds_bucket", le="+Inf") == 2
    parts = {
        part: value(shown, "pellucid_step_part_seconds_total", part=part)
        for part in ("gap", "schedule", "commit", "prepare", "forward")
    }
    assert parts == pytest.approx(
        {"gap": 0.002, "schedule": 0.001, "commit": 0.001, "prepare": 0.002, "forward": 0.016}
    )


def test_the_engines_numbers():
    stats = EngineStats(
        num_running=2,
        num_waiting=5,
        num_swapped=1,
        waiting_by_reason=(("queue.memory", 3), ("queue.fairness", 1)),
        blocks_free=1,
        blocks_active=2,
        blocks_cached=3,
        blocks_in_flight=4,
        host_blocks_cached=9,
        num_preemptions=3,
        num_preempted_swap=1,
        num_preempted_recompute=2,
        ledger_residue_seconds=0.5,
    )
    shown = metrics(stats, vllm_model="m")
    waiting = by_label(shown, "pellucid_waiting", "reason")
    assert waiting == {"queue.memory": 3, "queue.fairness": 1, "unspecified": 1}
    assert value(shown, "pellucid_blocks", tier="host", state="cached") == 9
    assert value(shown, "pellucid_preemptions_total", fate="swap") == 1
    assert value(shown, "pellucid_ledger_residue_seconds_total") == 0.5
    assert value(shown, "vllm:num_requests_waiting", model_name="m", engine="0") == 5
    assert value(shown, "vllm:kv_cache_usage_perc", model_name="m", engine="0") == 0.6
    assert value(shown, "vllm:num_preemptions_total", model_name="m", engine="0") == 3


def test_the_catalogue_is_what_is_shown():
    families = {family.name: family for family in text_string_to_metric_families(full().render().decode())}
    listed = {metric.name.removesuffix("_total"): metric for metric in catalogue.ALL}
    assert list(families) == list(listed), "in the order of the catalogue, and nothing else"
    for name, metric in listed.items():
        assert families[name].type == metric.kind
        assert families[name].documentation == metric.help
        labels = set(families[name].samples[0].labels) - {"le"}
        assert labels == set(metric.labels), name


def test_what_needs_a_profile_is_absent_without_one():
    needy = {metric.name for metric in catalogue.ALL if "profile" in metric.needs}
    assert len(needy) == 4
    with_work = {name for name, _ in samples(metrics(machine=MachineUse(WORK), clock=lambda: 0.0))}
    assert not needy & with_work
    assert "pellucid_flops_total" in with_work
    assert "pellucid_flops_total" not in {name for name, _ in samples(metrics())}


def test_vllms_names_are_shown_beside_ours_on_demand():
    ours = {name for name, _ in samples(full())}
    both = samples(full(vllm_model="m"))
    theirs = {name for name, _ in both} - ours
    suffixes = ("_bucket", "_count", "_sum")
    bare = {next((n.removesuffix(s) for s in suffixes if n.endswith(s)), n) for n in theirs}
    assert bare == set(vllm_names.NAMES)
    for name, labels in both:
        if name.startswith("vllm:"):
            assert {("model_name", "m"), ("engine", "0")} <= labels, name
    reasons = {dict(labels)["finished_reason"]: v for (n, labels), v in both.items() if "request_success" in n}
    assert reasons == {"stop": 1, "length": 0, "abort": 0, "error": 0}


def test_promtool_accepts_it():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    checked = subprocess.run([promtool, "check", "metrics"], input=full().render(), capture_output=True, timeout=60)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")
