"""Users to machines: how many replicas serve so many people at an objective, and what a million tokens cost.

One replica at batch B shares its time between decode steps of t(B) seconds and the prompts of the requests that pass
through. A request takes p seconds of prefill and N_out steps, of which a batch carries B at once, so

    requests per second   lambda(B) = 1 / (p + N_out * t(B) / B)
    gap between tokens    t(B) + B * p / N_out               (prompts computed in between, spread evenly)
    residence             B / lambda(B)                      (Little)
    users per replica     B + lambda(B) * think time         (those being served, and those who think)

The largest B that memory and the objectives allow decides. One spare replica is added (N + 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pellucid.core.errors import ConfigError
from pellucid.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class Demand:
    """Who comes: `users` people, each waiting `think_seconds` between an answer and the next question."""

    users: int
    think_seconds: float = 0.0
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        if self.users < 1:
            raise ConfigError(f"--users is {self.users}; it must be at least 1")
        if self.think_seconds < 0:
            raise ConfigError(f"--think-time is {self.think_seconds}; it cannot be negative")
        if self.price_per_hour is not None and not 0 < self.price_per_hour < math.inf:
            raise ConfigError(f"--price-per-hour is {self.price_per_hour}; it must be more than 0")


@dataclass(frozen=True, slots=True)
class Fleet:
    """What it takes. A replica is `devices_per_replica` devices; `batch` is what one runs at full load."""

    demand: Demand
    batch: int
    devices_per_replica: int
    num_input: int
    num_output: int
    prefill_seconds: float
    step_seconds: float

    @property
    def requests_per_second_per_replica(self) -> float:
        """lambda(B)."""
        return 1.0 / (self.prefill_seconds + self.num_output * self.step_seconds / self.batch)

    @property
    def gap_seconds(self) -> float:
        """Mean gap between two tokens of one request at full load."""
        return self.step_seconds + self.batch * self.prefill_seconds / self.num_output

    @property
    def users_per_replica(self) -> float:
        """B + lambda(B) * think time."""
        return self.batch + self.requests_per_second_per_replica * self.demand.think_seconds

    @property
    def replicas_needed(self) -> int:
        """Replicas that the users fill."""
        return math.ceil(self.demand.users / self.users_per_replica)

    @property
    def replicas(self) -> int:
        """With one spare, so that one can fail or be updated."""
        return self.replicas_needed + 1

    @property
    def requests_per_second(self) -> float:
        """What all users ask for together."""
        return self.demand.users / self.users_per_replica * self.requests_per_second_per_replica

    @property
    def concurrency(self) -> float:
        """Requests in service at once, over all replicas."""
        return self.demand.users / self.users_per_replica * self.batch

    @property
    def dollars_per_hour(self) -> float | None:
        """The whole fleet, spare included."""
        price = self.demand.price_per_hour
        return None if price is None else price * self.devices_per_replica * self.replicas

    @property
    def dollars_per_million_input(self) -> float | None:
        """Device time that prompts take, at full load and without the spare."""
        return self._per_million(self.prefill_seconds / self.num_input)

    @property
    def dollars_per_million_output(self) -> float | None:
        """Device time that decode steps take, at full load and without the spare."""
        return self._per_million(self.step_seconds / self.batch)

    @property
    def dollars_per_million_output_all_in(self) -> float | None:
        """The whole bill of the fleet, spare and idle time included, over the output tokens it serves."""
        total = self.dollars_per_hour
        return None if total is None else total / 3600 / (self.requests_per_second * self.num_output) * 1e6

    def _per_million(self, seconds_per_token: float) -> float | None:
        price = self.demand.price_per_hour
        return None if price is None else price * self.devices_per_replica / 3600 * seconds_per_token * 1e6


def size_fleet(plan: Plan, demand: Demand) -> Fleet:
    """The fleet for `demand` at the plan's objectives. Raises ConfigError where no fleet can keep them."""
    scenario, prefill = plan.scenario, plan.prefill_seconds
    largest = plan.max_sequences
    if prefill is None or largest is None:
        raise ConfigError("--users needs a device with known rate, bandwidth and memory, and a model with known layers")
    if largest == 0:
        raise ConfigError(
            f"not one sequence of {scenario.full_context} tokens fits on {plan.device.name}; use --tp, a "
            f"smaller --dtype, or a larger device"
        )
    if plan.ttft_met is False:
        raise ConfigError(
            f"a prompt alone takes {prefill:.3g} s on an idle {plan.device.name}, over the objective of "
            f"{scenario.slo_ttft_seconds:.3g} s; use --tp, a faster device, or a shorter --prompt"
        )
    fleets = (_at(plan, demand, prefill, batch) for batch in _candidates(largest))
    slo = scenario.slo_itl_seconds
    kept = [f for f in fleets if slo is None or f.gap_seconds <= slo]
    if not kept:
        raise ConfigError(
            f"no batch keeps {slo:.3g} s between tokens with prompts of {scenario.prompt} tokens on {plan.device.name}"
        )
    return max(kept, key=lambda f: f.batch)


def _at(plan: Plan, demand: Demand, prefill_seconds: float, batch: int) -> Fleet:
    scenario = plan.scenario
    return Fleet(
        demand=demand,
        batch=batch,
        devices_per_replica=scenario.tp,
        num_input=scenario.prompt,
        num_output=scenario.output,
        prefill_seconds=prefill_seconds,
        step_seconds=plan.decode_at(batch).cost.seconds,
    )


def _candidates(largest: int) -> list[int]:
    """Batches to try: every one up to 64, then in steps of about 2 %, then the largest."""
    found, batch = [], 1
    while batch < largest:
        found.append(batch)
        batch += max(1, batch // 50)
    return [*found, largest]
