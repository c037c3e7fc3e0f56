"""Every second of a request stands under exactly one cause, through every history; a step is shared as by hand."""

from __future__ import annotations

import re
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tests.core.fakes import Run

from pellucid.core import ledger as cause
from pellucid.core.attribution import share_step
from pellucid.core.config import SchedulerConfig
from pellucid.core.cost import Prediction, StepFeatures
from pellucid.core.errors import RequestRejected
from pellucid.core.events import Finished
from pellucid.core.ledger import CAUSES, LedgerReport
from pellucid.core.ledger_book import LedgerBook
from pellucid.core.plan import Chunk
from pellucid.core.request import Request, SamplingParams


class Priced:
    """A cost model by a formula: 10 ms a step, 0.1 ms a token, 1 us for each token of context, 1 ms a byte that is
    copied; sure of itself."""

    def __init__(self, spread: float = 0.0) -> None:
        self.spread = spread

    def predict(self, features: StepFeatures) -> Prediction:
        if not features.num_sequences:
            return Prediction(0.0, 0.0)
        copying = 1e-3 * features.copied_bytes
        return Prediction(0.010 + 1e-4 * features.num_tokens + 1e-6 * features.num_context + copying, self.spread)


class Clocked(Run):
    """A run whose clock moves by what the test says before each call, and that remembers when steps were in flight."""

    def __init__(self, config: SchedulerConfig, depth: int, ticks) -> None:
        super().__init__(config, depth)
        # No step is ever longer than this model explains: whatever is a gap is one between steps.
        self.scheduler.ledgers = LedgerBook(
            Priced(spread=1e9), config.token_budget, bytes_per_block=config.bytes_per_block
        )
        self.ticks = ticks
        self.computing: list[tuple[float, float]] = []
        self.begun: float | None = None

    def tick(self) -> None:
        self.now += self.ticks()

    def schedule(self):
        self.tick()
        plan = super().schedule()
        if plan is not None and self.begun is None:
            self.begun = self.now
        return plan

    def commit(self) -> None:
        self.tick()
        super().commit()
        assert self.begun is not None
        self.computing.append((self.begun, self.now))
        self.begun = self.now if self.results else None

    def seconds_computing(self, start: float, end: float) -> float:
        spans = [*self.computing, *([(self.begun, self.now)] if self.begun is not None else [])]
        return sum(max(0.0, min(end, e) - max(start, b)) for b, e in spans)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 30), st.integers(1, 12), st.integers(0, 2)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.just("ahead")),
    ),
    min_size=3,
    max_size=25,
)


@settings(max_examples=400, deadline=None)
@given(
    operations=OPERATIONS,
    seconds=st.lists(st.sampled_from([0.0, 1e-4, 0.003, 0.04, 2.0]), min_size=1, max_size=12),
    late=st.lists(st.sampled_from([0.0, 0.001, 0.05]), min_size=1, max_size=5),
    depth=st.integers(1, 3),
    num_blocks=st.integers(5, 20),
    budget=st.integers(4, 20),
    max_running=st.integers(1, 4),
    prefix_cache=st.booleans(),
)
def test_the_causes_of_every_request_sum_to_its_time(
    operations, seconds, late, depth, num_blocks, budget, max_running, prefix_cache
):
    """Through queueing, chunks, preemption, abort, steps planned ahead, and an engine that stops at any moment."""
    count = iter(range(10**9))
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=2,
        max_context=40,
        max_running=max_running,
        token_budget=budget,
        prefix_cache=prefix_cache,
    )
    run = Clocked(config, depth, lambda: seconds[next(count) % len(seconds)])
    requests: dict[str, Request] = {}
    for operation, *numbers in operations:
        run.tick()
        if operation == "add":
            length, max_tokens, kind = numbers
            sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            arrival = max(0.0, run.now - late[len(requests) % len(late)])
            request = Request(f"r{len(requests)}", tuple((kind + i) % 5 for i in range(length)), sampling, arrival)
            try:
                run.add(request)
            except RequestRejected:
                continue
            requests[request.id] = request
        elif operation == "abort":
            run.abort(f"r{numbers[0]}")
        elif operation == "ahead" and len(run.results) < depth:
            run.schedule()
        elif operation == "step":
            for _ in range(numbers[0]):
                run.step()
    for request_id in requests:  # the engine is stopped: whatever has not ended ends now
        run.tick()
        run.abort(request_id)
    assert run.scheduler.ledgers.residue_seconds == 0.0
    ends = [event for event in run.events if isinstance(event, Finished)]
    assert {end.request_id for end in ends} == set(requests)
    for end in ends:
        assert end.ledger is not None
        _check(end.ledger, run, requests[end.request_id])


