"""From scores to tokens in plain PyTorch: greedy, or drawn after temperature, top-k, top-p and min-p.

What the filters keep is everything from some probability on: a filter's edge keeps all that are equal, and the draw
goes through tokens in the order of their ids. So nothing depends on how ties are broken, and native kernels, which
find that probability without sorting, give the same tokens (but where rounding decides).

Filters need the largest probabilities only. `CANDIDATES` of them are taken per row; where the filters might reach
further (a flat distribution with top-p 0.99), that row alone takes all. Which rows do is the one thing that is asked of
the device. The result is exact either way.

A row whose scores make no distribution (one of them is infinite or not a number, or all are minus infinity) is sampled
greedily.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

CANDIDATES = 256


def sample(scores: Tensor, rows: npt.NDArray[np.void]) -> Tensor:
    """The next token of every row. scores `[R, V]`, rows `[R]` of `layout.SAMPLE_ROW` -> `[R]` int64."""
    tokens = greedy(scores)
    drawn = rows["temperature"] > 0
    filtered = drawn & ((rows["top_k"] > 0) | (rows["top_p"] < 1) | (rows["min_p"] > 0))
    for members, draw in ((drawn & ~filtered, _draw_plain), (filtered, _draw_filtered)):
        if not members.any():
            continue
        chosen = rows[members]
        index = torch.from_numpy(np.flatnonzero(members)).to(scores.device)
        probabilities = scaled_softmax(scores.index_select(0, index), _column(chosen, "temperature", scores))
        nowhere = probabilities[:, :1].isnan()
        drawn_tokens = draw(probabilities.masked_fill(nowhere, 1.0), chosen)
        tokens.index_copy_(0, index, torch.where(nowhere[:, 0], tokens.index_select(0, index), drawn_tokens))
    return tokens


def greedy(scores: Tensor) -> Tensor:
    """The first most likely token of each row. `[R, V]` -> `[R]`."""
    return scores.argmax(dim=-1)


def scaled_softmax(scores: Tensor, temperatures: Tensor) -> Tensor:
    """Probabilities at a temperature per row. `[R, V]`, `[R]` -> `[R, V]`, float32; not-a-numbers where a row's scores
    make no distribution."""
    return torch.softmax(scores.float() / temperatures[:, None], dim=-1)


def top_candidates(probabilities: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row, largest first, and their token ids, each `[R, count]`."""
    values, tokens = probabilities.topk(count, dim=-1)
    return values, tokens


def pick(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a column of each row with probability proportional to its weight, by inverting the cumulative sum at
    `uniforms` `[R]` in [0, 1). weights: `[R, N]`, at least one positive per row -> `[R]`.

    In two levels: first a run of columns by the runs' sums, then the column inside it. So the long cumulative sum, slow
    and inexact in float32, is never taken.
    """
    num_rows, width = weights.shape
    run = 256
    padded = F.pad(weights, (0, -width % run)).view(num_rows, -1, run)
    sums = padded.sum(dim=-1, dtype=torch.float64)
    ends = sums.cumsum(dim=-1)
    target = uniforms.double()[:, None] * ends[:, -1:]
    chosen = _first_beyond(ends, target)
    inside = padded.gather(1, chosen[:, :, None].expand(-1, -1, run))[:, 0].double().cumsum(dim=-1)
    rest = (target - (ends - sums).gather(1, chosen)).clamp_(min=0.0)
    column = _first_beyond(inside, torch.minimum(rest, inside[:, -1:] * (1 - 2**-53)))
    return (chosen * run + column)[:, 0]


def kept_candidates(probabilities: Tensor, rows: npt.NDArray[np.void], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` most likely tokens of each row in the order of their ids, and their probabilities, 0 for those that
    the filters remove; and whether none beyond them would be kept: `[R, count]` twice and `[R]`."""
    likely, tokens = top_candidates(probabilities, count)
    asked = _column(rows, "top_k", likely)[:, None].long()
    by_count, by_mass = asked > 0, _column(rows, "top_p", likely)[:, None] < 1
    last = likely[:, -1:]
    kth = torch.where(by_count, likely.gather(1, asked.clamp(1, count) - 1), 0.0)
    inside = torch.where(likely >= kth, likely, 0.0).double()
    mass = torch.where(by_count, inside.sum(-1, keepdim=True), probabilities.sum(-1, keepdim=True, dtype=torch.float64))
    before = inside.cumsum(-1) - inside
    in_mass = before < _column(rows, "top_p", likely)[:, None].double() * mass
    edge = torch.where(by_mass, likely.masked_fill(~in_mass, torch.inf).amin(-1, keepdim=True), 0.0)
    floor = torch.maximum(torch.maximum(kth, edge), _column(rows, "min_p", likely)[:, None] * likely[:, :1])
    mass_is_known = ~(by_count & by_mass) | (kth > last)
    ids, order = tokens.sort(dim=-1)
    kept = torch.where(likely >= floor, likely, 0.0).gather(1, order)
    return ids, kept, ((floor > last) & mass_is_known)[:, 0]


def _draw_plain(probabilities: Tensor, rows: npt.NDArray[np.void]) -> Tensor:
    return pick(probabilities, _column(rows, "uniform", probabilities))


def _draw_filtered(probabilities: Tensor, rows: npt.NDArray[np.void]) -> Tensor:
    """Draw from the candidates, and again from the whole vocabulary for rows whose filters reach beyond them."""
    vocab = probabilities.shape[1]
    count = min(CANDIDATES, vocab)
    ids, kept, complete = kept_candidates(probabilities, rows, count)
    chance = _column(rows, "uniform", probabilities)
    tokens = ids.gather(1, pick(kept, chance)[:, None])[:, 0]
    for i in torch.nonzero(~complete).flatten().tolist() if count < vocab else ():
        one = slice(i, i + 1)
        ids, kept, _ = kept_candidates(probabilities[one], rows[one], vocab)
        tokens[one] = pick(kept, chance[one])
    return tokens


def _first_beyond(ends: Tensor, target: Tensor) -> Tensor:
    """The first column whose cumulative end exceeds the target, `[R, 1]`: never one of weight zero."""
    return torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)


def _column(rows: npt.NDArray[np.void], name: str, like: Tensor) -> Tensor:
    return torch.from_numpy(rows[name].copy()).to(like.device)
