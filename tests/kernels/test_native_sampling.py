"""Native sampling against plain PyTorch and against a definition in float64: the same tokens for the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.core.errors import ConfigError
from pellucid.kernels import cpu, sampling
from pellucid.kernels.cpu import CpuKernels
from pellucid.kernels.layout import SAMPLE_ROW
from pellucid.kernels.processors import native, usable_levels

pytestmark = pytest.mark.skipif(native() is None, reason="the native kernels are not built")
MODEST = settings(max_examples=150, deadline=None)
LEVELS = usable_levels()


@pytest.fixture(scope="module", params=LEVELS)
def ops(request):
    return CpuKernels(isa=request.param, threads=1)


def rows_of(count: int, uniforms=0.5, *, temperature=1.0, top_p=1.0, min_p=0.0, top_k=0) -> np.ndarray:
    rows = np.zeros(count, dtype=SAMPLE_ROW)
    for name, value in (
        ("temperature", temperature), ("top_p", top_p), ("min_p", min_p), ("top_k", top_k), ("uniform", uniforms),
    ):  # fmt: skip
        rows[name] = value
    return rows


def kept_weights(scores: torch.Tensor, row: np.void, slack: float = 0.0) -> np.ndarray:
    """Probabilities `[V]` in float64 after the filters, each made wider by `slack` (narrower where it is negative)."""
    exact = torch.softmax(scores.double() / float(row["temperature"]), dim=-1).numpy()
    largest_first = np.sort(exact)[::-1]
    floor = float(row["min_p"]) * largest_first[0]
    mass = 1.0
    if 0 < row["top_k"] < len(exact):
        kth = largest_first[row["top_k"] - 1]
        floor, mass = max(floor, kth), exact[exact >= kth].sum()
    if row["top_p"] < 1:
        before = np.concatenate(([0.0], largest_first.cumsum()[:-1]))
        inside = before < float(row["top_p"]) * mass * (1 + slack)
        floor = max(floor, largest_first[inside].min())
    return np.where(exact >= floor * (1 - slack), exact, 0.0)


def possible(scores: torch.Tensor, row: np.void) -> set[int]:
    """The tokens that rounding may choose: those within a hundred thousandth of the exact draw, by each set of tokens
    that a filter's edge within a hundred thousandth of the exact one keeps."""
    found = set()
    exact = kept_weights(scores, row)
    edge = exact[exact > 0].min()
    weights = torch.softmax(scores.double() / float(row["temperature"]), dim=-1).numpy()
    near = 1 - weights[np.abs(weights / edge - 1) <= 1e-5] / edge
    for slack in {-1e-5, 0.0, 1e-5, *(near + 1e-12), *(near - 1e-12)}:
        ends = kept_weights(scores, row, slack).cumsum()
        for miss in (-1e-5, 0.0, 1e-5):
            target = min(max(float(row["uniform"]) + miss, 0.0), 1 - 1e-9) * ends[-1]
            found.add(int(np.searchsorted(ends, target, side="right")))
    return found


FILTERS = {
    "temperature": st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    "top_p": st.sampled_from([1.0, 0.999, 0.95, 0.5, 1e-4]),
    "min_p": st.sampled_from([0.0, 1e-4, 0.05, 1.0]),
    "top_k": st.sampled_from([0, 1, 2, 20, 255, 256, 1000, 2**31 - 1]),
}


@MODEST
@given(
    vocab=st.sampled_from([1, 2, 15, 16, 17, 255, 256, 257, 1000, 5003]),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 4.0, 30.0, 1e4]),
    ties=st.booleans(),
    seed=st.integers(0, 1000),
    **FILTERS,
)
def test_the_same_tokens_as_plain_pytorch(ops, vocab, spread, ties, seed, **filters):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(8, vocab, generator=generator) * spread
    if ties:
        scores = (scores * 2).round() / 2
    rows = rows_of(8, np.random.default_rng(seed).random(8), **filters)
    drawn, plain = ops.sample(scores, rows).tolist(), sampling.sample(scores, rows).tolist()
    for i, (ours, theirs) in enumerate(zip(drawn, plain)):
        assert ours == theirs or {ours, theirs} <= possible(scores[i], rows[i]), (ours, theirs)


