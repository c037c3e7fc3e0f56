"""How much of a trace's prompts a prefix cache could save: with no limit, under LRU, and under the best policy there
is.

A request touches its blocks from the last to the first, so that a block is always at least as recent as those behind
it; since ids chain, "this block is cached" then implies "its whole prefix is". With that order the reuse distance of
a block gives its fate under LRU for *every* cache size at once: a block whose last use lies `d` distinct blocks back
is a hit if and only if the cache holds more than `d` blocks. A partly filled last block takes a place in the cache,
counts as a hit only where the cache has no limit, and never under a finite one.

Large traces are sampled by block id (spatial sampling, as in SHARDS, Waldspurger et al., FAST 2015): a block is in
the sample with all its uses or not at all, distances are scaled by the sampling rate, and the difference between the
uses expected and found in the sample is put on the most popular blocks, whose chance it mostly is. Error bars come
from eight disjoint parts of the sample.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pellucid.workload.trace import BlockHash, TraceRequest

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

SAMPLE_ACCESSES = 200_000
EXACT_ACCESSES = 2_000_000
MIN_SAMPLED_BLOCKS = 4000
OWN_ACCESSES = 100_000
ERROR_GROUPS = 8
_FLUSH_ACCESSES = 1 << 19
_HASH_BITS = 62

TAIL, _ROOT, _NOT_LEGAL = 1, 2, 4


def numeric_ids(hashes: Sequence[BlockHash]) -> Sequence[int]:
    """Block ids as whole numbers in [0, 2**62): given so, or folded from a digest by BLAKE2b."""
    if set(map(type, hashes)) <= {int} and (not hashes or (min(hashes) >= 0 and max(hashes) < 1 << _HASH_BITS)):  # type: ignore[operator]
        return hashes  # type: ignore[return-value]
    return [_fold(h) for h in hashes]


def _fold(value: BlockHash) -> int:
    return int.from_bytes(hashlib.blake2b(str(value).encode(), digest_size=8).digest(), "little") >> 64 - _HASH_BITS


@dataclass(frozen=True, slots=True)
class Accesses:
    """Uses of blocks in time order, each request's from its last block to its first.

    `ids`, `request` (row number), `tokens` (in the block, less than a block for a tail), `position` (of the block in
    its prompt) and `flags` run in parallel. `rate` is the share of blocks that are in it. `num_accesses`, `num_prompts`
    (with at least one full block) and `num_tokens` are those of the whole trace.
    """

    ids: Ints
    request: Ints
    tokens: Ints
    position: Ints
    flags: Ints
    rate: float
    num_accesses: int
    num_prompts: int
    num_tokens: int

    @property
    def full(self) -> Mask:
        """Which uses are of full blocks."""
        return np.asarray(self.flags & TAIL == 0, np.bool_)

    @property
    def legal(self) -> Mask:
        """Which uses an engine can take from a cache: full blocks that leave at least one token of the prompt."""
        return np.asarray(self.flags & (TAIL | _NOT_LEGAL) == 0, np.bool_)

    @property
    def surplus(self) -> float:
        """Uses expected in the sample less those found: put on the most popular blocks, whose chance it mostly is."""
        return self.num_accesses * self.rate - len(self.ids)

    def part(self, chosen: Mask | Ints, rate: float) -> Accesses:
        """The chosen uses (by mask or by index), which are a share `rate` of all blocks."""
        return replace(
            self,
            ids=self.ids[chosen],
            request=self.request[chosen],
            tokens=self.tokens[chosen],
            position=self.position[chosen],
            flags=self.flags[chosen],
            rate=rate,
        )


_NUM_COLUMNS = 5
_Columns = tuple[Ints, ...]


class AccessCollector:
    """Takes rows and keeps a bounded sample of their block uses. `limit` None keeps all of them.

    Up to `EXACT_ACCESSES` uses everything is kept; beyond, the sample is halved whenever it outgrows `limit`, though
    never to so few blocks that it would say nothing (a few blocks may have very many uses).
    """

    def __init__(self, block_size: int, limit: int | None = SAMPLE_ACCESSES) -> None:
        self.block_size = block_size
        self.limit = limit
        self.num_requests = 0
        self.num_tokens = 0
        self.num_accesses = 0
        self.num_prompts = 0
        self._halvings = 0
        self._ids = array("q")
        self._num_full = array("q")
        self._tail_tokens = array("q")  # -1: no id of a tail
        self._inputs = array("q")
        self._first_row = 0
        self._kept: list[_Columns] = []
        self._num_kept = 0

    def add(self, row: TraceRequest) -> None:
        """Take the next row."""
        num_full = len(row.prefix_block_hash)
        tail_tokens = -1
        if row.tail_block_hash is not None:
            self._ids.extend(numeric_ids((row.tail_block_hash,)))
            tail_tokens = max(0, row.input_len - num_full * self.block_size)
            self.num_accesses += 1
        if num_full:
            self.num_prompts += 1
            self.num_accesses += num_full
            self._ids.extend(reversed(numeric_ids(row.prefix_block_hash)))
        self._num_full.append(num_full)
        self._tail_tokens.append(tail_tokens)
        self._inputs.append(row.input_len)
        self.num_requests += 1
        self.num_tokens += row.input_len
        if len(self._ids) >= _FLUSH_ACCESSES:
            self._flush()

    def result(self, order: Ints | None = None) -> Accesses:
        """All uses kept, with requests in the given order of time (`order[i]` is the i-th row in time) if not their
        own."""
        self._flush()
        ids, request, tokens, position, flags = (
            np.concatenate([part[i] for part in self._kept]) for i in range(_NUM_COLUMNS)
        )
        totals = (self.num_accesses, self.num_prompts, self.num_tokens)
        accesses = Accesses(ids, request, tokens, position, flags, 0.5**self._halvings, *totals)
        if order is None:
            return accesses
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        accesses = replace(accesses, request=rank[accesses.request])
        return accesses.part(np.argsort(accesses.request, kind="stable"), accesses.rate)

    def _flush(self) -> None:
        if not self._num_full and self._kept:
            return
        part = self._columns()
        self._first_row += len(self._num_full)
        for column in (self._ids, self._num_full, self._tail_tokens, self._inputs):
            del column[:]
        self._keep(part)
        if self.limit is not None and self.num_accesses > EXACT_ACCESSES:
            while self._num_kept > self.limit and self._num_blocks_kept() > MIN_SAMPLED_BLOCKS:
                self._halvings += 1
                parts, self._kept, self._num_kept = self._kept, [], 0
                for old in parts:
                    self._keep(old)

    def _columns(self) -> _Columns:
        """The uses of the rows taken since the last time: ids as they came, everything else from three numbers a
        row."""
        num_full, tail_tokens, inputs = (np.array(c) for c in (self._num_full, self._tail_tokens, self._inputs))
        has_tail = tail_tokens >= 0
        lengths = num_full + has_tail
        row = np.repeat(np.arange(len(lengths)), lengths)
        from_last = np.arange(len(self._ids)) - (np.cumsum(lengths) - lengths)[row]
        position = lengths[row] - 1 - from_last
        is_tail = has_tail[row] & (from_last == 0)
        whole_prompt = (num_full * self.block_size >= inputs)[row] & (position == num_full[row] - 1)
        flags = np.where(is_tail, TAIL, _ROOT * (position == 0) + _NOT_LEGAL * whole_prompt)
        tokens = np.where(is_tail, tail_tokens[row], self.block_size)
        return np.array(self._ids), row + self._first_row, tokens, position, flags

    def _num_blocks_kept(self) -> int:
        return len(np.unique(np.concatenate([part[0] for part in self._kept])))

    def _keep(self, part: _Columns) -> None:
        if self._halvings:
            chosen = (mix(part[0]) >> np.uint64(64 - self._halvings)) == 0
            part = tuple(column[chosen] for column in part)
        self._kept.append(part)
        self._num_kept += len(part[0])


def thinned(accesses: Accesses, limit: int) -> Accesses:
    """The same uses, or those of a random half, quarter, ... of the blocks that is no larger than `limit`."""
    halvings = 0
    while len(accesses.ids) > limit << halvings:
        halvings += 1
    if not halvings:
        return accesses
    chosen = (mix(accesses.ids ^ 0x2545F491) >> np.uint64(64 - halvings)) == 0
    return accesses.part(chosen, accesses.rate * 0.5**halvings)


def mix(ids: Ints) -> NDArray[np.uint64]:
    """Spread ids evenly over 64 bits (a step of splitmix64, Steele et al., OOPSLA 2014)."""
    x = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class HitRates(NamedTuple):
    """Prefix reuse with a cache that never forgets, by each definition people use (all in [0, 1]).

    `token`: cached prompt tokens of all prompt tokens, an equal partial tail included. `block`: the same in started
    blocks. `engine`: full blocks only, and at least one token of each prompt computed. `request`: requests with any
    hit.
    """

    token: float
    block: float
    engine: float
    request: float


def infinite_hit_rates(accesses: Accesses, num_requests: int, block_size: int) -> HitRates:
    """Hit rates without a limit on memory; estimates where the uses are a sample, corrected as the curve is."""
    first = previous_use(accesses.ids) < 0
    flags, rate = accesses.flags, accesses.rate
    surplus = accesses.surplus
    tokens = max(1, accesses.num_tokens) * rate
    new_roots = (first & (flags & _ROOT > 0)).sum() / rate
    return HitRates(
        token=float((accesses.tokens[~first].sum() + surplus * block_size) / tokens),
        block=float(((~first).sum() + surplus) / max(1.0, accesses.num_accesses * rate)),
        engine=float((accesses.tokens[~first & accesses.legal].sum() + surplus * block_size) / tokens),
        request=float(max(0.0, accesses.num_prompts - new_roots) / max(1, num_requests)),
    )


def previous_use(ids: Ints) -> Ints:
    """For each use the index of the same block's use before it, or -1."""
    order = np.argsort(ids, kind="stable")
    same = ids[order[1:]] == ids[order[:-1]]
    previous = np.full(len(ids), -1, np.int64)
    previous[order[1:][same]] = order[:-1][same]
    return previous


