"""The documents of the live stream: what they are made of, and how a look at the engine becomes one.

`Hello` comes first and says what does not change; a `Tick` follows every second. docs/ops-page.md describes both for
those who read the stream themselves. Every time in a tick is in seconds relative to its own moment, so that a reader
needs no clock of the engine's. A tick's size is bounded: at most `MOST_CELLS` cells and `MOST_POINTS` steps.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import msgspec

from pellucid.core.config import SchedulerConfig
from pellucid.core.step_record import StepSummary
from pellucid.engine.client import EngineState, EngineStats
from pellucid.engine.lanes import Lane
from pellucid.engine.memory_view import Branch, PoolView
from pellucid.engine.view import EngineView, TenantView
from pellucid.telemetry.machine_use import MachineUse
from pellucid.telemetry.recent import RecentValues

MOST_CELLS = 4096
MOST_POINTS = 40
ADVICE = "run `pellucid measure`, then start the server again"
_PERCENTILES = (0.5, 0.9, 0.99)


class Machine(msgspec.Struct):
    """A machine's two ceilings: `flops` per second in `format`, `bandwidth` in bytes per second."""

    flops: float
    bandwidth: float
    format: str
    machine: str
    measured_at: str


class Hello(msgspec.Struct, kw_only=True):
    """What stays as it is. `step_target` is the time in seconds that the scheduler fits steps into, if it does.
    `machine` is None where the ceilings are not known; `advice` then says what to run."""

    version: str
    model: str
    num_blocks: int
    block_size: int
    max_running: int
    token_budget: int
    max_length: int
    policy: str
    step_target: float | None
    shows_text: bool
    machine: Machine | None
    advice: str


class Rates(msgspec.Struct):
    """Per second, since the tick before: prompt tokens computed, prompt tokens from the cache, output tokens, steps and
    requests that ended."""

    prompt: float
    cached: float
    output: float
    steps: float
    finished: float


class Percentiles(msgspec.Struct):
    """Of `count` values of the last minute, in seconds; None where there were none."""

    count: int
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class Point(msgspec.Struct, array_like=True):
    """A step on the roofline. `decode`: no token in it belonged to a prompt."""

    flops: float
    bytes: float
    seconds: float
    tokens: int
    sequences: int
    decode: bool


class Steps(msgspec.Struct):
    """The steps since the tick before, in seconds; `predicted` is the median of what the scheduler expected. They come
    up to a second late."""

    count: int
    median: float | None
    longest: float | None
    predicted: float | None
    points: list[Point]


class Blocks(msgspec.Struct):
    """A pool. `flags` and `owners` are base64 of a byte a cell; a cell stands for `per_cell` blocks and shows what
    most of them are. Flags: 1 held, 2 in the prefix tree, 4 held by several requests, 8 being copied; 0 is free. An
    owner is 1 + an index in the tick's `tenants`: who holds the block or computed it; 0 where nobody did."""

    total: int
    free: int
    active: int
    cached: int
    in_flight: int
    per_cell: int
    flags: str
    owners: str


class BranchRow(msgspec.Struct):
    """A stretch of the prefix tree without a fork, in blocks; `parent` is an index in the tick's `branches` or -1."""

    parent: int
    start: int
    blocks: int
    below: int
    hits: int
    users: int
    text: str


class LaneRow(msgspec.Struct):
    """A request. `status` is waiting, running or swapped, or why it ended. A span is (start, end, causes), where the
    causes are (name, seconds) and sum to its length."""

    id: str
    tenant: str
    status: str
    arrival: float
    prompt: int
    cached: int
    output: int
    preemptions: int
    spans: list[tuple[float, float, list[tuple[str, float]]]]
    text: str


class TenantRow(msgspec.Struct):
    """A tenant: `received` grows with what is computed for it, a prompt token counting 1, an output token 2 and one
    from the cache 1/64; `lead` is how far it is ahead of the least served tenant that waits, each by its weight;
    `waiting` counts requests by cause."""

    name: str
    weight: float
    running: int
    waiting: dict[str, int]
    blocks: int
    received: float
    lead: float
    max_running: int | None
    max_waiting: int | None
    tokens_per_minute: int | None
    kv_share: float


class Inside(msgspec.Struct, kw_only=True):
    """What was seen of the engine's inside. `host` is the second tier, None without one."""

    waiting: dict[str, int]
    swapped: int
    blocks: Blocks
    host: Blocks | None
    branches: list[BranchRow]
    lanes: list[LaneRow]
    tenants: list[TenantRow]


class Tick(msgspec.Struct, kw_only=True):
    """One second. `at` grows by the seconds that pass. `inside` is None while the engine has not answered: it starts,
    it has died, or it is `late` seconds into a step."""

    at: float
    state: EngineState
    reason: str
    late: float
    running: int
    waiting: int
    rates: Rates
    ttft: Percentiles
    itl: Percentiles
    steps: Steps
    inside: Inside | None


