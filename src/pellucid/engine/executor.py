"""The seam between deciding and doing: a Protocol of two methods, with real, modelled and recorded implementations.

`launch` starts a step, `collect` waits for it. A CPU executor may do all the work in `collect`; a GPU one may have
several steps launched. Steps are collected in the order of their launch.
"""

from __future__ import annotations

from typing import Any, Protocol

from pellucid.core.plan import StepPlan, StepResult


class Executor(Protocol):
    """Carries out plans. Mirrors sequences and block tables from the plans' deltas (see `core/plan.py`)."""

    def launch(self, plan: StepPlan) -> Any:
        """Begin the step and return a ticket for `collect`."""
        ...

    def collect(self, ticket: Any) -> StepResult:
        """Wait for the step of this ticket and return its result."""
        ...
