"""Sampling: each filter against a plain definition, seeds that mean something, and no dependence on the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.core.request import SamplingParams
from pellucid.kernels import select
from pellucid.kernels.sampling import CANDIDATES
from pellucid.runtime.sampler import Sampler, uniforms

VOCAB = 1000
SAMPLER = Sampler(select("cpu", isa="reference"), seed=0)


def sample(logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> list[int]:
    requests = list(enumerate(params))
    return SAMPLER.sample(logits, requests, np.array(positions, dtype=np.int64)).tolist()


def allowed(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """Tokens that may come out, by the definition: temperature, then top-k, then top-p, then min-p."""
    probabilities = torch.softmax(logits.double() / params.temperature, dim=-1)
    order = torch.argsort(probabilities, descending=True).tolist()
    kept = order[: params.top_k or len(order)]
    mass = float(probabilities[kept].sum())
    nucleus, before = [], 0.0
    for token in kept:
        if before < params.top_p * mass:
            nucleus.append(token)
        before += float(probabilities[token])
    floor = params.min_p * float(probabilities[order[0]])
    return {token for token in nucleus if float(probabilities[token]) >= floor}


@settings(max_examples=40, deadline=None)
@given(
    spread=st.sampled_from([0.01, 0.5, 3.0, 8.0]),
    temperature=st.floats(0.2, 2.0),
    top_k=st.sampled_from([0, 1, 5, CANDIDATES, CANDIDATES + 7, VOCAB]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.01, 0.4, 1.0]),
    seed=st.integers(0, 1000),
)
def test_filters(spread: float, temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> None:
    """Draws stay inside the allowed set, whether it is smaller or larger than the candidates, and reach its ends."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * spread
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    inside = allowed(logits, params)
    drawn = sample(logits.expand(64, -1), [params] * 64, list(range(64)))
    # A token exactly on a filter's edge may fall on either side in float32.
    edge = allowed(logits, SamplingParams(temperature=temperature, top_k=top_k, top_p=min(1.0, top_p * 1.001),
                                          min_p=min_p * 0.999))  # fmt: skip
    assert set(drawn) <= inside | edge
    if len(inside) == 1:
        assert set(drawn) == inside
    if len(inside) > 200 and spread < 0.1:
        assert len(set(drawn)) > 40  # a flat distribution: hardly a token twice


def test_draws_follow_the_distribution() -> None:
    """Frequencies over 4,000 positions match the filtered softmax (chi-square of 4 degrees of freedom, 99.99 %)."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -1.2, -9.0]).expand(4000, -1)
    params = SamplingParams(temperature=0.8, top_k=5, seed=3)
    counts = np.bincount(sample(logits, [params] * 4000, list(range(4000))), minlength=7)
    expected = torch.softmax(logits[0, :5].double() / 0.8, -1).numpy() * 4000
    assert counts[5:].sum() == 0
    assert float(((counts[:5] - expected) ** 2 / expected).sum()) < 23.5


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, seed=11),
    SamplingParams(temperature=1.0, top_p=0.999, seed=12),
    SamplingParams(temperature=1.0, top_k=4, seed=-5),
    SamplingParams(temperature=1.0, min_p=0.2, seed=2**80 + 1),
]


@settings(max_examples=25, deadline=None)
@given(order=st.permutations(range(len(MIXED))), keep=st.integers(1, len(MIXED)))
def test_a_token_does_not_depend_on_the_batch(order: list[int], keep: int) -> None:
    """Any subset in any order draws what each draws alone."""
    logits = torch.randn(len(MIXED), VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    alone = [sample(logits[i : i + 1], [MIXED[i]], [30 + i])[0] for i in range(len(MIXED))]
    chosen = order[:keep]
    together = sample(logits[chosen], [MIXED[i] for i in chosen], [30 + i for i in chosen])
    assert together == [alone[i] for i in chosen]


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [7, 500]] = 1.0
    assert sample(logits, [SamplingParams(temperature=0.0)], [0]) == [7]


def test_seeds() -> None:
    """The same seed and position repeat; another position, seed, sequence or engine seed gives another stream."""
    logits = torch.zeros(20, VOCAB)
    positions = np.arange(20)

    def stream(engine_seed: int, seq_id: int, seed: int | None) -> list[int]:
        sampler = Sampler(select("cpu"), engine_seed)
        return sampler.sample(logits, [(seq_id, SamplingParams(seed=seed))] * 20, positions).tolist()

    assert stream(0, 1, 5) == stream(9, 2, 5)
    assert stream(0, 1, None) == stream(0, 1, None)
    streams = [stream(0, 1, 5), stream(0, 1, 6), stream(0, 1, None), stream(0, 2, None), stream(1, 1, None)]
    assert len({tuple(s) for s in streams}) == len(streams)
    assert len(set(streams[0])) > 15


def test_uniforms_are_uniform() -> None:
    """Over a grid of seeds and positions: mean, variance and neighbour correlation of a uniform variable."""
    grid = np.array([uniforms(np.full(500, seed, dtype=np.uint64), np.arange(500)) for seed in range(200)])
    assert 0.0 <= grid.min() < 1e-3
    assert 0.999 < grid.max() < 1.0
    assert abs(grid.mean() - 0.5) < 0.005
    assert abs(grid.var() - 1 / 12) < 0.002
    for a, b in ((grid[:, 1:], grid[:, :-1]), (grid[1:], grid[:-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02


@pytest.mark.parametrize("vocab", [1, 2, 255, 256, 257])
def test_small_vocabularies(vocab: int) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=300)
    assert 0 <= sample(torch.zeros(1, vocab), [params], [0])[0] < vocab