def reuse_distances(accesses: Accesses) -> Ints:
    """Distinct blocks used since each use's previous one (-1: first use), as seen when the request arrives.

    With `p` the previous use and `s` the first use of the present request, the blocks used in (p, s) less those used
    twice there: (s - 1 - p) - #{k < s: previous(k) > p}. Uses of the same request before this one are of blocks behind
    it in the prompt, whose previous use is earlier than p, so the count may run to the use itself.
    """
    previous = previous_use(accesses.ids)
    used_again = previous >= 0
    starts = np.searchsorted(accesses.request, accesses.request, side="left")
    distances = np.full(len(previous), -1, np.int64)
    p = previous[used_again]
    distances[used_again] = starts[used_again] - 1 - p - larger_before(p)
    return distances


def larger_before(values: Ints) -> Ints:
    """For each element of a list of distinct numbers, how many earlier elements are larger. O(n log n), vectorised.

    The ranks are sorted by one bit at a time from the highest; among elements that agree on the bits so far, each one
    with a 0 counts the 1s before it.
    """
    n = len(values)
    counts = np.zeros(n, np.int64)
    if n < 2:
        return counts
    rank = np.empty(n, np.int64)
    rank[np.argsort(values, kind="stable")] = np.arange(n)
    order = np.arange(n)
    for bit in range(int(n - 1).bit_length() - 1, -1, -1):
        ranks = rank[order]
        ones = (ranks >> bit) & 1
        start = (ranks >> (bit + 1)) << (bit + 1)
        ones_before = np.cumsum(ones) - ones
        ones_in_group = ones_before - ones_before[start]
        is_zero = ones == 0
        counts[order[is_zero]] += ones_in_group[is_zero]
        zeros_in_group = np.arange(n) - start - ones_in_group
        place = start + np.where(is_zero, zeros_in_group, (1 << bit) + ones_in_group)
        following = np.empty(n, np.int64)
        following[place] = order
        order = following
    return counts


