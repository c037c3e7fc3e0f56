"""Who is served, who gives way, who is refused, and whose blocks go: one promise a test. Contention over time is in
tests/sim."""

from __future__ import annotations

import pytest
from tests.core.fakes import Run
from tests.core.test_scheduler import chunks, config, request

from pellucid.core.admission import Admission
from pellucid.core.cost import CostPrior, FittedCost, StepFeatures
from pellucid.core.errors import ConfigError, RequestRejected
from pellucid.core.events import Admitted, Finished, Preempted, Queued, Resumed
from pellucid.core.pressure import Pressure
from pellucid.core.service import CACHED_WEIGHT, OUTPUT_WEIGHT, ServiceBook
from pellucid.core.tenants import Tenant
from pellucid.core.tiers import TierCosts

PRIOR = CostPrior(tuple(1e-3 * 2**i for i in range(10)), 0, 0, 0, 0, 1e-9)
"""A millisecond a token, nothing else."""


def cached(run: Run) -> dict[str, int]:
    return {e.request_id: e.num_cached for e in run.events if isinstance(e, Admitted)}


def ends(run: Run) -> list[str]:
    return [e.request_id for e in run.events if isinstance(e, Finished)]


def test_a_step_is_cut_to_its_target():
    run = Run(config(num_blocks=64, max_context=200, token_budget=100, step_target=0.02, cost_prior=PRIOR))
    run.scheduler.cost.observe = lambda features, seconds: None  # the fake's steps take no time
    run.add(request("chat", range(1, 4), max_tokens=50))
    run.step()
    run.add(request("doc", range(100)))
    run.step()
    assert chunks(run.plans[-1])[0] == (3, 4)
    start, end = chunks(run.plans[-1])[1]
    assert end - start == 32, "nineteen tokens fit the target, but the floor is 32"
    run = Run(config(num_blocks=64, max_context=200, token_budget=100, step_target=0.05, cost_prior=PRIOR))
    run.scheduler.cost.observe = lambda features, seconds: None
    run.add(request("chat", range(1, 4), max_tokens=50))
    run.step()
    run.add(request("doc", range(100)))
    run.step()
    assert chunks(run.plans[-1])[1] == (0, 49)


def test_a_short_prompt_is_read_beside_a_long_one():
    """Half of the prompt share is the short one's, though the long one came first."""
    run = Run(config(num_blocks=64, max_context=200, token_budget=40, step_target=1.0, cost_prior=PRIOR))
    run.add(request("chat", range(1, 4), max_tokens=50))
    run.step()
    run.add(request("doc", range(150)))
    run.step()
    run.add(request("short", range(200, 210), max_tokens=2))
    run.step()
    assert chunks(run.plans[-1])[2] == (0, 10)
    assert chunks(run.plans[-1])[1][1] > chunks(run.plans[-1])[1][0]


def test_a_more_urgent_request_takes_a_place_and_waiting_outweighs_urgency():
    run = Run(config(max_running=2, num_blocks=32, policy="priority", aging_seconds=10.0))
    run.add(request("first", range(9, 12), max_tokens=20, priority=1))
    run.add(request("old", range(1, 4), max_tokens=20, priority=1))
    run.step()
    run.add(request("patient", range(1, 4), max_tokens=3, priority=1, arrival=-30.0))
    run.add(request("urgent", range(5, 8), max_tokens=3, priority=-1))
    run.finish()
    assert ends(run) == ["urgent", "patient", "first", "old"]
    assert [e.request_id for e in run.events if isinstance(e, Preempted)] == ["old"]


def test_one_that_does_not_fit_is_passed_but_not_for_ever():
    run = Run(config(num_blocks=8, max_running=4, max_overtakes=2, prefix_cache=False))
    run.add(request("holder", range(16), max_tokens=12))
    run.step()
    run.step()
    run.add(request("large", range(24), max_tokens=2))
    for i in range(5):
        run.add(request(f"small{i}", [i + 1], max_tokens=1))
    run.finish()
    assert ends(run)[:2] == ["small0", "small1"]
    assert ends(run).index("large") < ends(run).index("small2")


def test_nobody_passes_one_that_was_preempted():
    run = Run(config(num_blocks=6, max_context=24))
    for name, start in (("a", 1), ("b", 40)):
        run.add(request(name, range(start, start + 7), max_tokens=12))
    run.step()
    while not any(isinstance(e, Preempted) for e in run.events):
        run.step()
    run.add(request("c", [9], max_tokens=1))
    run.finish()
    starts = [e.request_id for e in run.events if isinstance(e, (Admitted, Resumed))]
    assert starts == ["a", "b", "b", "c"]


