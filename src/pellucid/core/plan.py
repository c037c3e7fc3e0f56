"""A step, decided (StepPlan) and done (StepResult): the only two values that pass between scheduler and executor.

A plan is a *delta*. An executor mirrors, per sequence, its tokens and its block table, and learns of a sequence once
(`new`), of its blocks as they change (`blocks`), and of its end (`released`). So a plan stays small with 64 sequences
of 32k tokens, crosses a process boundary as it is, and gives the executor each sequence's life cycle.

Order inside a step: an executor applies `released`, then `new`, then `blocks`, then `copies` and `transfers`, and then
computes `chunks`. Steps are executed in the order in which they were launched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pellucid.core.request import SamplingParams


class Chunk(NamedTuple):
    """Tokens `[start, end)` of one sequence, computed in one step. A plain decode is a chunk of one.

    With `samples`, the logits after token `end - 1` are wanted and a next token is sampled from them. The input token
    at a position that the executor has not been told is the one it sampled itself in an earlier step.
    """

    seq_id: int
    start: int
    end: int
    samples: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class NewSequence(NamedTuple):
    """Everything an executor needs to know once of a sequence. A sequence that was preempted comes anew, with the
    tokens it had generated; `num_prompt_tokens` still says where the request's own prompt ended."""

    seq_id: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams


class BlockUpdate(NamedTuple):
    """From position `start` on, the sequence's block table reads `blocks` (entries behind them are meaningless)."""

    seq_id: int
    start: int
    blocks: tuple[int, ...]


class BlockCopy(NamedTuple):
    """Copy all layers of block `source` to block `target` within the device pool, before the chunks are computed."""

    source: int
    target: int


class Transfer(NamedTuple):
    """Copy blocks between tiers. `kind` is "out" (device to host) or "in". Pairs are (source, target) block ids. The
    blocks stay IN_FLIGHT until a StepResult lists `id` in `transfers_done`."""

    id: int
    kind: str
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One decided step. Printing it gives the line that golden decision logs consist of."""

    step_id: int
    chunks: tuple[Chunk, ...]
    new: tuple[NewSequence, ...] = ()
    blocks: tuple[BlockUpdate, ...] = ()
    released: tuple[int, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    transfers: tuple[Transfer, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, over all chunks."""
        return sum(chunk.end - chunk.start for chunk in self.chunks)

    def __str__(self) -> str:
        parts = [f"step {self.step_id}"]
        if self.released:
            parts.append("released " + " ".join(str(i) for i in self.released))
        if self.new:
            parts.append("new " + " ".join(f"{n.seq_id}({len(n.token_ids)})" for n in self.new))
        if self.blocks:
            parts.append("blocks " + " ".join(f"{u.seq_id}@{u.start}={_ids(u.blocks)}" for u in self.blocks))
        if self.copies:
            parts.append("copies " + " ".join(f"{c.source}>{c.target}" for c in self.copies))
        if self.transfers:
            parts.append("transfers " + " ".join(f"{t.id}:{t.kind}x{len(t.pairs)}" for t in self.transfers))
        parts.append(
            "run " + " ".join(f"{c.seq_id}:[{c.start},{c.end}){'*' if c.samples else ''}" for c in self.chunks)
        )
        return " | ".join(parts)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced.

    `tokens` runs parallel to the plan's chunks: the tokens sampled after each (empty where the chunk does not sample;
    one today, several with speculation). `seconds` is the step's wall time (or modelled time), `phases` its parts as
    (name, seconds). `stolen_seconds`: how much of it others on the machine kept the step's threads from running, 0
    where the executor cannot tell. `transfers_done` lists the ids of transfers that completed up to now.
    """

    step_id: int
    tokens: tuple[tuple[int, ...], ...]
    seconds: float
    phases: tuple[tuple[str, float], ...] = ()
    transfers_done: tuple[int, ...] = ()
    stolen_seconds: float = 0.0


def _ids(blocks: tuple[int, ...]) -> str:
    """Block ids as a short text: runs of consecutive ids are written `first-last`."""
    runs: list[str] = []
    i = 0
    while i < len(blocks):
        j = i
        while j + 1 < len(blocks) and blocks[j + 1] == blocks[j] + 1:
            j += 1
        runs.append(str(blocks[i]) if i == j else f"{blocks[i]}-{blocks[j]}")
        i = j + 1
    return ",".join(runs)