def _check(report: LedgerReport, run: Clocked, request: Request) -> None:
    ended = run.ended_at[request.id]
    lifetime = ended - request.arrival
    causes = dict(report.causes)
    assert set(causes) <= set(CAUSES)
    assert min(causes.values(), default=0.0) > -1e-9
    assert sum(causes.values()) == pytest.approx(lifetime, rel=1e-9, abs=1e-12)
    assert report.e2e_seconds == lifetime
    # The phases tile it, and each is the sum of its own causes.
    assert [phase.start for phase in report.phases] == [0.0, *(phase.end for phase in report.phases[:-1])]
    assert report.phases[-1].end == lifetime
    for phase in report.phases:
        assert sum(s for _, s in phase.causes) == pytest.approx(phase.end - phase.start, rel=1e-9, abs=1e-12)
    if report.first_token_seconds is not None:
        first = sum(s for _, s in report.first_token_causes)
        assert first == pytest.approx(report.first_token_seconds, rel=1e-9, abs=1e-12)
    assert (report.first_token_seconds is None) == (report.tokens.output == 0)
    # What no step was in flight for, and nothing else, is a gap. The test counts that by itself.
    computing = run.seconds_computing(request.arrival, ended)
    assert causes.get(cause.ENGINE_GAP, 0.0) == pytest.approx(lifetime - computing, abs=1e-5)


# -- the sharing of one step, as docs/ledger.md works it ------------------------------------------------------------

A, B, C = Chunk(0, 999, 1000, True), Chunk(1, 199, 200, True), Chunk(2, 0, 600, False)


def test_the_worked_example_of_the_docs():
    text = (Path(__file__).parents[2] / "docs" / "ledger.md").read_text()
    table = {
        cells[0]: [float(cell) for cell in cells[1:]]
        for line in text.splitlines()
        if line.startswith("| ") and re.fullmatch(r"[ABC](, stopped)?", (cells := _cells(line))[0])
    }
    for suffix, seconds in (("", 0.090), (", stopped", 0.390)):
        shares = share_step(Priced(spread=0.010), [A, B, C], [True, True, False], seconds)
        own = [1e3 * s for s in shares.own]
        others = [1e3 * (shares.decoding - shares.own[0]), 1e3 * (shares.decoding - shares.own[1])]
        stalled, stolen = 1e3 * shares.stalled, 1e3 * shares.stolen
        waits = 1e3 * (shares.decoding + shares.stalled - shares.own[2])
        assert table["A" + suffix] == pytest.approx([own[0], others[0], stalled, stolen, 1e3 * seconds])
        assert table["B" + suffix] == pytest.approx([own[1], others[1], stalled, stolen, 1e3 * seconds])
        assert table["C" + suffix] == pytest.approx([own[2], waits, 0.0, stolen, 1e3 * seconds])
        assert shares.caused == pytest.approx({2: shares.stalled})


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| \n").split("|")]


@given(
    wall=st.floats(0.0, 10.0),
    spread=st.floats(0.0, 1.0),
    lengths=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 600), st.booleans()), min_size=1, max_size=20),
)
def test_a_step_is_shared_without_remainder(wall, spread, lengths):
    """Whatever the model says: no part is negative, and each sequence's parts are the whole step."""
    decodes = [decode for _, _, decode in lengths]
    chunks = [Chunk(i, start, start + (1 if d else n), True) for i, (start, n, d) in enumerate(lengths)]
    shares = share_step(Priced(spread), chunks, decodes, wall)
    assert min(shares.decoding, shares.stalled, shares.stolen, *shares.own, *shares.caused.values()) >= -1e-12
    for own, decode in zip(shares.own, decodes):
        assert own <= (shares.decoding if decode else shares.decoding + shares.stalled) + 1e-12
    assert shares.decoding + shares.stalled + shares.stolen == pytest.approx(wall)
    if not all(decodes):
        assert sum(shares.caused.values()) == pytest.approx(shares.stalled)


# -- particular lives ----------------------------------------------------------------------------------------------


def request(name: str, num_prompt: int, max_tokens: int = 4, arrival: float = 0.0, **fields) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(name, tuple(ord(name[0]) + i for i in range(num_prompt)), sampling, arrival, **fields)


