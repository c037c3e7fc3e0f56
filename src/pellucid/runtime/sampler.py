"""From logits to tokens: greedy, or drawn after temperature, top-k, top-p and min-p, without sorting vocabularies.

Randomness is counter-based: the only random number of a token is a hash of (seed, position), so a token never depends
on what else is in the batch, on how often the sampler ran before, or on preemption. A request without a seed gets one
from the engine's seed and its sequence id.

Filters need the largest probabilities only. `CANDIDATES` of them are taken per row; where the filters might reach
further (a flat distribution with top-p 0.99), that row alone takes all. The result is exact either way. Among equal
probabilities at a filter's edge the device's order decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pellucid.core.request import SamplingParams
from pellucid.kernels import Kernels

CANDIDATES = 256


class Sampler:
    """Samples the rows of a step. `seed` is the engine's."""

    def __init__(self, kernels: Kernels, seed: int) -> None:
        self._kernels, self._seed = kernels, seed

    def sample(
        self, logits: Tensor, requests: Sequence[tuple[int, SamplingParams]], positions: npt.NDArray[np.int64]
    ) -> Tensor:
        """Tokens `[R]` for logits `[R, V]`; row i belongs to `requests[i]` = (sequence id, parameters) and its token
        will stand at `positions[i]`."""
        tokens = self._kernels.greedy(logits)
        drawn = [i for i, (_, params) in enumerate(requests) if not params.greedy]
        if not drawn:
            return tokens
        uniforms = self._uniforms([requests[i] for i in drawn], positions[drawn])
        plain = [j for j, i in enumerate(drawn) if not _filters(requests[i][1])]
        filtered = [j for j, i in enumerate(drawn) if _filters(requests[i][1])]
        for members, draw in ((plain, self._draw_plain), (filtered, self._draw_filtered)):
            if members:
                rows = torch.tensor([drawn[j] for j in members], device=logits.device)
                params = [requests[drawn[j]][1] for j in members]
                chance = torch.from_numpy(uniforms[members]).to(logits.device)
                temperatures = _column(params, "temperature", logits)
                probabilities = self._kernels.scaled_softmax(logits.index_select(0, rows), temperatures)
                tokens.index_copy_(0, rows, draw(probabilities, params, chance))
        return tokens

    def _uniforms(
        self, requests: Sequence[tuple[int, SamplingParams]], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        seeds = np.array(
            [_as_uint64(p.seed) if p.seed is not None else _sequence_seed(self._seed, i) for i, p in requests],
            dtype=np.uint64,
        )
        return uniforms(seeds, positions)

    def _draw_plain(self, probabilities: Tensor, params: Sequence[SamplingParams], chance: Tensor) -> Tensor:
        return self._kernels.pick(probabilities, chance)

    def _draw_filtered(self, probabilities: Tensor, params: Sequence[SamplingParams], chance: Tensor) -> Tensor:
        """Draw from the candidates, and again from the whole vocabulary for rows whose filters reach beyond them."""
        count = min(CANDIDATES, probabilities.shape[1])
        tokens, complete = self._draw_from(probabilities, params, chance, count)
        if count < probabilities.shape[1]:
            for i in torch.nonzero(~complete).flatten().tolist():
                one = slice(i, i + 1)
                tokens[one], _ = self._draw_from(probabilities[one], params[one], chance[one], probabilities.shape[1])
        return tokens

    def _draw_from(
        self, probabilities: Tensor, params: Sequence[SamplingParams], chance: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        """Tokens drawn from the `count` most likely of each row, and whether a row's filters end within those."""
        kept, tokens = self._kernels.top_candidates(probabilities, count)
        top_k = _column(params, "top_k", probabilities).long()[:, None]
        in_top_k = (torch.arange(count, device=kept.device) < top_k) | (top_k == 0)
        within = (top_k[:, 0] > 0) & (top_k[:, 0] <= count)
        mass = torch.where(top_k == 0, probabilities.sum(dim=-1, keepdim=True), (kept * in_top_k).sum(-1, keepdim=True))
        before = kept.cumsum(dim=-1) - kept
        in_top_p = before < _column(params, "top_p", probabilities)[:, None] * mass
        in_min_p = kept >= _column(params, "min_p", probabilities)[:, None] * kept[:, :1]
        allowed = in_top_k & in_top_p & in_min_p
        complete = within | ~(in_top_p[:, -1] & in_min_p[:, -1])
        column = self._kernels.pick(kept * allowed, chance)
        return tokens.gather(1, column[:, None])[:, 0], complete


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each (seed, position): 53 bits of a twice-applied splitmix64 finaliser (public domain,
    Sebastiano Vigna), which passes the usual statistical batteries as a counter-based generator."""
    mixed = _mix(_mix(seeds) + positions.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _sequence_seed(engine_seed: int, seq_id: int) -> np.uint64:
    pair = np.array([_as_uint64(engine_seed)], dtype=np.uint64)
    with np.errstate(over="ignore"):
        return np.uint64(_mix(_mix(pair) ^ np.uint64(_as_uint64(seq_id)))[0])


def _as_uint64(value: int) -> int:
    return value & 0xFFFFFFFFFFFFFFFF


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _column(params: Sequence[SamplingParams], name: str, like: Tensor) -> Tensor:
    return torch.tensor([float(getattr(p, name)) for p in params], dtype=torch.float32, device=like.device)
