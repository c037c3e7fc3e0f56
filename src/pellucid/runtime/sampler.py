"""Who samples how: a request's parameters and its random numbers become one row that the kernels sample by.

Randomness is counter-based: the only random number of a token is a hash of (seed, position), so a token never depends
on what else is in the batch, on how often the sampler ran before, on preemption, or on which kernels run. A request
without a seed gets one from the engine's seed and its sequence id. `kernels/sampling.py` says what the filters keep.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pellucid.core.request import SamplingParams
from pellucid.kernels import Kernels
from pellucid.kernels.layout import SAMPLE_ROW


class Sampler:
    """Samples the rows of a step. `seed` is the engine's."""

    def __init__(self, kernels: Kernels, seed: int) -> None:
        self._kernels, self._seed = kernels, seed

    def sample(
        self, logits: Tensor, requests: Sequence[tuple[int, SamplingParams]], positions: npt.NDArray[np.int64]
    ) -> Tensor:
        """Tokens `[R]` for logits `[R, V]`; row i belongs to `requests[i]` = (sequence id, parameters) and its token
        will stand at `positions[i]`."""
        return self._kernels.sample(logits, self._rows(requests, positions))

    def _rows(
        self, requests: Sequence[tuple[int, SamplingParams]], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.void]:
        rows = np.zeros(len(requests), dtype=SAMPLE_ROW)
        drawn = [i for i, (_, params) in enumerate(requests) if not params.greedy]
        if not drawn:
            return rows
        rules = [rule_of(*requests[i], self._seed) for i in drawn]
        numbers = uniforms(np.array([seed for *_, seed in rules], dtype=np.uint64), positions[drawn])
        rows[drawn] = [(*filters, number) for (*filters, _), number in zip(rules, numbers)]
        return rows


# A temperature that is not 0 must not become 0 in float32, nor a top-k leave int32.
_COLDEST, _MOST = float(np.finfo(np.float32).tiny), 2**31 - 1


def rule_of(seq_id: int, params: SamplingParams, engine_seed: int) -> tuple[float, float, float, int, int]:
    """How a sequence is sampled, in the order of `lines.SAMPLE_RULE`: its filters, and the seed of its numbers."""
    if params.greedy:
        return (0.0, 0.0, 0.0, 0, 0)
    seed = _sequence_seed(engine_seed, seq_id) if params.seed is None else _as_uint64(params.seed)
    return (max(params.temperature, _COLDEST), params.top_p, params.min_p, min(params.top_k, _MOST), seed)


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


def _sequence_seed(engine_seed: int, seq_id: int) -> int:
    pair = np.array([_as_uint64(engine_seed)], dtype=np.uint64)
    with np.errstate(over="ignore"):
        return int(_mix(_mix(pair) ^ np.uint64(_as_uint64(seq_id)))[0])


def _as_uint64(value: int) -> int:
    return value & 0xFFFFFFFFFFFFFFFF
