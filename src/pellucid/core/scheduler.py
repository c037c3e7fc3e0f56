"""Decides what each step computes. Four calls: `add`, `abort`, `schedule`, `commit`; no clock, no device, no I/O.

A step gives every running sequence that is one token behind its token (decodes). What token budget and step target
leave goes to those that are further behind, running or waiting, in the policy's order (`core/policy.py`); with a step
target, half of it goes first to prompts that a step could read whole, shortest first, so that a short one never waits
for a long one to be read. There is no prefill phase: a prompt is a sequence that is far behind.

`schedule` may be called again before the previous plan is committed; chunks then start at `num_scheduled`, and the
input token may be "the one sampled in the step before". Steps are executed and committed in the order of their plans.

Guarantees: the budget is never exceeded by chunked work; every running sequence that is one token behind is served in
every step (token_budget >= max_running) unless its tenant is more than a quantum ahead of one that waits; the oldest
running sequence is never preempted, so the system as a whole always progresses; what does not fit the pool or the
context is refused when it is added, and never later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush

from pellucid.core import ledger
from pellucid.core.admission import Admission
from pellucid.core.config import SchedulerConfig
from pellucid.core.cost import FittedCost
from pellucid.core.draft import Bound, Draft
from pellucid.core.errors import RequestRejected
from pellucid.core.events import (
    Admitted,
    BlockEvent,
    Event,
    Fate,
    Finished,
    FinishReason,
    Preempted,
    Queued,
    Resumed,
    TokensGenerated,
)
from pellucid.core.input_log import InputLog
from pellucid.core.kv_manager import KVManager, PrefixMatch
from pellucid.core.launch import Launched, counted, seal
from pellucid.core.ledger_book import LedgerBook
from pellucid.core.misses import MissBook
from pellucid.core.plan import Chunk, StepPlan, StepResult
from pellucid.core.policy import make_policy, short_first
from pellucid.core.preemption import choose_victim
from pellucid.core.pressure import Pressure
from pellucid.core.request import Request
from pellucid.core.room import Room
from pellucid.core.sequence import Sequence, Status
from pellucid.core.service import ServiceBook
from pellucid.core.shared_prefix import PrefixClaims
from pellucid.core.tenants import Tenant
from pellucid.core.tiers import TierCosts

SHORT_SHARE = 0.5
"""The part of a step's prompt time that short prompts get before the policy's order is asked."""


class Scheduler:
    """The whole state of the decision: sequences, queue, pool, claims. See the module's text."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        input_log: InputLog | None = None,
        on_block_event: Callable[[BlockEvent], None] | None = None,
    ) -> None:
        self.config = config
        self.cost = FittedCost(config.cost_prior)
        self.tiers = TierCosts(config, self.cost)
        self.pressure = Pressure()
        self.book = ServiceBook(config.tenants, config.fair_quantum)
        self.ledgers = LedgerBook(
            self.cost,
            config.token_budget,
            floor=FittedCost(config.cost_prior),
            bytes_per_block=config.bytes_per_block,
        )
        self.waiting = make_policy(config, self.book)
        self.running: dict[int, Sequence] = {}  # by id, in order of admission
        self.admission = Admission(config, self.cost, self.book, self.waiting, self.running)
        self._on_block_event = on_block_event
        self.kv = KVManager(
            config.num_blocks,
            config.block_size,
            prefix_cache=config.prefix_cache,
            num_host_blocks=config.num_host_blocks,
            tiers=self.tiers if config.num_host_blocks else None,
            on_block_event=self._note_block,
        )
        self.misses = MissBook(self.kv.tree, config.block_size)
        self.room = Room(config, self.kv, self.running, self.waiting, self.book, self.pressure)
        self._set_shares(config.tenants)
        self.claims = PrefixClaims(config.block_size, config.prefix_wait_steps)
        self.in_flight: deque[Launched] = deque()
        self._head: Sequence | None = None  # the waiting sequence that did not fit and is being passed by others
        self._deadlines: list[tuple[float, int, Sequence]] = []  # a heap of what waits
        self._by_request: dict[str, Sequence] = {}
        self._released: list[int] = []  # ids that the executor knows and may forget with the next plan
        self._events: list[Event] = []  # of schedule(), handed out by the next commit or abort
        self._next_seq_id = 0
        self._next_step_id = 0
        self._num_recomputed = 0  # tokens of preempted sequences that the step being decided computes again
        self._log = input_log
        if input_log is not None:
            input_log.config(config)

    # -- what comes in -------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Queue a request; what it may expect comes out with the next events (`Queued`).

        Raises RequestRejected, with the numbers, if it could never be served, or not now.
        """
        if self._log is not None:
            self._log.add(request, now)
        if request.id in self._by_request:
            raise RequestRejected("duplicate_id", f"request id {request.id!r} is already in use")
        num_prompt = len(request.prompt)
        num_output = min(request.sampling.max_tokens, self.config.max_output_tokens(num_prompt))
        sequence = Sequence(self._next_seq_id, request, self.config.block_size, num_prompt + num_output)
        sequence.num_matched = self.kv.match(sequence).num_blocks * self.config.block_size
        expected = self.admission.check(sequence, now)
        self._next_seq_id += 1
        self._by_request[request.id] = sequence
        self._events.append(Queued(request.id, expected))
        self.book.wait(request.tenant)
        self.waiting.push(sequence)
        self.ledgers.add(sequence, now)
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, sequence.id, sequence))

    def abort(self, request_id: str, now: float) -> list[Event]:
        """End a request now, wherever it is; its blocks are free at once. An unknown id is one that ended before."""
        if self._log is not None:
            self._log.abort(request_id, now)
        sequence = self._by_request.get(request_id)
        if sequence is not None:
            self._finish(sequence, "abort", now)
        return self.take_events()

    def reconfigure(self, tenants: tuple[Tenant, ...], now: float) -> None:
        """Take new weights and limits of tenants; requests that are already queued or running stay."""
        if self._log is not None:
            self._log.reconfigure(tenants, now)
        self.config = replace(self.config, tenants=tenants)
        self.book.reconfigure(tenants)
        self._set_shares(tenants)

    def _set_shares(self, tenants: tuple[Tenant, ...]) -> None:
        self.kv.shares = {t.name: int(t.kv_share * self.config.num_blocks) for t in tenants if t.kv_share < 1.0}

    def _note_block(self, event: BlockEvent) -> None:
        self.misses.on_block_event(event)
        if self._on_block_event is not None:
            self._on_block_event(event)

    def take_events(self) -> list[Event]:
        """What happened since events were last handed out; `commit` and `abort` return it as well."""
        events, self._events = self._events, []
        return events

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
        self.ledgers.begin_round(now)
        self._expire(now)
        draft = Draft(self.config, self.cost)
        deferred = self._continue_decodes(draft, now)
        whole = draft.bound()
        if len(self.waiting) or self._prompts(draft):
            self._serve_prompts(draft, whole, now)
            full = len(self.running) >= self.config.max_running
            no_room = draft.preempted or (draft.closed and not full)
            self.ledgers.end_round(ledger.MEMORY if no_room else ledger.CAPACITY, self.waiting.deferred())
        self._serve_deferred(deferred, draft, whole, now)
        plan = self._seal(draft, now)
        if self._log is not None:
            self._log.schedule(now, plan)
        return plan

    def _expire(self, now: float) -> None:
        """End requests whose deadline passed before anything of theirs was computed."""
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = heappop(self._deadlines)[2]
            if sequence.status is Status.WAITING and sequence.num_preemptions == 0:
                self._finish(sequence, "deadline", now)

    def _continue_decodes(self, draft: Draft, now: float) -> list[Sequence]:
        """One token to each running sequence that is one behind, before any prompt; returns those that may wait."""
        behind = self.waiting.deferred()
        capped, share = self.waiting.capped(s for s in self.running.values() if s.num_due > 1)
        draft.patient = behind | capped
        decodes = [sequence for sequence in self.running.values() if sequence.num_due == 1]
        if capped:  # who had to wait last time comes first
            decodes.sort(key=lambda sequence: (sequence.request.tenant in capped, sequence.last_step))
        later = []
        for sequence in decodes:
            if sequence.status is not Status.RUNNING:
                continue  # preempted for one before it
            tenant = sequence.request.tenant
            if tenant in behind or (tenant in capped and draft.past(share)):
                later.append(sequence)
            elif draft.budget_left > 0:
                self._grant(sequence, 1, draft, now)
        return later

    def _serve_deferred(self, deferred: list[Sequence], draft: Draft, whole: Bound, now: float) -> None:
        """What the others left, to sequences that may wait."""
        for sequence in deferred:
            if sequence.status is not Status.RUNNING or sequence.id in draft.chunks:
                continue  # preempted in this step, perhaps to start again in it
            if draft.room(sequence, 1, whole):
                self._grant(sequence, 1, draft, now)

    def _serve_prompts(self, draft: Draft, whole: Bound, now: float) -> None:
        """Share what the draft leaves among prompts: half to short ones first, then all in the policy's order."""
        draft.promised = sum(self.room.num_promised(sequence) for sequence in self.running.values())
        for sequence in self.waiting.window():
            sequence.num_matched = self.kv.match(sequence).num_blocks * self.config.block_size
        half = draft.bound(SHORT_SHARE)
        if half.seconds is not None:
            places = self.config.max_running - len(self.running)
            short = short_first(self.waiting, self._prompts(draft), places, self.config.token_budget)
            for sequence in short:
                if sequence.request.tenant in draft.patient:
                    continue
                if draft.exhausted(half):
                    break
                self._serve(sequence, draft, half, now)
        started = self._prompts(draft)
        num_left = len(started)
        for sequence in self.waiting.order(started):
            if draft.exhausted(whole) or (num_left == 0 and draft.closed):
                break
            num_left -= sequence.status is not Status.WAITING
            self._serve(sequence, draft, whole, now)

    def _prompts(self, draft: Draft) -> list[Sequence]:
        """Running sequences that could compute more in this step than they have been given."""
        chunks = draft.chunks
        return [
            sequence
            for sequence in self.running.values()
            if (due := sequence.num_due) > 1 or (due == 1 and sequence.id in chunks and not chunks[sequence.id].samples)
        ]

    def _serve(self, sequence: Sequence, draft: Draft, bound: Bound, now: float) -> None:
        """Give a prompt as much as fits, starting it if it waits and may start."""
        if sequence.status is Status.WAITING:
            if draft.closed or sequence.id in draft.refused:
                return
            if not self._admit(sequence, draft, now):
                return
        elif sequence.status is not Status.RUNNING:
            return  # preempted for one before it
        count = draft.room(sequence, sequence.num_due, bound)
        if count:
            self._grant(sequence, count, draft, now)

    def _grant(self, sequence: Sequence, count: int, draft: Draft, now: float) -> None:
        """Compute `count` due tokens of a running sequence, or as many as the pool has room for, but at least one;
        others are preempted if they must."""
        block_size = self.config.block_size
        while True:
            num_before = len(sequence.block_table)
            if sequence.num_scheduled + count <= num_before * block_size:
                break  # as most decodes
            if self.config.chunked_prefill:
                room = num_before + self.kv.num_reclaimable
                count = max(1, min(count, room * block_size - sequence.num_scheduled))
            self.misses.reclaiming(sequence.request.tenant, now)
            if self.kv.reserve(sequence, sequence.num_scheduled + count):
                break
            victim = choose_victim(self.running.values(), self.waiting.victim_key)
            if victim is None:  # transfers under way hold what is missing
                return
            draft.preempted = True
            draft.num_preempted += 1
            self._preempt(victim, draft, now)
            if victim is sequence:
                return
        draft.promised -= len(sequence.block_table) - num_before
        draft.num_moved = self.kv.num_moves
        draft.put(sequence, count)
        sequence.last_step = self._next_step_id
        self._charge_prompt(sequence)

    def _charge_prompt(self, sequence: Sequence) -> None:
        end = min(sequence.num_scheduled, sequence.num_prompt)
        if end > sequence.num_charged:
            self.book.charge(sequence.request.tenant, prompt=end - sequence.num_charged)
            sequence.num_charged = end

    def _admit(self, sequence: Sequence, draft: Draft, now: float) -> bool:
        """Start a waiting sequence if slots, memory and its tenant's limits allow it, preempting whoever must give way.

        One that does not fit (`core/room.py`) is passed by others, within a bound.
        """
        head = self._head
        passes = head is not None and head.id < sequence.id
        closed = head is not None and passes and head.num_overtaken >= self._max_overtakes(head)
        if head is not None and closed and not self.waiting.may_pass(sequence, head):
            self.ledgers.waits(sequence, ledger.MEMORY)
            return False
        if self.room.at_tenant_limit(sequence):
            self.ledgers.waits(sequence, ledger.TENANT_LIMIT)
            return False
        match = self.claims.match(sequence, self.kv)
        if match is None:
            self.ledgers.waits(sequence, ledger.SHARED_PREFIX)
            return False
        if not self.room.fits(sequence, match, draft):
            victims = self.room.victims_for(sequence, match, draft)
            if not victims:
                full = len(self.running) >= self.config.max_running
                self.ledgers.waits(sequence, ledger.CAPACITY if full else ledger.MEMORY)
                draft.refused.add(sequence.id)
                if not full and not passes:
                    self._head = sequence
                return False
            for victim in victims:
                draft.promised -= self.room.num_promised(victim)
                self._preempt(victim, draft, now)
        if head is sequence:
            self._head = None
        elif head is not None and passes:
            head.num_overtaken += 1
        self._start(sequence, match, now)
        draft.num_moved = self.kv.num_moves
        draft.promised += self.room.num_promised(sequence)
        return True

    def _max_overtakes(self, head: Sequence) -> int:
        """Who was preempted is passed by nobody: newcomers would evict what is still cached of it."""
        return 0 if head.num_preemptions else self.config.max_overtakes

    def _start(self, sequence: Sequence, match: PrefixMatch, now: float) -> None:
        self.waiting.remove(sequence)
        self.book.start(sequence.request.tenant)
        sequence.become(Status.RUNNING)
        self.running[sequence.id] = sequence
        self.kv.attach(sequence, match)
        self.claims.renew(sequence)
        self.ledgers.start(sequence, now)
        request = sequence.request
        kept = match.num_on_device * self.config.block_size
        if sequence.num_preemptions:
            self.kv.unwant(sequence.wanted)
            sequence.wanted = []
            recomputed = max(0, sequence.num_lost - sequence.num_computed)
            self._num_recomputed += recomputed
            self._events.append(Resumed(request.id, kept, sequence.num_computed - kept, recomputed))
            return
        sequence.num_cached = sequence.num_charged = sequence.num_computed
        sequence.ledger.num_cached_host = sequence.num_cached - kept
        sequence.ledger.misses = self.misses.explain(sequence, match.nodes, self.kv.match_limit(sequence))
        self.book.charge(request.tenant, cached=sequence.num_cached)
        self._events.append(Admitted(request.id, sequence.num_prompt, sequence.num_cached, now - request.arrival))

    def _preempt(self, sequence: Sequence, draft: Draft, now: float) -> None:
        """Take all blocks back; the sequence waits in its old place.

        Its full blocks stay cached for as long as nobody needs them; those that are evicted are copied to the host
        where that is predicted to be cheaper than to compute them again.
        """
        draft.withdraw(sequence)
        sequence.num_lost = sequence.num_computed
        fate: Fate = "recompute"
        if self.tiers.swap_pays(sequence.num_published):
            fate = "swap"
            sequence.wanted = self.kv.want(sequence)
        self.ledgers.preempt(sequence, now)
        self._leave_running(sequence)
        self.book.stop_to_wait(sequence.request.tenant)
        sequence.become(Status.WAITING)
        sequence.epoch += 1
        sequence.num_pending = 0
        sequence.num_preemptions += 1
        self.waiting.push(sequence)
        self._events.append(Preempted(sequence.request.id, sequence.num_lost, fate))

    def _seal(self, draft: Draft, now: float) -> StepPlan | None:
        """Freeze the draft into a plan and remember what was launched."""
        self.pressure.step(self.config.token_budget - draft.budget_left, self._num_recomputed, draft.num_preempted)
        self._num_recomputed = 0
        draft.num_moved = self.kv.num_moves
        transfers = self.kv.take_transfers()
        if not draft.chunks and not transfers:
            return None
        plan, parts = seal(self._next_step_id, draft.chunks, self.running, tuple(self._released), transfers)
        self._next_step_id += 1
        self._released = []
        self.in_flight.append(Launched(plan.step_id, draft.features, parts))
        self.ledgers.launch(now)
        return plan

    # -- fold in -------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult, now: float) -> list[Event]:
        """Fold the result of the oldest launched step back in; returns what happened since the last call."""
        if self._log is not None:
            self._log.commit(result, now)
        step_id, features, parts = self.in_flight.popleft()
        if result.step_id != step_id or len(result.tokens) != len(parts):
            raise ValueError(
                f"result of step {result.step_id} with {len(result.tokens)} chunks; expected step {step_id} with "
                f"{len(parts)}"
            )
        chunks = counted(parts)
        self.ledgers.commit(chunks, now, features.copied_bytes)
        self.cost.observe(features, result.seconds)
        for transfer in result.transfers_done:
            self.kv.transfer_done(transfer)
        for (sequence, chunk, counts), tokens in zip(chunks, result.tokens, strict=True):
            if counts:
                self._fold(sequence, chunk, tokens, now)
        return self.take_events()

    def _fold(self, sequence: Sequence, chunk: Chunk, tokens: tuple[int, ...], now: float) -> None:
        sequence.num_computed = chunk.end
        sequence.num_pending -= chunk.samples
        if self.kv.publish(sequence):
            self.claims.renew(sequence)
        if not tokens:
            return
        accepted, reason = self._accept(sequence, tokens)
        sequence.tokens.extend(accepted)
        self.book.charge(sequence.request.tenant, output=len(accepted))
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
        report = self.ledgers.finish(sequence, now)
        if sequence.status is Status.RUNNING:
            self._leave_running(sequence)
            self.book.stop(sequence.request.tenant)
            self.admission.finished(sequence.num_generated)
        else:
            self.waiting.remove(sequence)
            self.book.unwait(sequence.request.tenant)
            self.kv.unwant(sequence.wanted)
        if self._head is sequence:
            self._head = None
        sequence.become(Status.FINISHED)
        del self._by_request[sequence.request.id]
        self._events.append(
            Finished(
                sequence.request.id,
                reason,
                sequence.num_prompt,
                sequence.num_generated,
                sequence.num_cached,
                report,
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
