"""The step-time model: finds coefficients that it was not told, forgets, is not thrown off by single steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.core.cost import DEFAULT_PRIOR, CostPrior, FittedCost, StepFeatures, features_of
from pellucid.core.plan import Chunk, StepPlan, Transfer


def machine(features: StepFeatures) -> float:
    """A machine with a knee at 64 tokens: bandwidth below, compute above."""
    return (
        max(4e-3, 6e-5 * features.num_tokens)
        + 2e-8 * features.num_attended
        + 3e-5 * features.num_sequences
        + 1e-10 * features.copied_bytes
    )


def random_step(rng: random.Random) -> StepFeatures:
    decodes, chunk = rng.randint(0, 32), rng.choice([0, 0, 16, 64, 200, 500])
    tokens = decodes + chunk or 1
    context = sum(rng.randint(1, 2000) for _ in range(decodes)) + (rng.randint(0, 6000) if chunk else 0)
    attended = context + chunk * rng.randint(1, 6000)
    return StepFeatures(tokens, attended, context, decodes + bool(chunk), decodes, rng.choice([0, 0, 0, 10**7]))


def mean_error(model: FittedCost, rng: random.Random, steps: int = 300) -> float:
    total = 0.0
    for _ in range(steps):
        features = random_step(rng)
        total += abs(model.predict(features).seconds / machine(features) - 1)
    return total / steps


def test_it_learns_a_machine_that_its_prior_does_not_know() -> None:
    rng = random.Random(0)
    model = FittedCost()
    before = mean_error(model, random.Random(1))
    for _ in range(3000):
        features = random_step(rng)
        model.observe(features, machine(features) * rng.gauss(1, 0.05))
    assert mean_error(model, random.Random(1)) < 0.08 < before


def test_it_follows_a_machine_that_became_slower() -> None:
    rng = random.Random(0)
    model = FittedCost()
    for slowdown in (1.0, 2.0):
        for _ in range(3000):
            features = random_step(rng)
            model.observe(features, slowdown * machine(features) * rng.gauss(1, 0.05))
    errors = [model.predict(f).seconds / (2 * machine(f)) - 1 for f in (random_step(rng) for _ in range(200))]
    assert abs(sum(errors) / len(errors)) < 0.1


def test_one_stolen_step_changes_little() -> None:
    rng = random.Random(0)
    model = FittedCost()
    for _ in range(1000):
        features = random_step(rng)
        model.observe(features, machine(features) * rng.gauss(1, 0.03))
    features = StepFeatures(8, 8000, 8000, 8, 8)
    before = model.predict(features).seconds
    model.observe(features, 100 * before)
    assert model.predict(features).seconds < 1.3 * before


def test_spread_is_the_noise() -> None:
    rng = random.Random(3)
    model = FittedCost()
    for _ in range(4000):
        features = random_step(rng)
        model.observe(features, machine(features) * rng.gauss(1, 0.1))
    predicted = model.predict(StepFeatures(32, 32000, 32000, 32, 32))
    assert predicted.spread / predicted.seconds == pytest.approx(0.1, rel=0.5)


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 10**8), st.floats(0, 100)), max_size=60))
def test_predictions_stay_finite_and_positive(steps: list[tuple[int, int, float]]) -> None:
    model = FittedCost()
    for tokens, attended, seconds in steps:
        model.observe(StepFeatures(tokens, attended, attended, 1, 1), seconds)
    for tokens in (1, 2, 3, 17, 4096, 10**6):
        predicted = model.predict(StepFeatures(tokens, 10, 10, 1, 1))
        assert 0 <= predicted.seconds < 1e12
        assert predicted.spread >= 0


def test_the_table_is_read_between_and_behind_its_knots() -> None:
    model = FittedCost(CostPrior((1.0, 2.0, 6.0), 0, 0, 0, 0, 0))
    seconds = [model.predict(StepFeatures(n, 0, 0, 0, 0)).seconds for n in (0, 1, 2, 3, 4, 8)]
    assert seconds == [0.0, 1.0, 2.0, 4.0, 6.0, 12.0]


def test_features_of_a_mixed_plan() -> None:
    plan = StepPlan(
        0, (Chunk(0, 10, 11, True), Chunk(1, 4, 8, False)), transfers=(Transfer(1, "out", ((1, 2), (3, 4))),)
    )
    assert features_of(plan, bytes_per_block=100) == StepFeatures(5, 11 + 5 + 6 + 7 + 8, 19, 2, 1, 200)


def test_a_prior_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing below 0"):
        FittedCost(DEFAULT_PRIOR._replace(attended=-1.0))


def test_the_pace_follows_a_neighbour_within_three_steps_and_lets_go_again() -> None:
    """Whatever the steps are made of: what was learnt of each kind of step stays, all are slower for a while."""
    rng = random.Random(7)
    model = FittedCost()
    for _ in range(600):
        features = random_step(rng)
        model.observe(features, machine(features))
    calm = mean_error(model, rng)
    for slowness, limit in ((2.0, 0.2), (1.0, 0.25)):
        for _ in range(4):
            features = random_step(rng)
            model.observe(features, slowness * machine(features))
        features = random_step(rng)
        assert abs(model.predict(features).seconds / (slowness * machine(features)) - 1) < limit + calm
    assert mean_error(model, rng) < calm + 0.15
