"""Charges every open request's time to causes: the scheduler's one collaborator for "where did the time go".

The engine's own time is a line of alternating stretches: *computing* (a step is in flight) and *gaps* (none is). A
request is charged when something is known about it: a sequence of a step when the step is committed, a waiting one when
the reason of its wait changes. Each reading covers exactly the time since the one before, so no interval is charged
twice and none is missed; `residue_seconds` counts what nevertheless does not add up, and must stay 0.

Cost: a step costs a few additions for each of its sequences and nothing for those that wait: whoever was not looked at
in a round of admission waits for the round's own reason, of which only running totals are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from heapq import nlargest
from itertools import islice

from pellucid.core import ledger as cause
from pellucid.core.attribution import StepShares, share_step
from pellucid.core.cost import CostModel, StepFeatures
from pellucid.core.ledger import Blocker, Floors, Ledger, LedgerReport, Occupant, TokenCounts
from pellucid.core.plan import Chunk
from pellucid.core.sequence import Sequence, Status

_NUM_BLOCKERS = 3
_NUM_SPANS = 64  # computing stretches that are remembered for requests that arrived during them
_NUM_RETIRED = 128  # finished prompts that are remembered as what held up others
_NUM_HEAVY = 16  # unfinished ones that are looked at
_LIGHT = 0.002  # seconds of step time below which a prompt is not worth remembering
_NEGLIGIBLE = 1e-6  # seconds between two readings of the clock that stand for the same moment
_RESOLUTION = 1e-9  # what adding up may lose, relative to a request's time


class LedgerBook:
    """The open ledgers of one scheduler. `cost` prices steps; what a request would have taken alone is the lower of
    `cost` and `floor` (the roofline), its prompt computed in chunks of `token_budget`. Copying a block between
    the tiers moves `bytes_per_block`."""

    def __init__(
        self, cost: CostModel, token_budget: int, *, floor: CostModel | None = None, bytes_per_block: int = 0
    ) -> None:
        self._cost = cost
        self._floor = cost if floor is None else floor
        self._token_budget = token_budget
        self._bytes_per_block = bytes_per_block
        self._now = 0.0  # how far time is counted
        self._num_in_flight = 0
        self._gaps = 0.0  # all time without a step in flight
        self._computing = 0.0  # time with one since the last commit
        self._spans: deque[tuple[float, float]] = deque(maxlen=_NUM_SPANS)
        self._new: list[Ledger] = []  # not yet offered to a round of admission
        self._round = cause.CAPACITY  # why those wait whom the last round did not look at
        self._ahead: tuple[str, ...] = ()  # tenants that were not looked at because they are ahead
        self._behind: dict[str, float] = {}  # computing time by the round it passed under
        self._behind_ahead: dict[str, dict[str, float]] = {}  # the part of it in which a tenant was ahead
        self._told: dict[Ledger, None] = {}  # given a reason of their own in this round, and in the one before
        self._told_before: dict[Ledger, None] = {}
        self._occupants: dict[int, Occupant] = {}
        self._retired: deque[Occupant] = deque(maxlen=_NUM_RETIRED)
        self._num_retired = 0
        self._last_caused: list[tuple[Occupant, float]] = []
        self._heavy: list[Occupant] | None = []  # of the occupants; None: to be looked up
        self.residue_seconds = 0.0

    # -- what the scheduler tells ----------------------------------------------------------------------------------

    def add(self, sequence: Sequence, now: float) -> None:
        """A request was queued. What lies between its arrival and now passed outside: in an inbox, most of it while a
        step was computed."""
        self._advance(now)
        ledger = sequence.ledger
        arrival = ledger.arrival = ledger.since = ledger.phase_start = min(ledger.arrival, now)
        computed = self._computed_since(arrival)
        ledger.seconds[cause.STEP_IN_FLIGHT] += computed
        ledger.seconds[cause.ENGINE_GAP] += (now - arrival) - computed
        ledger.since, ledger.gaps = now, self._gaps
        self._new.append(ledger)
        self._remember_occupants(ledger)

    def begin_round(self, now: float) -> None:
        """A step is about to be decided."""
        self._advance(now)
        for ledger in self._new:
            self._charge_wait(ledger, cause.STEP_IN_FLIGHT)
            self._fall_behind(ledger)
        self._new.clear()
        self._told, self._told_before = {}, self._told

    def waits(self, sequence: Sequence, why: str) -> None:
        """Admission looked at `sequence` in this round and left it waiting for `why`."""
        ledger = sequence.ledger
        if ledger.phase == "queue":
            self._told[ledger] = None
            if ledger.waits_for != why:
                self._settle_wait(ledger)
                ledger.waits_for = why

    def end_round(self, why: str, ahead: Iterable[str] = ()) -> None:
        """The round ended. Whoever was not looked at waits for `why`; those of the tenants in `ahead`, for fairness."""
        self._round, self._ahead = why, tuple(ahead)
        for ledger in self._told_before:
            if ledger not in self._told and ledger.phase == "queue":
                self._settle_wait(ledger)
                self._fall_behind(ledger)

    def start(self, sequence: Sequence, now: float) -> None:
        """`sequence` was admitted."""
        self._advance(now)
        ledger = sequence.ledger
        self._settle_wait(ledger)
        ledger.served = False
        ledger.waits_for = cause.STEP_IN_FLIGHT if self._num_in_flight else cause.CAPACITY
        if ledger.phase == "queue":
            ledger.enter("prefill", now)

    def launch(self, now: float) -> None:
        """A step was launched."""
        self._advance(now)
        self._num_in_flight += 1

    def commit(self, chunks: Items[tuple[Sequence, Chunk, bool]], now: float, copied_bytes: int = 0) -> None:
        """The oldest step in flight ended. `chunks` are its sequences, what was computed, and whether that still counts
        (it does not for one that ended or was preempted meanwhile). To be called before their progress is updated."""
        self._advance(now)
        self._num_in_flight -= 1
        wall, self._computing = self._computing, 0.0
        self._spans.append((now - wall, now))
        is_decode = [
            chunk.start >= sequence.num_prompt and chunk.start >= sequence.ledger.mark for sequence, chunk, _ in chunks
        ]
        shares = share_step(self._cost, [chunk for _, chunk, _ in chunks], is_decode, wall, copied_bytes)
        self._charge_occupants(chunks, shares)
        batched, stalled, stolen, gaps = shares.decoding, shares.stalled, shares.stolen, self._gaps
        for (sequence, chunk, counts), own, decodes in zip(chunks, shares.own, is_decode, strict=True):
            if not counts:
                continue
            ledger = sequence.ledger
            seconds = ledger.seconds
            rest = (now - ledger.since) - wall
            gap = gaps - ledger.gaps
            if decodes and ledger.first is not None and abs(rest - gap) < _NEGLIGIBLE:
                seconds[cause.DECODE_OWN] += own
                seconds[cause.DECODE_BATCH] += batched - own
                seconds[cause.DECODE_STALLED] += stalled
                seconds[cause.ENGINE_GAP] += rest + stolen
            else:
                self._charge_running(ledger, upto=now - wall)
                _charge_step(ledger, chunk, own, shares, decodes=decodes)
            if copied_bytes and sequence.num_promoted > ledger.num_promoted:
                self._charge_copies(sequence, shares, copied_bytes, decodes=decodes)
            ledger.since, ledger.gaps = now, gaps
            ledger.served = True
            ledger.num_steps += 1
            if ledger.first is None or ledger.mark:
                self._pass_marks(sequence, chunk, now)

    def _charge_copies(self, sequence: Sequence, shares: StepShares, copied_bytes: int, *, decodes: bool) -> None:
        """The step just charged brought blocks of `sequence` back from the host: its part of what copies took goes from
        what others took to a cause of its own."""
        ledger = sequence.ledger
        fresh = sequence.num_promoted - ledger.num_promoted
        ledger.num_promoted = sequence.num_promoted
        preempted = ledger.phase == "preempted"
        if decodes:
            taken_from = cause.DECODE_STALLED if shares.stalled else cause.DECODE_BATCH
        else:
            taken_from = cause.PREEMPTED_WAIT if preempted else cause.PREFILL_WAIT
        part = min(shares.copying * fresh * self._bytes_per_block / copied_bytes, ledger.seconds[taken_from])
        ledger.seconds[taken_from] -= part
        ledger.seconds[cause.PREEMPTED_SWAP if preempted else cause.PREFILL_PROMOTE] += part

    def preempt(self, sequence: Sequence, now: float) -> None:
        """`sequence` lost its blocks. To be called while it still knows how much it had computed."""
        self._advance(now)
        ledger = sequence.ledger
        self._charge_running(ledger)
        self._retire(sequence)
        ledger.mark = max(ledger.mark, sequence.num_computed)
        if ledger.phase != "preempted":
            ledger.enter("preempted", now)
        ledger.waits_for = cause.PREEMPTED_WAIT

    def finish(self, sequence: Sequence, now: float) -> LedgerReport:
        """Close the ledger of a sequence that ends, running or waiting."""
        self._advance(now)
        ledger = sequence.ledger
        self._settle(sequence)
        self._retire(sequence)
        ledger.enter(ledger.phase, now)
        report = LedgerReport(
            e2e_seconds=now - ledger.arrival,
            phases=tuple(ledger.phases),
            first_token_seconds=ledger.first,
            tokens=TokenCounts(
                sequence.num_prompt,
                sequence.num_cached,
                ledger.num_cached_host,
                ledger.num_recomputed,
                sequence.num_generated,
            ),
            floors=self._floors(sequence),
            num_steps=ledger.num_steps,
            num_preemptions=sequence.num_preemptions,
            misses=ledger.misses,
            blockers=self._blockers(sequence),
            first_blockers=ledger.first_blockers,
        )
        residue = report.e2e_seconds - sum(seconds for _, seconds in report.causes)
        if abs(residue) > _RESOLUTION * max(1.0, report.e2e_seconds):
            self.residue_seconds += abs(residue)
        return report

    def reasons(self, waiting: Iterable[Ledger]) -> dict[str, int]:
        """How many of these, which wait, wait for what: as the last round left it."""
        counts: dict[str, int] = {}
        new = {id(ledger) for ledger in self._new}
        for ledger in waiting:
            why = ledger.waits_for
            if why is None:
                unseen = cause.FAIRNESS if ledger.tenant in self._ahead else self._round
                why = cause.STEP_IN_FLIGHT if id(ledger) in new else unseen
            counts[why] = counts.get(why, 0) + 1
        return counts

    def cause_now(self, sequence: Sequence) -> str:
        """The cause under which time runs for a sequence that is in no step."""
        ledger = sequence.ledger
        return next(iter(self.reasons([ledger]))) if ledger.phase == "queue" else _idle_cause(ledger)

    # -- time ------------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Count the time up to `now` as computing or as a gap."""
        passed = now - self._now
        if passed <= 0.0:
            return
        self._now = now
        if self._num_in_flight:
            self._computing += passed
            self._behind[self._round] = self._behind.get(self._round, 0.0) + passed
            for tenant in self._ahead:
                times = self._behind_ahead.setdefault(tenant, {})
                times[self._round] = times.get(self._round, 0.0) + passed
        else:
            self._gaps += passed

    def _computed_since(self, start: float) -> float:
        """Seconds from `start` to now in which a step was in flight."""
        total = max(0.0, min(self._computing, self._now - start))
        for begin, end in reversed(self._spans):
            if end <= start:
                break
            total += end - max(begin, start)
        return total

    # -- charging --------------------------------------------------------------------------------------------------

    def _settle(self, sequence: Sequence) -> None:
        """Charge a sequence up to now, whatever it is doing."""
        ledger = sequence.ledger
        if sequence.status is Status.RUNNING:
            self._charge_running(ledger)
        elif ledger in self._new:
            self._new.remove(ledger)
            self._charge_wait(ledger, cause.STEP_IN_FLIGHT)
            self._fall_behind(ledger)
        else:
            self._settle_wait(ledger)

    def _charge_wait(self, ledger: Ledger, why: str) -> None:
        """Charge a waiting request up to now: gaps to the engine, the rest to `why`."""
        elapsed, gap = self._now - ledger.since, self._gaps - ledger.gaps
        if abs(elapsed - gap) < _NEGLIGIBLE:
            gap = elapsed
        ledger.seconds[cause.ENGINE_GAP] += gap
        ledger.seconds[why] += elapsed - gap
        ledger.since, ledger.gaps = self._now, self._gaps

    def _settle_wait(self, ledger: Ledger) -> None:
        """Charge a waiting request up to now for the reason it was given, or for those of the rounds it sat through."""
        if ledger.waits_for is not None:
            self._charge_wait(ledger, ledger.waits_for)
            return
        left = (self._now - ledger.since) - (self._gaps - ledger.gaps)
        ahead = self._behind_ahead.get(ledger.tenant, {})
        for why, total in self._behind.items():
            passed = total - ledger.behind.get(why, 0.0)
            fairness = ahead.get(why, 0.0) - ledger.behind_ahead.get(why, 0.0)
            for part_of, seconds in ((cause.FAIRNESS, fairness), (why, passed - fairness)):
                seconds = min(seconds, left)
                if seconds > 0.0:
                    ledger.seconds[part_of] += seconds
                    ledger.since += seconds
                    left -= seconds
        self._charge_wait(ledger, self._round)

    def _fall_behind(self, ledger: Ledger) -> None:
        """From now on the ledger waits for what the rounds say."""
        ledger.waits_for = None
        ledger.behind = dict(self._behind)
        ledger.behind_ahead = dict(self._behind_ahead.get(ledger.tenant, {}))

    def _charge_running(self, ledger: Ledger, upto: float | None = None) -> None:
        """Charge a running sequence up to `upto` (now) for time in which no step of its own was committed."""
        elapsed = (self._now if upto is None else upto) - ledger.since
        gap = self._gaps - ledger.gaps
        idle = elapsed - gap
        if abs(idle) < _NEGLIGIBLE:
            gap, idle = elapsed, 0.0
        ledger.seconds[cause.ENGINE_GAP] += gap
        ledger.seconds[_idle_cause(ledger)] += idle
        ledger.since, ledger.gaps = ledger.since + elapsed, self._gaps

    def _pass_marks(self, sequence: Sequence, chunk: Chunk, now: float) -> None:
        """Begin a new phase where this chunk brought the first token, or the last one that had to be recomputed."""
        ledger = sequence.ledger
        phase = ledger.phase
        if ledger.mark:
            ledger.num_recomputed += max(0, min(chunk.end, ledger.mark) - chunk.start)
            if chunk.end >= ledger.mark:
                ledger.mark = 0
                phase = "prefill" if ledger.first is None else "decode"
        if chunk.samples and ledger.first is None:
            ledger.first = now - ledger.arrival
            ledger.first_blockers = self._blockers(sequence)
            phase = "decode"
        if phase != ledger.phase:
            ledger.enter(phase, now)
        if phase == "decode":
            self._retire(sequence)

    # -- who held up whom ------------------------------------------------------------------------------------------

    def _charge_occupants(self, chunks: Items[tuple[Sequence, Chunk, bool]], shares: StepShares) -> None:
        """Note for each prompt of the step what it took from everybody else."""
        if self._last_caused or shares.caused:
            self._last_caused, self._heavy = [], None
        for index, seconds in shares.caused.items():
            sequence, _, counts = chunks[index]
            if not counts:
                continue
            occupant = self._occupants.get(sequence.id)
            if occupant is None:
                occupant = self._occupants[sequence.id] = _occupant(sequence)
            occupant.seconds += seconds
            self._last_caused.append((occupant, seconds))

    def _retire(self, sequence: Sequence) -> None:
        occupant = self._occupants.pop(sequence.id, None)
        if occupant is not None and occupant.seconds >= _LIGHT:
            self._retired.append(occupant)
            self._num_retired += 1

    def _remember_occupants(self, ledger: Ledger) -> None:
        """What prompts had taken when the request arrived, which may have been in the middle of the last step."""
        ledger.num_retired = self._num_retired
        ledger.baseline = {occupant: occupant.seconds for occupant in self._heaviest()}
        begin, end = self._spans[-1] if self._spans else (0.0, 0.0)
        if ledger.arrival < end:
            part = (end - max(ledger.arrival, begin)) / (end - begin)
            for occupant, seconds in self._last_caused:
                if seconds >= _LIGHT:
                    ledger.baseline[occupant] = occupant.seconds - part * seconds

    def _heaviest(self) -> list[Occupant]:
        """The prompts being computed that have taken the most so far."""
        if self._heavy is None:
            self._heavy = nlargest(_NUM_HEAVY, self._occupants.values(), key=_taken)
        return self._heavy

    def _blockers(self, sequence: Sequence) -> tuple[Blocker, ...]:
        """The prompts that took the most step time since this request arrived."""
        ledger = sequence.ledger
        baseline = ledger.baseline
        num_since = min(self._num_retired - ledger.num_retired, len(self._retired))
        seen = dict.fromkeys([*baseline, *self._heaviest(), *islice(reversed(self._retired), num_since)])
        found = [(o.seconds - baseline.get(o, 0.0), o) for o in seen if o.seq_id != sequence.id]
        worst = nlargest(_NUM_BLOCKERS, (pair for pair in found if pair[0] >= _LIGHT), key=lambda pair: pair[0])
        return tuple(Blocker(o.request_id, o.tenant, o.num_prompt, seconds) for seconds, o in worst)

    # -- what it would have taken alone ----------------------------------------------------------------------------

    def _floors(self, sequence: Sequence) -> Floors:
        num_prompt, num_output = sequence.num_prompt, sequence.num_generated
        middle = num_prompt + num_output // 2
        per_token = self._alone(StepFeatures(1, middle, middle, 1, 1))
        decoding = per_token * max(0, num_output - 1)
        return Floors(
            self._prefill_floor(sequence.num_cached, num_prompt) + decoding,
            self._prefill_floor(0, num_prompt) + decoding,
            per_token,
        )

    def _prefill_floor(self, start: int, end: int) -> float:
        total = 0.0
        while start < end:
            stop = min(start + self._token_budget, end)
            num = stop - start
            total += self._alone(StepFeatures(num, num * (start + stop + 1) // 2, stop, 1, int(stop == end)))
            start = stop
        return total

    def _alone(self, features: StepFeatures) -> float:
        """The least that is believed of such a step: what the roofline says, or what steps here have shown."""
        return min(self._cost.predict(features).seconds, self._floor.predict(features).seconds)


def _taken(occupant: Occupant) -> float:
    return occupant.seconds


def _occupant(sequence: Sequence) -> Occupant:
    return Occupant(sequence.id, sequence.request.id, sequence.request.tenant, sequence.num_prompt)


def _idle_cause(ledger: Ledger) -> str:
    """What a running sequence waits for while it is in no step: a decode only while others are owed service first."""
    if ledger.phase == "preempted":
        return cause.PREEMPTED_WAIT
    if not ledger.served:
        return ledger.waits_for or cause.CAPACITY
    return cause.PREFILL_WAIT if ledger.first is None else cause.FAIRNESS


def _charge_step(ledger: Ledger, chunk: Chunk, own: float, shares: StepShares, *, decodes: bool) -> None:
    """Charge a step in which `chunk` was computed: what it took itself, and what others took."""
    seconds = ledger.seconds
    seconds[cause.ENGINE_GAP] += shares.stolen
    if decodes:
        seconds[cause.DECODE_OWN] += own
        seconds[cause.DECODE_BATCH] += shares.decoding - own
        seconds[cause.DECODE_STALLED] += shares.stalled
        return
    again = max(0, min(chunk.end, ledger.mark) - chunk.start) / chunk.num_tokens
    seconds[cause.PREEMPTED_RECOMPUTE] += own * again
    seconds[cause.PREFILL_OWN if ledger.first is None else cause.DECODE_OWN] += own * (1.0 - again)
    others = (shares.decoding + shares.stalled) - own
    seconds[cause.PREEMPTED_WAIT if ledger.phase == "preempted" else cause.PREFILL_WAIT] += others