def test_fair_alternates_and_follows_the_cache_within_its_quantum():
    fields = {"policy": "fair", "max_running": 1, "num_blocks": 64, "max_context": 64, "token_budget": 64}
    run = Run(config(**fields, fair_quantum=1000.0))
    for i in range(3):
        run.add(request(f"a{i}", range(10 * i, 10 * i + 9), max_tokens=1, tenant="a", cache_key=b"a"))
    for i in range(3):
        run.add(request(f"b{i}", range(90 + 10 * i, 99 + 10 * i), max_tokens=1, tenant="b", cache_key=b"b"))
    run.finish()
    assert ends(run) == ["a0", "b0", "a1", "b1", "a2", "b2"]
    run.add(request("b3", range(200, 209), max_tokens=1, tenant="b", cache_key=b"b"))
    run.add(request("a3", range(9), max_tokens=1, tenant="a", cache_key=b"a"))
    run.finish()
    assert ends(run)[-2:] == ["a3", "b3"], "eight of its tokens are in the cache"


def test_idleness_earns_no_credit_and_work_done_twice_is_charged_once():
    book = ServiceBook((Tenant("a"), Tenant("b", weight=2.0)), quantum=10.0)
    book.wait("a")
    book.charge("a", prompt=100, output=5, cached=64)
    assert book.service("a") == 100 + 5 * OUTPUT_WEIGHT + 64 * CACHED_WEIGHT
    book.wait("b")
    assert book.service("b") == book.service("a")
    book.charge("b", prompt=100)
    assert book.gap() == 50
    assert book.ahead() == ["b"]
    assert book.entitlement("b") == pytest.approx(2 / 3)


def test_tokens_per_minute_are_a_bucket_that_fills():
    book = ServiceBook((Tenant("a", tokens_per_minute=60),), quantum=1.0)
    assert book.seconds_until_allowed("a", 0.0) == 0
    book.charge("a", prompt=90)
    assert book.seconds_until_allowed("a", 0.0) == 31
    assert book.seconds_until_allowed("a", 31.5) == 0


@pytest.mark.parametrize(
    ("tenant", "code", "limit"),
    [
        (Tenant("t", max_waiting=1), "tenant_queue_full", "tenant"),
        (Tenant("t", tokens_per_minute=1), "tokens_per_minute", "tenant"),
        (Tenant("t"), "queue_full", "machine"),
    ],
)
def test_a_refusal_says_whose_limit_it_was_and_when_to_come_back(tenant, code, limit):
    run = Run(config(max_running=1, tenants=(tenant,), max_waiting=2))
    run.add(request("running", range(3), max_tokens=20, tenant="t"))
    run.step()
    run.step()
    refusals = []
    for i in range(4):
        try:
            run.add(request(f"r{i}", range(3), tenant="t"))
        except RequestRejected as refusal:
            refusals.append(refusal)
    assert {(refusal.code, refusal.limit) for refusal in refusals} == {(code, limit)}
    assert all(refusal.retry_after >= 1 for refusal in refusals)


def test_a_deadline_is_refused_when_hopeless_and_ends_who_waits_too_long():
    run = Run(config(max_running=1, cost_prior=PRIOR))
    with pytest.raises(RequestRejected, match="the first token is expected in") as refusal:
        run.add(request("hopeless", range(8), deadline=0.001))
    assert refusal.value.code == "deadline_hopeless"
    run.add(request("long", range(3), max_tokens=25))
    run.step()
    run.scheduler.admission._typical_output = 2.0  # it looks as if the place would soon be free
    run.add(request("late", range(3), deadline=run.now + 0.015))
    run.finish()
    assert {e.request_id: e.reason for e in run.events if isinstance(e, Finished)} == {
        "late": "deadline",
        "long": "length",
    }


def test_what_is_ahead_lengthens_the_forecast():
    run = Run(config(num_blocks=64, max_context=200, token_budget=8, cost_prior=PRIOR))
    for i in range(3):
        run.add(request(f"r{i}", range(50 * i, 50 * i + 40)))
    told = [e.predicted_ttft for e in run.scheduler.take_events() if isinstance(e, Queued)]
    assert told == pytest.approx([0.04, 0.08, 0.12], rel=0.2)


def test_the_forecast_learns_how_long_answers_are():
    run = Run(config(num_blocks=64, max_context=64))
    before = run.scheduler.admission._typical_output
    for i in range(9):
        run.run([request(f"r{i}", range(3), max_tokens=2)])
    assert isinstance(run.scheduler.admission, Admission)
    assert run.scheduler.admission._typical_output < before / 2