@dataclass(frozen=True, slots=True)
class Subject:
    """What is watched, as far as it does not change. `machine` knows what steps cost, and the machine's ceilings if it
    was measured; `decode` turns token ids into text and is None unless texts may be shown."""

    model: str
    version: str
    limits: SchedulerConfig
    machine: MachineUse | None = None
    decode: Callable[[Sequence[int]], str] | None = None

    def hello(self) -> Hello:
        """The first document of a stream."""
        limits = None if self.machine is None else self.machine.limits
        return Hello(
            version=self.version,
            model=self.model,
            num_blocks=self.limits.num_blocks,
            block_size=self.limits.block_size,
            max_running=self.limits.max_running,
            token_budget=self.limits.token_budget,
            max_length=self.limits.max_length,
            policy=self.limits.policy,
            step_target=self.limits.step_target,
            shows_text=self.decode is not None,
            machine=None if limits is None else Machine(**asdict(limits)),
            advice=ADVICE if limits is None else "",
        )

    def inside(self, view: EngineView) -> Inside:
        """What a look tells."""
        return Inside(
            waiting=view.waiting,
            swapped=view.num_swapped,
            blocks=_blocks(view.pool),
            host=None if view.host is None else _blocks(view.host),
            branches=[self._branch(branch) for branch in view.branches],
            lanes=[self._lane(lane, view.now) for lane in view.lanes],
            tenants=[_tenant(tenant) for tenant in view.tenants],
        )

    def _branch(self, branch: Branch) -> BranchRow:
        return BranchRow(
            branch.parent,
            branch.start,
            branch.num_blocks,
            branch.num_below,
            branch.num_hits,
            branch.num_users,
            self._text(branch.head),
        )

    def _lane(self, lane: Lane, now: float) -> LaneRow:
        return LaneRow(
            lane.request_id,
            lane.tenant,
            lane.status,
            round(lane.arrival - now, 4),
            lane.num_prompt,
            lane.num_cached,
            lane.num_generated,
            lane.num_preemptions,
            [
                (round(start - now, 4), round(end - now, 4), [(cause, round(seconds, 4)) for cause, seconds in causes])
                for start, end, causes in lane.spans
            ],
            self._text(lane.head),
        )

    def _text(self, token_ids: Sequence[int]) -> str:
        return self.decode(token_ids) if token_ids and self.decode is not None else ""

    def steps(self, steps: Sequence[StepSummary]) -> Steps:
        """The steps of a tick; at most `MOST_POINTS` of them, evenly chosen, as points."""
        seconds = [step.seconds for step in steps]
        predicted = [step.predicted_seconds for step in steps if step.predicted_seconds > 0.0]
        return Steps(
            len(steps),
            median(seconds) if seconds else None,
            max(seconds, default=None),
            median(predicted) if predicted else None,
            self._points(steps[:: -(-len(steps) // MOST_POINTS) or 1]),
        )

    def _points(self, steps: Sequence[StepSummary]) -> list[Point]:
        if self.machine is None:
            return []
        work = self.machine.work
        return [
            Point(
                work.flops(step.features),
                work.bytes(step.features),
                step.seconds,
                step.features.num_tokens,
                step.features.num_sequences,
                step.num_prompt_tokens == 0,
            )
            for step in steps
        ]


def percentiles(values: RecentValues, now: float) -> Percentiles:
    """The usual three."""
    count, found = values.percentiles(_PERCENTILES, now)
    return Percentiles(count, *found)


def rates(before: EngineStats, after: EngineStats, seconds: float) -> Rates:
    """What happened between two snapshots, per second."""

    cached = after.cached_tokens - before.cached_tokens
    return Rates(
        prompt=(after.prompt_tokens - before.prompt_tokens - cached) / seconds,
        cached=cached / seconds,
        output=(after.generated_tokens - before.generated_tokens) / seconds,
        steps=(after.num_steps - before.num_steps) / seconds,
        finished=(after.num_finished - before.num_finished) / seconds,
    )


def _blocks(pool: PoolView) -> Blocks:
    per_cell = -(-len(pool.flags) // MOST_CELLS) or 1
    flags, owners = pool.flags, pool.owners
    if per_cell > 1:
        flags, owners = _cells(flags, per_cell), _cells(owners, per_cell)
    return Blocks(
        len(pool.flags),
        pool.num_free,
        pool.num_active,
        pool.num_cached,
        pool.num_in_flight,
        per_cell,
        b64encode(flags).decode(),
        b64encode(owners).decode(),
    )


def _cells(blocks: bytes, per_cell: int) -> bytes:
    """What most blocks of each group are; among equals, what comes first in the group."""
    groups = (blocks[i : i + per_cell] for i in range(0, len(blocks), per_cell))
    return bytes(group[0] if group.count(group[0]) == len(group) else max(group, key=group.count) for group in groups)


def _tenant(tenant: TenantView) -> TenantRow:
    limits = tenant.tenant
    return TenantRow(
        limits.name,
        limits.weight,
        tenant.num_running,
        tenant.waiting,
        tenant.num_blocks,
        round(tenant.received, 1),
        round(tenant.lead, 1),
        limits.max_running,
        limits.max_waiting,
        limits.tokens_per_minute,
        limits.kv_share,
    )