def run_of(**config) -> Clocked:
    defaults = {"num_blocks": 64, "block_size": 4, "max_context": 200, "max_running": 4, "token_budget": 8}
    return Clocked(SchedulerConfig(**(defaults | config)), 1, lambda: 0.010)


def ledger_of(run: Clocked, name: str) -> LedgerReport:
    (report,) = [e.ledger for e in run.events if isinstance(e, Finished) and e.request_id == name]
    assert report is not None
    return report


def test_a_decode_beside_a_long_prompt_knows_who_held_it_up():
    run = run_of()
    run.add(request("chat", 4, max_tokens=12))
    run.step()
    run.add(request("document", 60, tenant="acme", arrival=run.now))
    run.finish()
    report = ledger_of(run, "chat")
    assert dict(report.causes)[cause.DECODE_STALLED] > 0.0
    blocker = report.blockers[0]
    assert (blocker.request_id, blocker.tenant, blocker.num_prompt) == ("document", "acme", 60)
    assert blocker.seconds == pytest.approx(dict(report.causes)[cause.DECODE_STALLED])
    assert report.first_blockers == ()
    document = ledger_of(run, "document")
    assert dict(document.causes).keys() >= {cause.PREFILL_OWN, cause.PREFILL_WAIT}
    assert document.blockers == ()


def test_who_arrives_during_a_step_waits_for_it_and_for_nothing_before():
    run = run_of()
    run.add(request("document", 60, tenant="acme"))
    run.schedule()
    launched = run.now
    run.commit()  # 11 ms later
    arrival = launched + 0.004
    run.now += 0.001  # the inbox is read 1 ms after the step
    run.add(request("short", 3, max_tokens=1, arrival=arrival))
    run.finish()
    report = ledger_of(run, "short")
    queue = dict(report.phases[0].causes)
    assert report.phases[0].name == "queue"
    assert queue[cause.STEP_IN_FLIGHT] == pytest.approx(0.007)
    assert queue.keys() == {cause.STEP_IN_FLIGHT, cause.CAPACITY, cause.ENGINE_GAP}  # the next steps are the document's
    blocker = report.first_blockers[0]
    assert blocker.request_id == "document"
    assert blocker.seconds >= queue[cause.STEP_IN_FLIGHT] + queue[cause.CAPACITY] - 1e-9


@pytest.mark.parametrize(
    ("config", "first", "second", "reason"),
    [
        ({"max_running": 1}, request("a", 3, max_tokens=9), "b", cause.CAPACITY),
        ({"num_blocks": 4, "max_context": 16}, request("a", 7, max_tokens=4), "b", cause.MEMORY),
        ({"token_budget": 64}, request("a1", 20, max_tokens=2), "a2", cause.SHARED_PREFIX),
    ],
)
def test_a_wait_has_its_reason(config, first, second, reason):
    run = run_of(**config)
    run.add(first)
    run.add(request(second, 9, max_tokens=1))
    run.finish()
    waited = dict(ledger_of(run, second).phases[0].causes)
    assert waited.keys() == {cause.ENGINE_GAP, reason}


def test_who_is_not_tried_because_places_are_short_does_not_wait_for_memory():
    run = run_of(max_running=1)
    for number in range(15):
        run.add(request(f"{chr(97 + number)}", 3, max_tokens=4))
    run.finish()
    assert dict(ledger_of(run, "o").phases[0].causes).keys() == {cause.ENGINE_GAP, cause.CAPACITY}


def test_preemption_has_its_parts_and_counts_what_is_computed_again():
    run = Clocked(
        SchedulerConfig(num_blocks=8, block_size=4, max_context=32, max_running=3, token_budget=16), 1, lambda: 0.01
    )
    for i in range(3):
        run.add(
            Request(f"r{i}", tuple(10 * i + j for j in range(1, 8)), SamplingParams(max_tokens=12, ignore_eos=True))
        )
    run.finish()
    report = max((ledger_of(run, f"r{i}") for i in range(3)), key=lambda report: report.num_preemptions)
    assert report.num_preemptions > 0
    causes = dict(report.causes)
    assert causes[cause.PREEMPTED_WAIT] > 0.0
    assert causes[cause.PREEMPTED_RECOMPUTE] > 0.0
    assert report.tokens.recomputed > 0
    names = [phase.name for phase in report.phases]
    assert names[:4] == ["queue", "prefill", "decode", "preempted"]
    assert names[-1] == "decode", "it has caught up"