class CurvePoint(NamedTuple):
    """Token hit rates of a cache of `cache_tokens`: under LRU, under the best policy possible, and (where asked for)
    under Pellucid's own. `*_error` is one standard error where the uses were sampled, 0 where they were not."""

    cache_tokens: int
    lru: float
    belady: float
    pellucid: float | None = None
    lru_error: float = 0.0
    belady_error: float = 0.0


Policy = Callable[[Accesses, int], Mask]
"""Which uses hit in a cache of so many blocks."""


def capacity_curve(
    accesses: Accesses,
    block_size: int,
    sizes: Sequence[int],
    *,
    own: Policy | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> list[CurvePoint]:
    """Hit rate against cache size (in tokens), with a third curve for the policy `own`, which is real code and slow: it
    sees at most `OWN_ACCESSES` uses. `progress` is told the share done."""
    lru, belady, third = _hit_curves(accesses, block_size, sizes, own, progress)
    errors = np.zeros((2, len(sizes)))
    if accesses.rate < 1.0:
        parts = [_hit_curves(part, block_size, sizes, None)[:2] for part in _disjoint_parts(accesses)]
        errors = np.std(np.array(parts), axis=0, ddof=1) / np.sqrt(ERROR_GROUPS)
    return [
        CurvePoint(size, lru[i], belady[i], third[i] if own else None, float(errors[0, i]), float(errors[1, i]))
        for i, size in enumerate(sizes)
    ]


def _disjoint_parts(accesses: Accesses) -> list[Accesses]:
    group = mix(accesses.ids ^ 0x5DEECE66D) % np.uint64(ERROR_GROUPS)
    return [accesses.part(group == g, accesses.rate / ERROR_GROUPS) for g in range(ERROR_GROUPS)]


def _hit_curves(
    accesses: Accesses,
    block_size: int,
    sizes: Sequence[int],
    own: Policy | None,
    progress: Callable[[float], None] = lambda share: None,
) -> tuple[list[float], list[float], list[float]]:
    rate, total = accesses.rate, max(1, accesses.num_tokens)
    surplus = accesses.surplus
    full = accesses.full
    distances = np.sort(reuse_distances(accesses)[full])
    distances = distances[np.searchsorted(distances, 0) :]
    few = thinned(accesses, OWN_ACCESSES)
    most = int((infinite_mask(few) & few.full).sum())
    enough = float("inf")  # the smallest size at which the slow policy is known to miss nothing that can be hit
    progress(0.1)
    lru, belady, third = [], [], []
    for index, size in enumerate(sizes):
        room = size // block_size * rate
        found = float(np.searchsorted(distances, room, side="left")) if room >= 1 else 0.0
        lru.append(_rate(found + surplus, block_size, rate, total))
        # Where LRU already hits all that was ever used before, no policy can do better.
        best = found if found == len(distances) else belady_hits(accesses, int(room))
        belady.append(max(lru[-1], _rate(best + surplus, block_size, rate, total)))
        if own is not None:
            hits = most if size >= enough else int((own(few, int(size // block_size * few.rate)) & few.full).sum())
            enough = min(enough, size) if hits == most else enough
            third.append(_rate(hits + few.surplus, block_size, few.rate, total))
        progress(0.1 + 0.9 * (index + 1) / len(sizes))
    return lru, belady, third


def _rate(hits: float, block_size: int, rate: float, total_tokens: int) -> float:
    return min(1.0, max(0.0, hits * block_size / rate / total_tokens))


def belady_hits(accesses: Accesses, num_blocks: int) -> int:
    """Hits on full blocks of a cache of `num_blocks` that knows the future. No online policy can hit more often."""
    return int(belady_mask(accesses, num_blocks).sum())


def belady_mask(accesses: Accesses, num_blocks: int) -> Mask:
    """Which uses of full blocks hit under Belady's MIN, free to keep a block out (as it does with every tail).

    After each use the cache holds, of the blocks it has seen, those whose next use is nearest.
    """
    mask = np.zeros(len(accesses.ids), bool)
    if num_blocks < 1:
        return mask
    following = _next_request(accesses)
    touched = np.flatnonzero(((previous_use(accesses.ids) >= 0) | (following >= 0)) & accesses.full)
    held: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    hits: list[int] = []
    for use, block, upcoming in zip(touched.tolist(), accesses.ids[touched].tolist(), following[touched].tolist()):
        if held.pop(block, None) is not None:
            hits.append(use)
        if upcoming < 0:
            continue
        held[block] = upcoming
        heapq.heappush(heap, (-upcoming, block))
        while len(held) > num_blocks:
            farthest, victim = heapq.heappop(heap)
            if held.get(victim) == -farthest:
                del held[victim]
    mask[hits] = True
    return mask


def lru_mask(accesses: Accesses, num_blocks: int) -> Mask:
    """Which uses hit under LRU."""
    distances = reuse_distances(accesses)
    return (distances >= 0) & (distances < num_blocks)


def infinite_mask(accesses: Accesses) -> Mask:
    """Which uses hit in a cache that never forgets."""
    return previous_use(accesses.ids) >= 0


def cached_tokens_by_request(accesses: Accesses, hits: Mask, num_requests: int) -> Ints:
    """Prompt tokens of each request that an engine takes from the cache: full blocks, at least one token computed."""
    usable = hits & accesses.legal
    return np.bincount(accesses.request[usable], accesses.tokens[usable], minlength=num_requests).astype(np.int64)


def _next_request(accesses: Accesses) -> Ints:
    """The row number of each block's next use, or -1."""
    previous = previous_use(accesses.ids)
    has = previous >= 0
    following = np.full(len(previous), -1, np.int64)
    following[previous[has]] = accesses.request[has]
    return following


def curve_sizes(accesses: Accesses, block_size: int, longest_prompt: int, num_points: int = 12) -> list[int]:
    """Cache sizes worth plotting, in tokens: from what holds the longest prompt (a smaller cache cannot even serve it)
    or 1/1000 of all distinct blocks, to a little over all."""
    distinct = len(np.unique(accesses.ids)) / accesses.rate * block_size
    if distinct < block_size:
        return []
    low = min(distinct, max(block_size, longest_prompt, distinct / 1000))
    return sorted({int(-(-size // block_size) * block_size) for size in np.geomspace(low, distinct * 1.05, num_points)})
