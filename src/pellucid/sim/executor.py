"""An executor without tensors: a cost model says how long a step takes, and a clock that nobody waits for passes it.

Scheduler and engine cannot tell it from a real one; so what is simulated decides as what serves, only faster. Tokens
mean nothing here: every sample is `TOKEN`, and requests end by their length.
"""

from __future__ import annotations

from pellucid.core.cost import CostModel, features_of
from pellucid.core.plan import StepPlan, StepResult

TOKEN = 1


class VirtualClock:
    """Seconds that pass when somebody says so."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self.now += seconds


class ModelledExecutor:
    """Implements `engine/executor.py`'s Protocol. `overhead` is spent beside each step, `bytes_per_block` prices the
    blocks that a step copies between tiers."""

    def __init__(
        self, cost: CostModel, clock: VirtualClock, *, bytes_per_block: int = 0, overhead: float = 0.0
    ) -> None:
        self._cost = cost
        self._clock = clock
        self._bytes_per_block = bytes_per_block
        self._overhead = overhead

    def launch(self, plan: StepPlan) -> StepPlan:
        """The plan is its own ticket."""
        return plan

    def collect(self, ticket: StepPlan) -> StepResult:
        """Let the step's predicted time pass."""
        seconds = self._cost.predict(features_of(ticket, self._bytes_per_block)).seconds
        self._clock.advance(seconds + self._overhead)
        tokens = tuple((TOKEN,) if chunk.samples else () for chunk in ticket.chunks)
        done = tuple(transfer.id for transfer in ticket.transfers)
        return StepResult(ticket.step_id, tokens, seconds, transfers_done=done)
