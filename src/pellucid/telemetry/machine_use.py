"""How much of the machine the steps used: FLOPs and bytes by arithmetic, beside the rates measured on this machine.

A step is described by its features; what a token, an attended pair or a sample costs comes in as numbers (`StepWork`),
made from the model's shape by whoever builds the server. Beside measured limits each step's time splits in two: what
the roofline says it had to take, for compute or for memory, whichever is longer, and the rest.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pellucid.core.cost import StepFeatures
from pellucid.core.step_record import StepSummary

WINDOW_SECONDS = 10.0
LAG_SECONDS = 1.0  # how late a step may be heard of; the window ends that long ago
Resource = Literal["compute", "memory", "other", "idle"]
RESOURCES: tuple[Resource, ...] = ("compute", "memory", "other", "idle")


@dataclass(frozen=True, slots=True)
class StepWork:
    """FLOPs and bytes of a step, linear in its features. `bytes_per_sampling_step` is the table behind the logits, read
    once by a step that samples at all."""

    flops_per_token: float
    flops_per_attended: float
    flops_per_sample: float
    bytes_per_step: float
    bytes_per_sampling_step: float
    bytes_per_token: float
    bytes_per_context: float
    bytes_per_sample: float

    def flops(self, features: StepFeatures) -> float:
        """Floating-point operations; a multiply-add is 2."""
        return (
            features.num_tokens * self.flops_per_token
            + features.num_attended * self.flops_per_attended
            + features.num_samples * self.flops_per_sample
        )

    def bytes(self, features: StepFeatures) -> float:
        """Bytes between memory and processor; a copied byte is read and written."""
        return (
            self.bytes_per_step
            + (self.bytes_per_sampling_step if features.num_samples else 0.0)
            + features.num_tokens * self.bytes_per_token
            + features.num_context * self.bytes_per_context
            + features.num_samples * self.bytes_per_sample
            + 2.0 * features.copied_bytes
        )


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Measured FLOP/s in the model's number `format`, and bytes/s of main memory; of which machine, and when."""

    flops: float
    bandwidth: float
    format: str = ""
    machine: str = ""
    measured_at: str = ""


class Used(NamedTuple):
    """What one step used. `ended` is on the engine's clock, `seconds` its wall time."""

    ended: float
    seconds: float
    flops: float
    bytes: float
    resource: Resource
    bound_seconds: float


class MachineUse:
    """Sums since the start, and a window over the last ten seconds."""

    def __init__(self, work: StepWork, limits: MachineLimits | None = None) -> None:
        self.work = work
        self.limits = limits
        self.flops = 0.0
        self.bytes = 0.0
        self.seconds: dict[Resource, float] = {"compute": 0.0, "memory": 0.0, "other": 0.0}
        self._window: deque[Used] = deque()

    def add(self, summary: StepSummary) -> None:
        """Count one step."""
        used = self._used(summary)
        self.flops += used.flops
        self.bytes += used.bytes
        self.seconds[used.resource] += used.bound_seconds
        self.seconds["other"] += used.seconds - used.bound_seconds
        self._window.append(used)
        self._forget(used.ended)

    def rates(self, now: float) -> tuple[float, float]:
        """FLOP/s and bytes/s of wall time over the window, idle time included."""
        window = self._recent(now)
        return sum(u.flops for u in window) / WINDOW_SECONDS, sum(u.bytes for u in window) / WINDOW_SECONDS

    def binding(self, now: float) -> Resource:
        """What most of the window's step time went to."""
        window = self._recent(now)
        if not window:
            return "idle"
        seconds: dict[Resource, float] = {"compute": 0.0, "memory": 0.0, "other": 0.0}
        for used in window:
            seconds[used.resource] += used.bound_seconds
            seconds["other"] += used.seconds - used.bound_seconds
        return max(seconds, key=lambda resource: seconds[resource])

    def _recent(self, now: float) -> list[Used]:
        """The steps that ended in the window."""
        self._forget(now)
        return [used for used in self._window if used.ended <= now - LAG_SECONDS]

    def _used(self, summary: StepSummary) -> Used:
        flops, num_bytes = self.work.flops(summary.features), self.work.bytes(summary.features)
        seconds = summary.wall_seconds
        ended = summary.started + seconds - summary.gap_seconds
        if self.limits is None:
            return Used(ended, seconds, flops, num_bytes, "other", 0.0)
        compute, memory = flops / self.limits.flops, num_bytes / self.limits.bandwidth
        bound = min(max(compute, memory), seconds)  # a limit measured too low must not make time
        return Used(ended, seconds, flops, num_bytes, "compute" if compute > memory else "memory", bound)

    def _forget(self, now: float) -> None:
        while self._window and self._window[0].ended <= now - LAG_SECONDS - WINDOW_SECONDS:
            self._window.popleft()
