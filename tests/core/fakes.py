"""An executor without tensors that notices every mistake in a block table.

A KV slot holds a fingerprint of the whole prefix up to its token. Before a chunk is computed, every slot it attends to
must hold the fingerprint that the sequence's own tokens give; so a block that was shared wrongly, published too early,
evicted while in use or never written is found in the step that reads it. The next token is a function of the
fingerprint alone, so a request's output does not depend on how it was scheduled: `generate` says what it must be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pellucid.core.config import SchedulerConfig
from pellucid.core.events import Event, Finished, TokensGenerated
from pellucid.core.invariants import check, check_plan
from pellucid.core.plan import StepPlan, StepResult, Transfer
from pellucid.core.request import Request
from pellucid.core.scheduler import Scheduler

EOS = 0
VOCABULARY = 11


def fingerprint(before: int, token: int) -> int:
    """The fingerprint of a prefix that goes on with `token`. Integers only: equal under every PYTHONHASHSEED."""
    return ((before * 1_000_003) ^ (token + 0x9E3779B9)) & 0xFFFFFFFFFFFF


def chain(tokens: Iterable[int]) -> list[int]:
    marks, mark = [], 1
    for token in tokens:
        mark = fingerprint(mark, token)
        marks.append(mark)
    return marks


def next_token(mark: int) -> int:
    return (mark >> 7) % VOCABULARY


def generate(request: Request, max_length: int) -> list[int]:
    """What the fake must answer, computed without blocks, chunks or a scheduler."""
    mark = chain(request.prompt)[-1]
    output: list[int] = []
    while len(output) < request.sampling.max_tokens and len(request.prompt) + len(output) < max_length:
        token = next_token(mark)
        output.append(token)
        stops = token in request.sampling.stop_token_ids
        if stops or (token == EOS and not request.sampling.ignore_eos):
            break
        mark = fingerprint(mark, token)
    return output


@dataclass
class Mirror:
    tokens: list[int]
    marks: list[int]
    table: list[int] = field(default_factory=list)


class FakeExecutor:
    """Executes plans at once when they are launched, as a device would: in order, ahead of the commits."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.block_size = block_size
        self.host: list[list[int | None]] = [[None] * block_size for _ in range(num_host_blocks)]
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.mirrors: dict[int, Mirror] = {}

    def launch(self, plan: StepPlan) -> StepResult:
        for seq_id in plan.released:
            del self.mirrors[seq_id]
        for new in plan.new:
            assert new.seq_id not in self.mirrors, "announced twice"
            self.mirrors[new.seq_id] = Mirror(list(new.token_ids), chain(new.token_ids))
        for update in plan.blocks:
            table = self.mirrors[update.seq_id].table
            assert update.start <= len(table), "a hole in the block table"
            table[update.start :] = update.blocks
        for transfer in plan.transfers:
            self._transfer(transfer)
        tokens = tuple(self._compute(*chunk) for chunk in plan.chunks)
        return StepResult(plan.step_id, tokens, seconds=0.001, transfers_done=tuple(t.id for t in plan.transfers))

    def collect(self, ticket: StepResult) -> StepResult:
        return ticket

    def _transfer(self, transfer: Transfer) -> None:
        size = self.block_size
        for source, target in transfer.pairs:
            if transfer.kind == "out":
                self.host[target] = self.slots[source * size : (source + 1) * size]
            else:
                self.slots[target * size : (target + 1) * size] = self.host[source]

    def _compute(self, seq_id: int, start: int, end: int, samples: bool) -> tuple[int, ...]:
        mirror = self.mirrors[seq_id]
        for position in range(start):
            held = self.slots[self._slot(mirror, position)]
            assert held == mirror.marks[position], f"sequence {seq_id}: KV of token {position} is not its own"
        for position in range(start, end):
            self.slots[self._slot(mirror, position)] = mirror.marks[position]
        if not samples:
            return ()
        assert end == len(mirror.tokens), "samples before the end of what is known"
        token = next_token(mirror.marks[-1])
        mirror.tokens.append(token)
        mirror.marks.append(fingerprint(mirror.marks[-1], token))
        return (token,)

    def _slot(self, mirror: Mirror, position: int) -> int:
        return mirror.table[position // self.block_size] * self.block_size + position % self.block_size


class Run:
    """A scheduler and a fake executor, `depth` steps in flight, every law checked after every call."""

    def __init__(self, config: SchedulerConfig, depth: int = 1, **scheduler_options: object) -> None:
        self.config = config
        self.depth = depth
        self.scheduler = Scheduler(config, **scheduler_options)  # type: ignore[arg-type]
        self.executor = FakeExecutor(config.num_blocks, config.block_size, config.num_host_blocks)
        self.results: deque[StepResult] = deque()
        self.plans: list[StepPlan] = []
        self.events: list[Event] = []
        self.ended_at: dict[str, float] = {}
        self.now = 0.0

    def add(self, request: Request) -> None:
        self.scheduler.add(request, self.now)
        check(self.scheduler)

    def abort(self, request_id: str) -> None:
        self._note(self.scheduler.abort(request_id, self.now))

    def schedule(self) -> StepPlan | None:
        running = self.scheduler.running.values()
        policy = self.scheduler.waiting
        ahead = policy.deferred() | policy.capped(s for s in running if s.num_due > 1)[0]
        due = [s for s in running if s.num_due == 1 and s.request.tenant not in ahead]
        oldest = min((s for s in running), key=lambda s: s.id, default=None)
        oldest_due = oldest is not None and oldest.num_due > 0
        plan = self.scheduler.schedule(self.now)
        check(self.scheduler)
        served = set() if plan is None else {chunk.seq_id for chunk in plan.chunks}
        for sequence in due:
            assert sequence.id in served or sequence.id not in self.scheduler.running, f"{sequence!r} was skipped"
        if (
            self.config.policy == "fcfs"
            and oldest_due
            and all(s.id >= oldest.id for s in self.scheduler.running.values())
        ):
            assert oldest is not None
            assert oldest.id in served, f"the oldest, {oldest!r}, was skipped or preempted"
        if plan is not None:
            check_plan(plan, self.config)
            self.plans.append(plan)
            self.results.append(self.executor.launch(plan))
        return plan

    def commit(self) -> None:
        self.now += 0.001
        self._note(self.scheduler.commit(self.results.popleft(), self.now))

    def _note(self, events: list[Event]) -> None:
        self.events += events
        self.ended_at |= {event.request_id: self.now for event in events if isinstance(event, Finished)}
        check(self.scheduler)

    def step(self) -> bool:
        """Fill the pipeline and commit its oldest step; False if there was nothing to do."""
        while len(self.results) < self.depth and self.schedule() is not None:
            pass
        if not self.results:
            return False
        self.commit()
        return True

    def finish(self, max_steps: int = 100_000) -> None:
        for _ in range(max_steps):
            if not self.step():
                break
        assert not self.scheduler.has_work, f"stuck with {self.scheduler.sequences()}"

    def outputs(self) -> dict[str, list[int]]:
        """Generated tokens by request id."""
        found: dict[str, list[int]] = {}
        for event in self.events:
            if isinstance(event, TokensGenerated):
                found.setdefault(event.request_id, []).extend(event.token_ids)
        return found

    def run(self, requests: Sequence[Request]) -> dict[str, list[int]]:
        for request in requests:
            self.add(request)
        self.finish()
        return self.outputs()
