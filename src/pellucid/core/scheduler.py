"""Decides what each step computes. Four calls: `add`, `abort`, `schedule`, `commit`; no clock, no device, no I/O.

A step gives every running sequence what is due to it: one token to those that are one behind (decodes), then what is
left of the token budget to those that are further behind (prompts, in order of arrival), then to newly admitted ones.
There is no prefill phase: a prompt is a sequence that is far behind.

`schedule` may be called again before the previous plan is committed; chunks then start at `num_scheduled`, and the
input token may be "the one sampled in the step before". Steps are executed and committed in the order of their plans.

Guarantees: the budget is never exceeded by chunked work; every running sequence that is one token behind is served in
every step (token_budget >= max_running); the oldest running sequence is never preempted, so the system as a whole
always progresses; what does not fit the pool or the context is refused when it is added, and never later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from pellucid.core import ledger
from pellucid.core.config import SchedulerConfig
from pellucid.core.errors import RequestRejected
from pellucid.core.events import Admitted, BlockEvent, Event, Finished, FinishReason, Preempted, TokensGenerated
from pellucid.core.input_log import InputLog
from pellucid.core.kv_manager import KVManager, PrefixMatch
from pellucid.core.plan import BlockUpdate, Chunk, NewSequence, StepPlan, StepResult
from pellucid.core.policy import Fcfs, Policy
from pellucid.core.preemption import choose_victim
from pellucid.core.request import Request
from pellucid.core.sequence import Sequence, Status
from pellucid.core.shared_prefix import PrefixClaims


class Launched(NamedTuple):
    """A chunk of a launched step: whose it is, and the epoch in which it was planned."""

    sequence: Sequence
    chunk: Chunk
    epoch: int


class Draft:
    """The step being decided: chunks by sequence, and what is left of the budget."""

    def __init__(self, budget: int) -> None:
        self.budget_left = budget
        self.chunks: dict[int, Chunk] = {}
        self.preempted = False

    def put(self, chunk: Chunk) -> None:
        self.chunks[chunk.seq_id] = chunk
        self.budget_left -= chunk.num_tokens

    def withdraw(self, sequence: Sequence) -> None:
        """Take back what was given to `sequence` in this step, if anything."""
        chunk = self.chunks.pop(sequence.id, None)
        if chunk is not None:
            self.budget_left += chunk.num_tokens


class Scheduler:
    """The whole state of the decision: sequences, queue, pool, claims. See the module's text."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        policy: Policy | None = None,
        input_log: InputLog | None = None,
        on_block_event: Callable[[BlockEvent], None] | None = None,
    ) -> None:
        self.config = config
        self.waiting: Policy = Fcfs() if policy is None else policy
        self.running: dict[int, Sequence] = {}  # by id, in order of admission
        self.kv = KVManager(
            config.num_blocks, config.block_size, prefix_cache=config.prefix_cache, on_block_event=on_block_event
        )
        self.claims = PrefixClaims(config.block_size)
        self.in_flight: deque[tuple[int, list[Launched]]] = deque()
        self._by_request: dict[str, Sequence] = {}
        self._released: list[int] = []  # ids that the executor knows and may forget with the next plan
        self._events: list[Event] = []  # of schedule(), handed out by the next commit or abort
        self._next_seq_id = 0
        self._next_step_id = 0
        self._log = input_log
        if input_log is not None:
            input_log.config(config)

    # -- what comes in -------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Queue a request. Raises RequestRejected, with the numbers, if it could never be served."""
        if self._log is not None:
            self._log.add(request, now)
        if request.id in self._by_request:
            raise RequestRejected("duplicate_id", f"request id {request.id!r} is already in use")
        num_prompt = len(request.prompt)
        num_output = min(request.sampling.max_tokens, self.config.max_output_tokens(num_prompt))
        sequence = Sequence(self._next_seq_id, request, self.config.block_size, num_prompt + num_output)
        self._next_seq_id += 1
        self._by_request[request.id] = sequence
        self.waiting.push(sequence)

    def abort(self, request_id: str, now: float) -> list[Event]:
        """End a request now, wherever it is; its blocks are free at once. An unknown id is one that ended before."""
        if self._log is not None:
            self._log.abort(request_id, now)
        sequence = self._by_request.get(request_id)
        if sequence is not None:
            self._finish(sequence, "abort", now)
        return self._take_events()

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._by_request)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def sequences(self) -> list[Sequence]:
        """All sequences that have not ended, in order of arrival."""
        return sorted(self._by_request.values(), key=lambda sequence: sequence.id)

    # -- decide --------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """Decide the next step; None if nothing can be computed until something is added or committed."""
        draft = Draft(self.config.token_budget)
        self._continue_running(draft, now)
        if not draft.preempted:
            self._admit_waiting(draft, now)
        plan = self._seal(draft)
        if self._log is not None:
            self._log.schedule(now, plan)
        return plan

    def _continue_running(self, draft: Draft, now: float) -> None:
        """Due decodes first, so that no prompt can take their place; then prompts, oldest first."""
        running = list(self.running.values())
        decodes = [sequence for sequence in running if sequence.num_due == 1]
        prompts = sorted((s for s in running if s.num_due > 1), key=lambda sequence: sequence.id)
        for sequence in decodes + prompts:
            if draft.budget_left <= 0:
                break
            if sequence.status is Status.RUNNING:  # it may have been preempted for one before it
                self._grant(sequence, draft, now)

    def _grant(self, sequence: Sequence, draft: Draft, now: float) -> None:
        """Give a running sequence as much of what is due as budget and pool allow, preempting others if it must."""
        while True:
            count = self._num_grantable(sequence, draft)
            if self.kv.reserve(sequence, sequence.num_scheduled + count):
                break
            victim = choose_victim(self.running.values())
            if victim is None:  # transfers under way hold what is missing
                return
            self._preempt(victim, draft, now)
            if victim is sequence:
                return
        start, end = sequence.num_scheduled, sequence.num_scheduled + count
        samples = end == sequence.num_known
        draft.put(Chunk(sequence.id, start, end, samples))
        sequence.num_scheduled = end
        sequence.num_pending += samples

    def _num_grantable(self, sequence: Sequence, draft: Draft) -> int:
        """Tokens to compute for `sequence`: what is due, within budget and the blocks at hand, but at least one."""
        if not self.config.chunked_prefill:
            return sequence.num_due
        room = len(sequence.block_table) + self.kv.num_reclaimable
        fitting = room * self.config.block_size - sequence.num_scheduled
        return max(1, min(sequence.num_due, draft.budget_left, fitting))

    def _admit_waiting(self, draft: Draft, now: float) -> None:
        """Start waiting sequences in the policy's order while slots, budget and memory last.

        A sequence is admitted only if all its tokens fit beside what every running one needs up to its next token:
        otherwise prompts would be started that preempt each other half way. The first that does not fit ends the round.
        """
        promised = sum(self._num_promised(sequence) for sequence in self.running.values())
        for sequence in self.waiting:
            if len(self.running) >= self.config.max_running or draft.budget_left <= 0:
                return
            match = self._match_unless_awaiting(sequence)
            if match is None:
                continue
            if not self.kv.can_attach(match, self._num_needed(sequence), promised):
                return
            self._start(sequence, match, draft, now)
            self._grant(sequence, draft, now)
            promised += self._num_promised(sequence)

    def _num_promised(self, sequence: Sequence) -> int:
        """Blocks a running sequence still needs for the tokens it has and the next one."""
        return self.kv.num_blocks_missing(sequence, self._num_needed(sequence))

    def _num_needed(self, sequence: Sequence) -> int:
        """Slots for what the sequence will have after its next sample; the last token of all is never computed on."""
        return min(max(sequence.num_known, sequence.num_tokens + 1), sequence.max_length - 1)

    def _match_unless_awaiting(self, sequence: Sequence) -> PrefixMatch | None:
        """The sequence's cached prefix, or None while another sequence is computing the block that would follow it."""
        patient = sequence.num_waited_steps < self.config.prefix_wait_steps
        if patient and sequence.awaited is not None and self.claims.stands(sequence.awaited):
            sequence.num_waited_steps += 1
            return None
        match = self.kv.match(sequence)
        sequence.awaited = self.claims.awaited(sequence, match, self.kv.match_limit(sequence))
        if patient and sequence.awaited is not None:
            sequence.num_waited_steps += 1
            return None
        sequence.awaited = None
        return match

    def _start(self, sequence: Sequence, match: PrefixMatch, draft: Draft, now: float) -> None:
        self.waiting.remove(sequence)
        sequence.become(Status.RUNNING)
        self.running[sequence.id] = sequence
        self.kv.attach(sequence, match)
        self.claims.renew(sequence)
        sequence.ledger.switch(ledger.PREFILL, now)
        if sequence.num_preemptions == 0:
            sequence.num_cached = sequence.num_computed
            queued = now - sequence.request.arrival
            self._events.append(Admitted(sequence.request.id, sequence.num_prompt, sequence.num_cached, queued))

    def _preempt(self, sequence: Sequence, draft: Draft, now: float) -> None:
        """Take all blocks back; the sequence waits in its old place and computes again what the cache has lost."""
        draft.preempted = True
        draft.withdraw(sequence)
        num_lost = sequence.num_computed
        self._leave_running(sequence)
        sequence.become(Status.WAITING)
        sequence.epoch += 1
        sequence.num_pending = 0
        sequence.num_preemptions += 1
        sequence.ledger.switch(ledger.PREEMPTED, now)
        self.waiting.push(sequence)
        self._events.append(Preempted(sequence.request.id, num_lost))

    def _seal(self, draft: Draft) -> StepPlan | None:
        """Freeze the draft into a plan and remember what was launched."""
        if not draft.chunks:
            return None
        launched = [Launched(self.running[i], chunk, self.running[i].epoch) for i, chunk in draft.chunks.items()]
        new, updates = [], []
        for sequence, _, _ in launched:
            if not sequence.announced:
                sequence.announced = True
                request = sequence.request
                new.append(NewSequence(sequence.id, tuple(sequence.tokens), sequence.num_prompt, request.sampling))
            if sequence.num_table_sent < len(sequence.block_table):
                blocks = tuple(sequence.block_table[sequence.num_table_sent :])
                updates.append(BlockUpdate(sequence.id, sequence.num_table_sent, blocks))
                sequence.num_table_sent = len(sequence.block_table)
        plan = StepPlan(
            step_id=self._next_step_id,
            chunks=tuple(draft.chunks.values()),
            new=tuple(new),
            blocks=tuple(updates),
            released=tuple(self._released),
        )
        self._next_step_id += 1
        self._released = []
        self.in_flight.append((plan.step_id, launched))
        return plan

    # -- fold in -------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult, now: float) -> list[Event]:
        """Fold the result of the oldest launched step back in; returns what happened since the last call."""
        if self._log is not None:
            self._log.commit(result, now)
        step_id, launched = self.in_flight.popleft()
        if result.step_id != step_id or len(result.tokens) != len(launched):
            raise ValueError(
                f"result of step {result.step_id} with {len(result.tokens)} chunks; expected step {step_id} with "
                f"{len(launched)}"
            )
        for (sequence, chunk, epoch), tokens in zip(launched, result.tokens, strict=True):
            # Ended or preempted after the launch: the blocks are gone, and so is what was computed into them.
            if sequence.status is Status.RUNNING and sequence.epoch == epoch:
                self._fold(sequence, chunk, tokens, now)
        return self._take_events()

    def _fold(self, sequence: Sequence, chunk: Chunk, tokens: tuple[int, ...], now: float) -> None:
        sequence.num_computed = chunk.end
        sequence.num_pending -= chunk.samples
        if self.kv.publish(sequence):
            self.claims.renew(sequence)
        if not tokens:
            return
        accepted, reason = self._accept(sequence, tokens)
        sequence.tokens.extend(accepted)
        sequence.ledger.switch(ledger.DECODE, now)
        self._events.append(TokensGenerated(sequence.request.id, accepted, sequence.num_cached))
        if reason is not None:
            self._finish(sequence, reason, now)

    def _accept(self, sequence: Sequence, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """The leading `tokens` up to and including the one that ends the sequence, and why it ends."""
        sampling = sequence.request.sampling
        for count, token in enumerate(tokens, start=1):
            if token in sampling.stop_token_ids or (token in self.config.eos_token_ids and not sampling.ignore_eos):
                return tokens[:count], "stop"
            if sequence.num_tokens + count >= sequence.max_length:
                return tokens[:count], "length"
        return tokens, None

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        if sequence.status is Status.RUNNING:
            self._leave_running(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.become(Status.FINISHED)
        del self._by_request[sequence.request.id]
        self._events.append(
            Finished(
                sequence.request.id,
                reason,
                sequence.num_prompt,
                sequence.num_generated,
                sequence.num_cached,
                sequence.ledger.close(now),
            )
        )

    def _leave_running(self, sequence: Sequence) -> None:
        """Out of the running set: no claim, no blocks, and the executor forgets it if it has heard of it."""
        del self.running[sequence.id]
        self.claims.drop(sequence)
        if sequence.announced:
            self._released.append(sequence.id)
            sequence.announced = False
        self.kv.release(sequence)

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events
