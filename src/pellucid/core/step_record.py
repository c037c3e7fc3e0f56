"""A step as it happened: what was planned, what it was expected to take, what it took, and who was in it.

Made by the engine after each step, for whoever looks: the step recorder, `/metrics`, `/v1/steps`, the ops page. Nothing
in the core reads it back. It comes in two sizes, because one is sent for every step and the other only when asked for:

    StepSummary   numbers; a few hundred bytes however many sequences were in the step
    StepRecord    the summary, the plan without its token ids, and whose each chunk was

Seconds are on the engine's clock. A step's wall time is gap + schedule + seconds + commit, without overlap; the phases
are parts of `seconds`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from pellucid.core.cost import StepFeatures
from pellucid.core.plan import BlockCopy, BlockUpdate, Chunk, NewSequence, StepPlan, Transfer


class BlockCounts(NamedTuple):
    """Blocks of one tier by state; they add up to the tier's size."""

    free: int
    active: int
    cached: int
    in_flight: int


class StepSummary(NamedTuple):
    """One step in numbers.

    `started`: when deciding it began. `gap_seconds`: from the end of the step before to there, 0 where the engine had
    been idle. `seconds`: the executor's wall time, `phases` its parts; `stolen_seconds` of it other processes kept the
    step's threads from their cores. `predicted_*`: what the scheduler's cost model
    expected of it, before it learned from it. `num_prompt_tokens`: computed tokens that lie inside their request's
    prompt, so a step that only decodes has 0. Counts of requests and blocks are those after the step (`num_swapped` are
    among the waiting); `num_preempted` are those of this step. `host_blocks` is None without a host tier.
    """

    step_id: int
    started: float
    gap_seconds: float
    schedule_seconds: float
    seconds: float
    commit_seconds: float
    predicted_seconds: float
    predicted_spread: float
    phases: tuple[tuple[str, float], ...]
    features: StepFeatures
    num_prompt_tokens: int
    num_waiting: int
    num_running: int
    num_swapped: int
    num_preempted: int
    device_blocks: BlockCounts
    host_blocks: BlockCounts | None = None
    stolen_seconds: float = 0.0

    @property
    def wall_seconds(self) -> float:
        """All of the step: gap, deciding, executing, folding in."""
        return self.gap_seconds + self.schedule_seconds + self.seconds + self.commit_seconds


class Who(NamedTuple):
    """Whose sequence it is. `num_prompt` is the length of the request's own prompt."""

    seq_id: int
    request_id: str
    tenant: str
    num_prompt: int


class StepRecord(NamedTuple):
    """One step with its decision. `who` runs parallel to `chunks`; `new` are (sequence, number of tokens it came with).
    No token id is kept."""

    summary: StepSummary
    who: tuple[Who, ...]
    chunks: tuple[Chunk, ...]
    new: tuple[tuple[int, int], ...]
    blocks: tuple[BlockUpdate, ...]
    released: tuple[int, ...]
    copies: tuple[BlockCopy, ...]
    transfers: tuple[Transfer, ...]

    @property
    def plan_line(self) -> str:
        """The line that printing the step's plan gives."""
        # A plan prints how many tokens a new sequence has, never which.
        new = [NewSequence(i, cast("tuple[int, ...]", range(n)), 0, cast("Any", None)) for i, n in self.new]
        return str(
            StepPlan(
                self.summary.step_id,
                self.chunks,
                tuple(new),
                self.blocks,
                self.released,
                self.copies,
                self.transfers,
            )
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict: what `/v1/steps` returns and a dump has in each line."""
        row: dict[str, Any] = self.summary._asdict()
        row["phases"] = dict(self.summary.phases)
        row["features"] = self.summary.features._asdict()
        del row["device_blocks"], row["host_blocks"]
        host = self.summary.host_blocks
        row["blocks"] = {"device": self.summary.device_blocks._asdict()} | ({"host": host._asdict()} if host else {})
        row["plan"] = self.plan_line
        row["sequences"] = [
            who._asdict() | {"start": chunk.start, "end": chunk.end, "samples": chunk.samples}
            for who, chunk in zip(self.who, self.chunks, strict=True)
        ]
        return row


def num_prompt_tokens(chunks: tuple[Chunk, ...], who: tuple[Who, ...]) -> int:
    """Tokens of the chunks that lie inside the prompts of their requests."""
    total = 0
    for (_, start, end, _), (_, _, _, num_prompt) in zip(chunks, who, strict=True):
        if start < num_prompt:
            total += min(end, num_prompt) - start
    return total
