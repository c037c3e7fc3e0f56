"""Where a request's time went: the critical path of its last byte, every second of it under exactly one cause.

A `Ledger` is a clock that is read whenever something is known about a stretch of time; each reading charges the time
since the last one, split among causes. So the causes sum to the elapsed time by construction, whatever the split.
The stretch from arrival to end is cut into *phases* (queue, prefill, decode, preempted); the phases up to the first
token are the ledger of the first token. `LedgerBook` (ledger_book.py) does the charging, `share_step` (attribution.py)
the splitting of steps; the parts that only a server can see are added with `LedgerReport.framed`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

TOKENIZE = "tokenize"
GRAMMAR = "grammar"
TENANT_LIMIT = "queue.tenant_limit"
FAIRNESS = "queue.fairness"
MEMORY = "queue.memory"
CAPACITY = "queue.capacity"
STEP_IN_FLIGHT = "queue.step_in_flight"
SHARED_PREFIX = "queue.shared_prefix"
PREFILL_OWN = "prefill.own"
PREFILL_PROMOTE = "prefill.promote"
PREFILL_WAIT = "prefill.wait"
DECODE_OWN = "decode.own"
DECODE_BATCH = "decode.batch"
DECODE_STALLED = "decode.stalled"
PREEMPTED_WAIT = "preempted.wait"
PREEMPTED_SWAP = "preempted.swap"
PREEMPTED_RECOMPUTE = "preempted.recompute"
ENGINE_GAP = "engine.gap"
DELIVER = "deliver"
CLIENT = "client"

CAUSES: dict[str, str] = {
    TOKENIZE: "turning text into tokens, before the engine saw the request",
    GRAMMAR: "waiting for a compiled output constraint",
    TENANT_LIMIT: "waiting because the tenant was at one of its own limits",
    FAIRNESS: "waiting while others were owed service first",
    MEMORY: "waiting for KV blocks",
    CAPACITY: "waiting for a running slot or for room in a step",
    STEP_IN_FLIGHT: "waiting for the batch that was already being computed",
    SHARED_PREFIX: "waiting for another request that was computing the same prefix",
    PREFILL_OWN: "computing its own prompt",
    PREFILL_PROMOTE: "copying its cached prefix back from host memory",
    PREFILL_WAIT: "in the middle of its prompt, while the steps computed others",
    DECODE_OWN: "computing its own tokens, as if it were alone",
    DECODE_BATCH: "steps that were longer because other sequences decoded in them",
    DECODE_STALLED: "steps that were longer because of other requests' prompts",
    PREEMPTED_WAIT: "waiting after its blocks were taken",
    PREEMPTED_SWAP: "copying its blocks to host memory and back",
    PREEMPTED_RECOMPUTE: "computing again what preemption had thrown away",
    ENGINE_GAP: "between steps, or in a step that the machine was taken away from",
    DELIVER: "turning tokens into text and writing it out",
    CLIENT: "waiting for a client that read too slowly",
}
"""Every cause and what it means, in the order in which a request meets them. There are no others."""

_ROUNDING = 1e-12  # seconds that only the order of additions makes

PhaseName = Literal["receive", "queue", "prefill", "decode", "preempted", "deliver"]
Causes = tuple[tuple[str, float], ...]


class Phase(NamedTuple):
    """A stretch of a request's life, in seconds from its arrival; its causes sum to `end - start`."""

    name: PhaseName
    start: float
    end: float
    causes: Causes


class Blocker(NamedTuple):
    """A request whose prompt was computed meanwhile, and for how many seconds of step time it held this one up."""

    request_id: str
    tenant: str
    num_prompt: int
    seconds: float


class TokenCounts(NamedTuple):
    """Tokens of one request. `cached` of the prompt came from the prefix cache at first admission, `cached_host` of
    those from host memory; `recomputed` were computed a second time after a preemption."""

    prompt: int
    cached: int
    cached_host: int
    recomputed: int
    output: int


class Miss(NamedTuple):
    """Prompt blocks `[start, end)` that did not come from the cache, and why.

    `cold`: nobody had computed them here. `evicted`: they were cached, until `at` (seconds from arrival; before it
    where negative) when `tenant` needed the memory. `divergent`: something else is cached from token `at` on; `there`
    are a few of its tokens, for whoever may read them, and `texts` the prompt's and the cached text from there on.
    `namespace`: they are cached, for others. `partial`: the end of the prompt that fills no block (its last token is
    always computed). `off`: the request may not use the cache.
    """

    start: int
    end: int
    why: Literal["cold", "evicted", "divergent", "namespace", "partial", "off"]
    at: float | None = None
    tenant: str | None = None
    there: tuple[int, ...] = ()
    texts: tuple[str, str] | None = None


class Floors(NamedTuple):
    """What the request would have taken alone on this machine: with what the cache gave it, and without. No cache
    removes `decode_per_token` times the output tokens."""

    with_cache: float
    without_cache: float
    decode_per_token: float