@MODEST
@given(spread=st.sampled_from([0.0, 0.5, 3.0]), seed=st.integers(0, 1000), **FILTERS)
def test_the_same_tokens_are_kept(ops, spread, seed, **filters):
    """The number in the middle of a token's share draws that token: every one that passes the filters, no other."""
    scores = torch.randn(700, generator=torch.Generator().manual_seed(seed)) * spread
    weights = kept_weights(scores, rows_of(1, **filters)[0])
    weights /= weights.sum()
    support = np.flatnonzero(weights > 1e-5)  # wider than what rounding moves
    middles = weights.cumsum()[support] - weights[support] / 2
    drawn = ops.sample(scores.expand(len(support), -1), rows_of(len(support), middles, **filters)).numpy()
    narrow, wide = (set(np.flatnonzero(kept_weights(scores, rows_of(1, **filters)[0], s))) for s in (-1e-5, 1e-5))
    if narrow == wide:  # no token stands on a filter's edge
        assert drawn.tolist() == support.tolist()
    else:
        assert set(drawn.tolist()) <= wide


def test_draws_follow_the_distribution(ops):
    """Frequencies over 20,000 numbers match the filtered softmax (chi-square, 99.99 % of 39 degrees of freedom)."""
    scores = torch.randn(3000, generator=torch.Generator().manual_seed(1)) * 2
    numbers = np.random.default_rng(2).random(20_000)
    rows = rows_of(len(numbers), numbers, top_k=40, temperature=0.8)
    counts = np.bincount(ops.sample(scores.expand(len(numbers), -1), rows), minlength=3000)
    weights = kept_weights(scores, rows[0])
    inside = weights > 0
    expected = weights[inside] / weights.sum() * len(numbers)
    assert inside.sum() == 40
    assert counts[~inside].sum() == 0
    assert float(((counts[inside] - expected) ** 2 / expected).sum()) < 85


STRANGE = {
    "not a number": [0.0, float("nan"), 3.0, float("nan")],
    "infinite": [0.0, 1.0, float("inf"), float("inf")],
    "minus infinity": [float("-inf")] * 4,
    "huge": [3e38, -3e38, 2.9e38, 0.0],
    "one left": [float("-inf"), float("-inf"), -3e38, float("-inf")],
    "tiny": [1e-44, 0.0, -1e-44, 0.0],
}


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1.0, 1e30])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.5}])
def test_strange_scores(ops, name, temperature, filters):
    """As plain PyTorch: greedily where no distribution exists, and never a token of probability zero."""
    for width in (4, 40, 300):
        scores = torch.full((1, width), float("-inf"))
        scores[0, -4:] = torch.tensor(STRANGE[name])
        for number in (0.0, 0.3, 0.999999):
            rows = rows_of(1, number, temperature=temperature, **filters)
            assert ops.sample(scores, rows).tolist() == sampling.sample(scores, rows).tolist()


@given(order=st.permutations(range(9)), threads=st.sampled_from([1, 2]))
@settings(max_examples=20, deadline=None)
def test_a_row_does_not_depend_on_the_batch(order, threads):
    ops = CpuKernels(threads=min(threads, cpu.CpuKernels().num_threads))
    scores = torch.randn(9, 400, generator=torch.Generator().manual_seed(3)) * 2
    rows = rows_of(9, np.linspace(0, 0.99, 9), top_p=np.linspace(0.1, 1, 9), temperature=np.arange(9) / 4)
    alone = [ops.sample(scores[i : i + 1], rows[i : i + 1]).item() for i in range(9)]
    assert ops.sample(scores[order], rows[order]).tolist() == [alone[i] for i in order]


def test_what_does_not_fit_is_refused(ops):
    with pytest.raises(ConfigError, match="do not sample"):
        ops.sample(torch.zeros(2, 8), rows_of(3))
    with pytest.raises(ConfigError, match="do not sample"):
        ops.sample(torch.zeros(2, 8), np.zeros(2))
    assert ops.sample(torch.zeros(0, 8), rows_of(0)).tolist() == []