def test_a_stopped_engine_is_a_gap_even_in_the_middle_of_a_step():
    run = run_of()
    run.scheduler.ledgers = LedgerBook(Priced(), run.config.token_budget)
    run.add(request("a", 8, max_tokens=8))
    for _ in range(4):
        run.step()
    run.schedule()
    run.now += 0.300
    run.commit()
    run.finish()
    report = ledger_of(run, "a")
    gaps = dict(report.causes)[cause.ENGINE_GAP]
    between = report.e2e_seconds - run.seconds_computing(0.0, run.now)
    assert gaps - between == pytest.approx(0.300, abs=0.012)


def test_the_server_frames_a_report_and_both_ledgers_still_add_up():
    run = run_of()
    run.add(request("a", 8))
    run.finish()
    inner = ledger_of(run, "a")
    report = inner.framed(
        receive=(("tokenize", 0.002),),
        deliver=(("deliver", 0.001), ("client", 0.5)),
        first_deliver=(("deliver", 0.004),),
    )
    assert report.e2e_seconds == pytest.approx(inner.e2e_seconds + 0.503)
    assert sum(s for _, s in report.causes) == pytest.approx(report.e2e_seconds)
    assert report.first_token_seconds == pytest.approx(sum(s for _, s in report.first_token_causes))
    assert [p.name for p in report.phases] == ["receive", "queue", "prefill", "decode", "deliver"]
    assert all(a.end == pytest.approx(b.start) for a, b in zip(report.phases, report.phases[1:]))
    cut = inner.ended_at(inner.e2e_seconds - 0.01)
    assert sum(s for _, s in cut.causes) == pytest.approx(cut.e2e_seconds)


def test_floors_tell_what_a_cache_can_and_cannot_remove():
    run = run_of(token_budget=32)
    for name in ("a1", "a2"):
        run.add(request(name, 41, max_tokens=11, arrival=run.now))
        run.finish()
    report = ledger_of(run, "a2")
    assert report.tokens.cached == 40
    assert report.floors.decode_per_token == pytest.approx(Priced().predict(StepFeatures(1, 46, 46, 1, 1)).seconds)
    decoding = 10 * report.floors.decode_per_token
    assert report.floors.with_cache == pytest.approx(0.010 + 1e-4 + 41e-6 + decoding)
    assert report.floors.without_cache == pytest.approx(0.020 + 41e-4 + (32 + 41) * 1e-6 + decoding)


def host_tier(**options) -> Clocked:
    config = {"num_blocks": 8, "block_size": 4, "max_context": 32, "max_running": 3, "token_budget": 16}
    config |= {"num_host_blocks": 16, "bytes_per_block": 1, "preemption": "swap"}
    return Clocked(SchedulerConfig(**{**config, **options}), 1, lambda: 0.01)


def test_blocks_that_come_back_after_a_preemption_are_charged_as_swapped():
    run = host_tier()
    for i in range(3):
        prompt = tuple(10 * i + j for j in range(1, 8))
        run.add(Request(f"r{i}", prompt, SamplingParams(max_tokens=12, ignore_eos=True)))
    run.finish()
    reports = [ledger_of(run, f"r{i}") for i in range(3)]
    for report in reports:
        causes = dict(report.causes)
        assert sum(causes.values()) == pytest.approx(report.e2e_seconds)
        assert cause.PREFILL_PROMOTE not in causes
        assert min(causes.values()) >= 0.0
    swapped = [report for report in reports if dict(report.causes).get(cause.PREEMPTED_SWAP)]
    assert swapped
    assert all(report.num_preemptions for report in swapped)
    assert run.scheduler.ledgers.residue_seconds == 0.0


def test_a_prefix_that_comes_back_from_the_host_is_charged_as_promoted():
    run = host_tier(max_running=1)
    run.scheduler.tiers.promote_pays = lambda *_: True
    run.scheduler.tiers.demote_pays = lambda *_: True
    for name, start in (("first", 1), ("other", 100), ("third", 200), ("again", 1)):
        prompt = tuple(range(start, start + 17))
        run.add(Request(name, prompt, SamplingParams(max_tokens=3, ignore_eos=True), arrival=run.now))
        run.finish()
    report = ledger_of(run, "again")
    assert report.tokens.cached_host == 16
    promoted = dict(report.causes)[cause.PREFILL_PROMOTE]
    # Others' blocks left in the same step; what all copies took is a part of its 10 ms.
    assert 0.0 < promoted < 0.01
    assert cause.PREFILL_PROMOTE not in dict(ledger_of(run, "third").causes)
    assert sum(s for _, s in report.causes) == pytest.approx(report.e2e_seconds)