def test_a_public_head_is_shared_and_what_follows_is_not():
    run = Run(config(num_blocks=32))
    for name, tenant in (("a", "a"), ("b", "b"), ("again", "a")):
        own = {"tenant": tenant, "cache_key": tenant.encode(), "public_key": b"greeting", "num_public_blocks": 1}
        run.run([request(name, range(1, 14), max_tokens=1, **own)])
    assert cached(run) == {"a": 0, "b": 4, "again": 12}


def test_blocks_of_a_tenant_above_its_share_go_first():
    run = Run(config(num_blocks=8, tenants=(Tenant("big", kv_share=0.25),)))
    run.run([request("small", range(1, 9), max_tokens=1, tenant="small", cache_key=b"s")])
    run.run([request("big1", range(10, 17), max_tokens=1, tenant="big", cache_key=b"b")])
    run.scheduler.reconfigure((Tenant("big", kv_share=0.1),), run.now)
    run.run([request("other", range(30, 50), max_tokens=4, tenant="other", cache_key=b"o")])
    run.run([request("small2", range(1, 9), max_tokens=1, tenant="small", cache_key=b"s")])
    assert cached(run)["small2"] == 4, "older than the big tenant's, and still there"


def test_a_tenant_runs_no_more_than_it_may():
    run = Run(config(tenants=(Tenant("t", max_running=1),)))
    for i in range(3):
        run.add(request(f"r{i}", [i + 1], max_tokens=3, tenant="t"))
    while run.step():
        assert len(run.scheduler.running) <= 1
    assert ends(run) == ["r0", "r1", "r2"]


def test_preempted_blocks_come_back_from_the_host():
    fields = {"num_blocks": 6, "max_context": 24, "num_host_blocks": 20, "bytes_per_block": 1, "preemption": "swap"}
    run = Run(config(**fields))
    for name, start in (("a", 1), ("b", 40)):
        run.add(request(name, range(start, start + 7), max_tokens=14))
    run.finish()
    resumed = [e for e in run.events if isinstance(e, Resumed)]
    assert [e.fate for e in run.events if isinstance(e, Preempted)] == ["swap"]
    assert resumed[0].num_promoted > 0
    assert resumed[0].num_recomputed < 4
    moved = [transfer for plan in run.plans for transfer in plan.transfers]
    assert {transfer.kind for transfer in moved} == {"out", "in"}
    assert run.scheduler.kv.host.num_in_flight == 0


def test_swap_needs_a_place_to_swap_to():
    with pytest.raises(ConfigError, match="--swap-memory"):
        config(preemption="swap")
    with pytest.raises(ConfigError, match="--step-target off"):
        config(step_target=0.05, chunked_prefill=False)


@pytest.mark.parametrize(("copied_byte", "pays"), [(1e-12, True), (1.0, False)])
def test_a_copy_is_made_where_it_is_cheaper(copied_byte, pays):
    setting = config(num_host_blocks=4, bytes_per_block=1000)
    tiers = TierCosts(setting, FittedCost(PRIOR._replace(copied_byte=copied_byte)))
    assert tiers.swap_pays(3) is pays
    assert tiers.promote_pays(0, 3) is pays
    assert tiers.copy_seconds(2) == pytest.approx(2000 * copied_byte)
    assert FittedCost(PRIOR).predict(StepFeatures(256, 0, 0, 0, 0)).seconds == pytest.approx(0.256)
    assert tiers.compute_seconds(0, 4) == pytest.approx(0.004)


def test_pressure_leaves_room_and_notices_storms():
    pressure = Pressure()
    for headroom in (1, 2, 4, 8, 8):
        pressure.step(100, 50, 1)
        assert pressure.headroom == headroom
    assert pressure.storm
    for _ in range(64):
        pressure.step(100, 0, 0)
    assert pressure.headroom == 4
    for _ in range(600):
        pressure.step(100, 0, 0)
    assert (pressure.headroom, pressure.storm, pressure.num_storms) == (0, False, 1)


def test_nobody_is_preempted_for_one_that_would_not_fit_all_the_same():
    """The oldest holds most of the pool and gives nothing back: the large one waits, the small one goes on."""
    run = Run(config(num_blocks=10, policy="fair", fair_quantum=1.0, max_context=32))
    run.add(request("oldest", range(16), max_tokens=8, tenant="a", cache_key=b"a"))
    run.step()
    run.step()
    run.add(request("small", range(20, 24), max_tokens=6, tenant="a", cache_key=b"a"))
    run.step()
    run.add(request("large", range(40, 64), max_tokens=2, tenant="b", cache_key=b"b"))
    run.finish()
    assert not [e for e in run.events if isinstance(e, Preempted)]
    assert ends(run)[-1] == "large"
