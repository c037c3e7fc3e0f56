"""What a step costs, as far as the core needs to know: features of a step in, seconds out.

A roofline prior, a table fitted on this machine and a recorded profile all satisfy `CostModel`; `build.py` injects one.
A model here is not a straight line in tokens: step time has a knee where compute overtakes bandwidth and another where
kernels change path.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pellucid.core.plan import StepPlan


class StepFeatures(NamedTuple):
    """What step time depends on.

    `num_tokens`: new tokens computed. `num_attended`: for each new token the tokens it attends to, itself included,
    summed (the causal half of a chunk is already taken off). `num_context`: KV entries read at least once, i.e. the sum
    of chunk ends. `num_sequences`: chunks in the step. `num_samples`: rows that need logits. `copied_bytes`: moved
    between tiers.
    """

    num_tokens: int
    num_attended: int
    num_context: int
    num_sequences: int
    num_samples: int
    copied_bytes: int = 0


class Prediction(NamedTuple):
    """Predicted seconds and their spread (one standard deviation, in seconds; 0 where the model states none)."""

    seconds: float
    spread: float


class CostModel(Protocol):
    """Predicts the wall time of a step from its features."""

    def predict(self, features: StepFeatures) -> Prediction: ...


def features_of(plan: StepPlan, bytes_per_block: int = 0) -> StepFeatures:
    """The features of a plan. `bytes_per_block` prices its transfers; 0 leaves them out.

    A chunk [s, e) attends to sum(s+1 .. e) = (e - s) * (s + e + 1) / 2 tokens.
    """
    num_tokens = num_attended = num_context = num_samples = 0
    for _, start, end, samples in plan.chunks:
        num_tokens += end - start
        num_attended += (end - start) * (start + end + 1) // 2
        num_context += end
        num_samples += samples
    num_moved = sum(len(transfer.pairs) for transfer in plan.transfers) + len(plan.copies)
    return StepFeatures(
        num_tokens, num_attended, num_context, len(plan.chunks), num_samples, num_moved * bytes_per_block
    )
