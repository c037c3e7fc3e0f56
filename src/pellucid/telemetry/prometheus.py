"""What `/metrics` shows, in Prometheus' text format.

Four sources, each number from one of them: the engine's snapshot, read when asked for (gauges and what only the engine
counts); the steps, which the engine sends in batches; the times of replies, observed as they happen, which only the
server can see; and the ledger of each request that ended. What each metric means stands in `catalogue.py`.

Invariants: one event loop touches a `ServerMetrics`; tenants beyond the first `MOST_TENANTS` seen share the label
`other`, so that no client can grow the number of series.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from pellucid.core.errors import RequestRejected
from pellucid.core.step_record import StepSummary
from pellucid.telemetry import catalogue, vllm_names
from pellucid.telemetry.choice_times import ChoiceTimes, Listeners
from pellucid.telemetry.families import Counters, Histogram, counter, gauge
from pellucid.telemetry.machine_use import RESOURCES, MachineUse
from pellucid.telemetry.recent import RecentTimes
from pellucid.telemetry.store import StoredRequest

CONTENT_TYPE = CONTENT_TYPE_LATEST
MOST_TENANTS = 50
OTHER_TENANTS = "other"
NO_TENANT = "default"

Snapshot = Mapping[str, Any]
_STATES = ("free", "active", "cached", "in_flight")


class ServerMetrics:
    """The numbers of one server.

    `snapshot` returns the engine's, by the names of `EngineStats`. `machine` counts FLOPs and bytes; without it those
    metrics are absent. `info` are the labels of `pellucid_info`. With `vllm_model` the same quantities are also shown
    under vLLM's names, for that model.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        *,
        machine: MachineUse | None = None,
        info: Mapping[str, str] | None = None,
        vllm_model: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._snapshot, self._machine, self._clock = snapshot, machine, clock
        self._info = {"version": "", "model": ""} | dict(info or {})
        self._vllm_model = vllm_model
        self._tenants: set[str] = set()
        self.http = Counters(catalogue.HTTP_REQUESTS)
        self.choices = Counters(catalogue.CHOICES)
        self.causes = Counters(catalogue.CAUSES)
        self.tokens = Counters(catalogue.TOKENS)
        self.rejections = Counters(catalogue.REJECTIONS)
        self.step_parts = Counters(catalogue.STEP_PARTS)
        self.step_stolen = Counters(catalogue.STEP_STOLEN)
        self.ttft = Histogram(catalogue.TTFT)
        self.itl = Histogram(catalogue.ITL)
        self.tpot = Histogram(catalogue.TPOT)
        self.e2e = Histogram(catalogue.E2E)
        self.queue = Histogram(catalogue.QUEUE)
        self.ttft_prediction = Histogram(catalogue.TTFT_PREDICTION)
        self.step_seconds = Histogram(catalogue.STEP_SECONDS)
        self.step_predicted = Histogram(catalogue.STEP_PREDICTED)
        self.step_prediction = Histogram(catalogue.STEP_PREDICTION)
        self.step_tokens = Histogram(catalogue.STEP_TOKENS)
        self.recent = RecentTimes()
        self._listeners = Listeners(
            self.ttft, self.itl, self.tpot, self.ttft_prediction, self.choices, self.count_rejection, self.recent
        )
        self._registry = CollectorRegistry()
        self._registry.register(_Families(self._families))

    # -- what happens --------------------------------------------------------------------------------------------

    def count_reply(self, route: str, status: int) -> None:
        """One HTTP reply. `route` is the path as declared, never as asked, so that it has few values."""
        self.http.add(1, route, str(status))

    def count_rejection(self, error: RequestRejected) -> None:
        """One request that was refused, by the server or by the engine."""
        self.rejections.add(1, error.limit or "request", error.code)

    def choice(self, arrival: float) -> ChoiceTimes:
        """A choice of a request that arrived at `arrival` (seconds, any clock) begins."""
        return ChoiceTimes(arrival, self._listeners)

    def ended(self, record: StoredRequest) -> None:
        """A request ended, and its ledger is closed."""
        tenant, ledger = self._tenant(record.tenant), record.ledger
        self.e2e.observe(ledger.e2e_seconds)
        self.queue.observe(sum(seconds for cause, seconds in ledger.causes if cause.startswith("queue.")))
        for cause, seconds in ledger.causes:
            self.causes.add(seconds, tenant, cause)
        tokens = ledger.tokens
        if ledger.first_token_seconds is not None:  # else nobody knows how far its prompt was computed
            self.tokens.add(tokens.prompt - tokens.cached, tenant, "computed")
            self.tokens.add(tokens.cached - tokens.cached_host, tenant, "cached_device")
            self.tokens.add(tokens.cached_host, tenant, "cached_host")
        self.tokens.add(tokens.recomputed, tenant, "recomputed")
        self.tokens.add(tokens.output, tenant, "output")

    def steps(self, summaries: Sequence[StepSummary]) -> None:
        """Steps that the engine has done."""
        for step in summaries:
            self.step_seconds.observe(step.seconds)
            self.step_tokens.observe(step.features.num_tokens)
            self.step_predicted.observe(step.predicted_seconds)
            if step.predicted_seconds > 0.0:
                self.step_prediction.observe(step.seconds / step.predicted_seconds)
            self.step_stolen.add(step.stolen_seconds)
            self.step_parts.add(step.gap_seconds, "gap")
            self.step_parts.add(step.schedule_seconds, "schedule")
            self.step_parts.add(step.commit_seconds, "commit")
            for phase, seconds in step.phases:
                self.step_parts.add(seconds, phase)
            if self._machine is not None:
                self._machine.add(step)

    def _tenant(self, name: str) -> str:
        name = name or NO_TENANT
        if name not in self._tenants:
            if len(self._tenants) >= MOST_TENANTS:
                return OTHER_TENANTS
            self._tenants.add(name)
        return name

    # -- what is shown -------------------------------------------------------------------------------------------

    def render(self) -> bytes:
        """The body of `/metrics`."""
        return generate_latest(self._registry)

    def _families(self) -> Iterable[Family]:
        snapshot = self._snapshot()
        yield gauge(catalogue.INFO, [((self._info["version"], self._info["model"]), 1.0)])
        for kept in (self.http, self.choices, self.ttft, self.itl, self.tpot, self.e2e, self.queue, self.causes):
            yield kept.family()
        for kept in (self.tokens, self.ttft_prediction, self.rejections):
            yield kept.family()
        yield from _engine_families(snapshot)
        for kept in (self.step_seconds, self.step_predicted, self.step_prediction, self.step_tokens):
            yield kept.family()
        for counted in (self.step_parts, self.step_stolen):
            yield counted.family()
        if self._machine is not None:
            yield from _machine_families(self._machine, self._clock())
        if self._vllm_model is not None:
            yield from vllm_names.families(self, snapshot, self._vllm_model)


