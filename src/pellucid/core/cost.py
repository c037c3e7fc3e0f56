"""What a step costs, as far as the core needs to know: features of a step in, seconds out.

`FittedCost` is the model that serves: it starts from a prior (the planner's roofline, injected as numbers) and is
fitted to this machine's own steps as they are committed. Step time is no straight line in tokens, it has a knee where
compute overtakes bandwidth and others where kernels change path; so new tokens go through a table of buckets, and the
rest (attended tokens, context read, sequences, samples, copied bytes) is linear:

    seconds = pace * (table(num_tokens) + sum of coefficient * feature)

`pace` is how much slower than its coefficients the machine is at this moment, whatever the step is made of. The state
is a function of prior and committed steps alone, so a replayed run predicts what the recorded one did.
"""

from __future__ import annotations

from math import sqrt
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


class CostPrior(NamedTuple):
    """What is believed of step time before any step. `table`: seconds of a step of 1, 2, 4, 8 ... new tokens without
    context; behind its last entry seconds grow in proportion. The others are seconds for each unit of the feature of
    that name (see `StepFeatures`)."""

    table: tuple[float, ...]
    attended: float
    context: float
    sequence: float
    sample: float
    copied_byte: float


DEFAULT_PRIOR = CostPrior(
    table=tuple(1e-3 + 2e-4 * 2**i for i in range(12)),
    attended=1e-8,
    context=1e-8,
    sequence=1e-5,
    sample=1e-5,
    copied_byte=2e-10,
)
"""For engines that were told nothing: a slow machine, so that the first steps are too small and not too large."""

_SPREAD_MEMORY = 0.05
_OUTLIER = 3.0
_START_SPREAD = 0.3
_FORGETTING = 0.96
_MODEL_ERROR = 0.05
_LEAST_DOUBT = 0.1
_PACE_GAIN = 0.35
_PACE_JUMP = 1.6
_PACE_RETURN = 0.02


class FittedCost:
    """A step-time model fitted online, one scalar Kalman update for each coefficient that a step touches.

    Coefficients are taken as independent (the covariance is kept diagonal): an update costs some ten multiplications
    instead of a matrix product, and a prior keeps apart what single steps cannot. Each coefficient's variance starts at
    its own square, to which it is limited; dividing it by 0.96 at each use is the forgetting, which keeps about the
    last 25 steps that touched it in force. It is never sure of anything: coefficients keep a doubt of 10 %, and a step
    a model error of 5 %, or a thousand quiet decodes would settle what a token of context costs in a long prompt. A
    residual counts for at most three standard deviations, so that one step that the host stole moves the table little.
    The pace follows a neighbour on the machine, or its clock, within three steps: a third of the way to what the last
    step says, which counts for at most 1.6 times the pace before. Coefficients learn what the pace leaves; it returns
    to 1 by a fiftieth a step, so that what lasts becomes theirs. Coefficients stay >= 0, and twice the tokens take at
    least as long and at most twice as long: so what is learnt of small steps reaches the knots of large ones that were
    not run for a while.
    """

    def __init__(self, prior: CostPrior = DEFAULT_PRIOR) -> None:
        if len(prior.table) < 2 or min(*prior.table, *prior[1:]) < 0:
            raise ValueError(f"a prior needs a table of at least 2 entries and nothing below 0; got {prior}")
        self._num_knots = len(prior.table)
        self._theta = [*prior.table, *prior[1:]]
        self._variance = [value * value for value in self._theta]
        self._relative_variance = _START_SPREAD**2
        self._pace = 1.0
        self.num_observed = 0

    def predict(self, features: StepFeatures) -> Prediction:
        seconds = self._pace * self._at_pace_1(features)
        return Prediction(seconds, seconds * sqrt(self._relative_variance))

    def _at_pace_1(self, features: StepFeatures) -> float:
        index, low, high = self._bucket(features.num_tokens)
        theta, n = self._theta, self._num_knots
        return (
            low * theta[index]
            + high * theta[index + 1]
            + features.num_attended * theta[n]
            + features.num_context * theta[n + 1]
            + features.num_sequences * theta[n + 2]
            + features.num_samples * theta[n + 3]
            + features.copied_bytes * theta[n + 4]
        )

    def observe(self, features: StepFeatures, seconds: float) -> None:
        """Learn that a step of these features took `seconds`."""
        base = self._at_pace_1(features)
        error = seconds / max(self._pace * base, 1e-9) - 1.0
        self._follow_pace(seconds / max(base, 1e-9))
        self._learn(features, base, seconds / self._pace)
        self._relative_variance += _SPREAD_MEMORY * (min(error * error, 1.0) - self._relative_variance)
        self.num_observed += 1

    def _follow_pace(self, seen: float) -> None:
        seen = min(max(seen, self._pace / _PACE_JUMP), self._pace * _PACE_JUMP)
        self._pace += _PACE_GAIN * (seen - self._pace)
        self._pace += _PACE_RETURN * (1.0 - self._pace)

    def _learn(self, features: StepFeatures, predicted: float, seconds: float) -> None:
        """Move the coefficients that the step touched; `predicted` and `seconds` are at pace 1."""
        relative = max(self._relative_variance, _MODEL_ERROR**2)
        noise = relative * max(predicted, seconds * 0.1) ** 2 + 1e-12
        inputs = self._inputs(features)
        theta, variance = self._theta, self._variance
        total = noise + sum(x * x * variance[i] for i, x in inputs)
        limit = _OUTLIER * sqrt(total)
        surprise = min(max(seconds - predicted, -limit), limit)
        for i, x in inputs:
            gain = variance[i] * x / total
            theta[i] = max(0.0, theta[i] + gain * surprise)
            square = theta[i] * theta[i]
            left = variance[i] * (1.0 - gain * x) / _FORGETTING
            variance[i] = min(max(left, _LEAST_DOUBT**2 * square), square)
        self._straighten(inputs[0][0])

    def _straighten(self, index: int) -> None:
        """Bring the knots in line with knot `index`, outwards: each between its inner neighbour and twice it."""
        theta = self._theta
        for i in range(index + 1, self._num_knots):
            theta[i] = min(max(theta[i], theta[i - 1]), 2.0 * theta[i - 1])
        for i in range(index - 1, -1, -1):
            theta[i] = min(max(theta[i], 0.5 * theta[i + 1]), theta[i + 1])

    def _bucket(self, num_tokens: int) -> tuple[int, float, float]:
        """The lower of the two knots around `num_tokens` and the weights of both; behind the last knot in proportion
        to it, and 0 for a step without tokens."""
        if num_tokens <= 1:
            return 0, float(num_tokens), 0.0
        index = min(num_tokens.bit_length() - 1, self._num_knots - 1)
        if index == self._num_knots - 1:
            return index - 1, 0.0, num_tokens / (1 << index)
        high = num_tokens / (1 << index) - 1.0
        return index, 1.0 - high, high

    def _inputs(self, features: StepFeatures) -> list[tuple[int, float]]:
        index, low, high = self._bucket(features.num_tokens)
        inputs = [(index, low), (index + 1, high)]
        inputs += ((self._num_knots + i, float(value)) for i, value in enumerate(features[1:]))
        return [(i, x) for i, x in inputs if x]


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