@dataclass(frozen=True, slots=True)
class LedgerReport:
    """A closed ledger. `phases` tile the `e2e_seconds`; those before the first `decode` are what the first token took
    (`first_token_seconds` from arrival; None if there was none), and `first_deliver` is how that token got out while
    the engine went on. `blockers` are the heaviest over the whole life, `first_blockers` up to the first token."""

    e2e_seconds: float
    phases: tuple[Phase, ...]
    first_token_seconds: float | None
    tokens: TokenCounts
    floors: Floors
    num_steps: int = 0
    num_preemptions: int = 0
    misses: tuple[Miss, ...] = ()
    blockers: tuple[Blocker, ...] = ()
    first_blockers: tuple[Blocker, ...] = ()
    first_deliver: Causes = ()

    @property
    def causes(self) -> Causes:
        """(cause, seconds), in the order of `CAUSES`; causes without time are left out."""
        return _summed(phase.causes for phase in self.phases)

    @property
    def first_token_causes(self) -> Causes:
        """The same up to the first token; empty if there was none."""
        if self.first_token_seconds is None:
            return ()
        first = next(i for i, phase in enumerate(self.phases) if phase.name == "decode")
        return _summed([*(phase.causes for phase in self.phases[:first]), self.first_deliver])

    def framed(self, *, receive: Causes, deliver: Causes, first_deliver: Causes) -> LedgerReport:
        """The ledger as the server sees it: with what happened before the engine had the request, after its last
        token, and after its first."""
        offset, tail = _total(receive), _total(deliver)
        moved = tuple(phase._replace(start=phase.start + offset, end=phase.end + offset) for phase in self.phases)
        end = offset + self.e2e_seconds
        first = self.first_token_seconds
        return replace(
            self,
            e2e_seconds=end + tail,
            phases=(Phase("receive", 0.0, offset, receive), *moved, Phase("deliver", end, end + tail, deliver)),
            first_token_seconds=None if first is None else offset + first + _total(first_deliver),
            first_deliver=first_deliver,
        )

    def ended_at(self, seconds: float) -> LedgerReport:
        """The same without what happened after `seconds`: steps that ran on because the end was seen outside of the
        engine (a stop string, a client that hung up). A phase that is cut keeps its causes in proportion."""
        kept: list[Phase] = []
        for phase in self.phases:
            end = min(phase.end, seconds)
            if end <= phase.start and kept:
                break
            length = phase.end - phase.start
            part = max(0.0, end - phase.start) / length if length > 0.0 else 0.0
            kept.append(Phase(phase.name, phase.start, end, tuple((cause, s * part) for cause, s in phase.causes)))
        return replace(self, e2e_seconds=seconds, phases=tuple(kept))


class Occupant:
    """A prompt that is or was being computed, and the step time it has taken from everybody else."""

    __slots__ = ("num_prompt", "request_id", "seconds", "seq_id", "tenant")

    def __init__(self, seq_id: int, request_id: str, tenant: str, num_prompt: int) -> None:
        self.seq_id, self.request_id, self.tenant, self.num_prompt = seq_id, request_id, tenant, num_prompt
        self.seconds = 0.0


class Ledger:
    """The open ledger of one request; `LedgerBook` keeps it. Times are on the scheduler's clock.

    `since` is how far time is charged, and `gaps` what the book's count of gaps was then. `waits_for` is the cause of
    the present wait (None: that of everybody who was not looked at; `behind` is where those counts stood). `mark` is
    how many tokens had been computed when it was preempted: below it everything is computed again; 0 when that is done.
    `baseline` is the step time that prompts had taken before this request arrived.
    """

    __slots__ = (
        "arrival",
        "baseline",
        "behind",
        "behind_ahead",
        "first",
        "first_blockers",
        "gaps",
        "mark",
        "misses",
        "num_cached_host",
        "num_promoted",
        "num_recomputed",
        "num_retired",
        "num_steps",
        "phase",
        "phase_start",
        "phases",
        "seconds",
        "served",
        "since",
        "tenant",
        "waits_for",
    )

    def __init__(self, tenant: str, arrival: float) -> None:
        self.tenant = tenant
        self.arrival = arrival
        self.since = arrival
        self.gaps = 0.0
        self.seconds: defaultdict[str, float] = defaultdict(float)  # of the present phase
        self.phase: PhaseName = "queue"
        self.phase_start = arrival
        self.phases: list[Phase] = []
        self.waits_for: str | None = None
        self.behind: dict[str, float] = {}
        self.behind_ahead: dict[str, float] = {}
        self.served = False  # in a committed step since it was last admitted
        self.mark = 0
        self.first: float | None = None
        self.num_steps = 0
        self.num_recomputed = 0
        self.num_cached_host = 0
        self.num_promoted = 0  # blocks whose copy back from the host is charged
        self.misses: tuple[Miss, ...] = ()
        self.baseline: dict[Occupant, float] = {}
        self.num_retired = 0
        self.first_blockers: tuple[Blocker, ...] = ()

    def enter(self, phase: PhaseName, now: float) -> None:
        """End the present phase at `now`, up to where everything is charged, and begin another."""
        start, end = self.phase_start - self.arrival, now - self.arrival
        self.phases.append(Phase(self.phase, start, end, _summed([self.seconds.items()])))
        self.seconds.clear()
        self.phase, self.phase_start = phase, now


def _summed(parts: Iterable[Iterable[tuple[str, float]]]) -> Causes:
    total: dict[str, float] = {}
    for part in parts:
        for cause, seconds in part:
            total[cause] = total.get(cause, 0.0) + seconds
    return tuple((cause, total[cause]) for cause in CAUSES if abs(total.get(cause, 0.0)) > _ROUNDING)


def _total(causes: Causes) -> float:
    return sum(seconds for _, seconds in causes)