class _Families(Collector):
    """Asks for the families when they are scraped."""

    def __init__(self, families: Callable[[], Iterable[Family]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families()

    def describe(self) -> Iterable[Family]:
        """Nothing: registering must not ask an engine that may still be starting."""
        return ()


def _engine_families(snapshot: Snapshot) -> Iterable[Family]:
    yield gauge(catalogue.RUNNING, [((), snapshot["num_running"])])
    reasons = dict(snapshot["waiting_by_reason"])
    reasons["unspecified"] = max(0, snapshot["num_waiting"] - sum(reasons.values()))  # reasons are a moment old
    yield gauge(catalogue.WAITING, (((reason,), count) for reason, count in reasons.items()))
    yield gauge(catalogue.SWAPPED, [((), snapshot["num_swapped"])])
    blocks = [(("device", state), snapshot[f"blocks_{state}"]) for state in _STATES]
    blocks += [(("host", state), snapshot[f"host_blocks_{state}"]) for state in _STATES]
    yield gauge(catalogue.BLOCKS, blocks)
    fates = [((fate,), snapshot[f"num_preempted_{fate}"]) for fate in ("swap", "recompute")]
    yield counter(catalogue.PREEMPTIONS, fates)
    yield counter(catalogue.PROMPT_TOKENS, [((), snapshot["prompt_tokens"])])
    yield counter(catalogue.CACHED_TOKENS, [((), snapshot["cached_tokens"])])
    yield counter(catalogue.GENERATED_TOKENS, [((), snapshot["generated_tokens"])])
    yield counter(catalogue.FINISHED, [((), snapshot["num_finished"])])
    yield counter(catalogue.LEDGER_RESIDUE, [((), snapshot["ledger_residue_seconds"])])


def _machine_families(machine: MachineUse, now: float) -> Iterable[Family]:
    yield counter(catalogue.FLOPS, [((), machine.flops)])
    yield counter(catalogue.BYTES, [((), machine.bytes)])
    flops, num_bytes = machine.rates(now)
    yield gauge(catalogue.FLOPS_RATE, [((), flops)])
    yield gauge(catalogue.BYTES_RATE, [((), num_bytes)])
    if machine.limits is None:
        return
    yield gauge(catalogue.FLOPS_LIMIT, [((), machine.limits.flops)])
    yield gauge(catalogue.BYTES_LIMIT, [((), machine.limits.bandwidth)])
    yield counter(catalogue.ROOFLINE, (((name,), seconds) for name, seconds in machine.seconds.items()))
    binding = machine.binding(now)
    yield gauge(catalogue.BINDING, (((name,), float(name == binding)) for name in RESOURCES))
