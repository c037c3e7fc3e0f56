"""What the scheduler promises, one promise a test. test_scheduler_machine.py looks for the rest, at random."""

from __future__ import annotations

import pytest
from tests.core.fakes import Run, generate

from pellucid.core.config import SchedulerConfig
from pellucid.core.errors import ConfigError, IllegalTransition, RequestRejected
from pellucid.core.events import Admitted, Finished, Preempted
from pellucid.core.request import Request, SamplingParams
from pellucid.core.scheduler import Scheduler
from pellucid.core.sequence import Sequence, Status


def config(**changes) -> SchedulerConfig:
    fields = {"num_blocks": 8, "block_size": 4, "max_context": 32, "max_running": 4, "token_budget": 8}
    return SchedulerConfig(**(fields | changes))


def request(name: str, prompt, max_tokens: int = 4, **fields) -> Request:
    return Request(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True), **fields)


def chunks(plan) -> dict[int, tuple[int, int]]:
    return {chunk.seq_id: (chunk.start, chunk.end) for chunk in plan.chunks}


def test_a_prompt_is_cut_to_the_budget_and_decodes_go_first():
    run = Run(config())
    run.add(request("a", range(1, 4)))
    run.step()
    run.add(request("b", range(10, 22)))
    run.step()
    assert chunks(run.plans[-1]) == {0: (3, 4), 1: (0, 7)}
    run.step()
    assert chunks(run.plans[-1]) == {0: (4, 5), 1: (7, 12)}
    assert [chunk.samples for chunk in run.plans[-1].chunks] == [True, True]


def test_with_chunking_off_a_prompt_is_one_step_however_long():
    run = Run(config(chunked_prefill=False))
    run.add(request("a", range(1, 21)))
    run.step()
    assert chunks(run.plans[0]) == {0: (0, 20)}


def test_a_second_identical_prompt_hits_all_full_blocks_but_computes_its_last_token():
    run = Run(config())
    for name, length in [("a", 12), ("b", 12), ("c", 11)]:
        run.add(request(name, range(1, length + 1), max_tokens=1))
        run.finish()
    cached = {e.request_id: e.num_cached for e in run.events if isinstance(e, Admitted)}
    assert cached == {"a": 0, "b": 8, "c": 8}


def test_the_next_turn_hits_the_generated_tokens_of_the_turn_before():
    run = Run(config(num_blocks=16, max_context=64))
    first = request("a", range(1, 7), max_tokens=8)
    reply = run.run([first])["a"]
    run.run([request("b", [*first.prompt, *reply, 7, 7], max_tokens=1)])
    cached = {e.request_id: e.num_cached for e in run.events if isinstance(e, Admitted)}
    assert cached["b"] == 12  # 6 prompt + 7 computed replies = 13 tokens: three full blocks


def test_prefix_cache_off_never_hits():
    run = Run(config(prefix_cache=False))
    for name in "ab":
        run.run([request(name, range(1, 13))])
    assert [e.num_cached for e in run.events if isinstance(e, Admitted)] == [0, 0]
    assert run.scheduler.kv.pool.num_free == 8


def test_namespaces_do_not_see_each_other():
    run = Run(config())
    run.run([request("a", range(1, 13), max_tokens=1, cache_key=b"one")])
    run.run([request("b", range(1, 13), max_tokens=1, cache_key=b"two")])
    assert [e.num_cached for e in run.events if isinstance(e, Admitted)] == [0, 0]


def test_a_request_that_shares_an_uncached_prefix_waits_for_it():
    """Eight samples of one prompt: its full blocks are computed once."""
    run = Run(config(num_blocks=64, max_running=8, token_budget=16))
    prompt = range(1, 13)
    run.run([request(f"r{i}", prompt, max_tokens=2) for i in range(8)])
    computed = sum(chunk.num_tokens for plan in run.plans for chunk in plan.chunks)
    # 12 once, then 4 each for the other seven (the last block holds the token whose logits are wanted), and one decode.
    assert computed == 12 + 7 * 4 + 8
    assert sum(e.num_cached for e in run.events if isinstance(e, Admitted)) == 7 * 8


def test_the_wait_for_a_shared_prefix_is_bounded():
    """Even if whoever claimed the prefix never computes it."""
    scheduler = Scheduler(config(prefix_wait_steps=3))
    idle = Sequence(99, request("idle", range(1, 13)), 4, 32)
    idle.node = scheduler.kv.tree.root(b"")
    scheduler.claims.renew(idle)
    scheduler.add(request("a", range(1, 13)), 0.0)
    assert [scheduler.schedule(0.0) for _ in range(3)] == [None, None, None]
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert chunks(plan) == {0: (0, 8)}


def test_a_claim_dies_with_its_holder():
    run = Run(config())
    run.add(request("a", range(1, 21)))
    run.step()
    run.add(request("b", range(1, 21)))
    run.step()
    assert [s.request.id for s in run.scheduler.waiting] == ["b"]
    run.abort("a")
    run.finish()
    assert run.outputs()["b"] == generate(request("b", range(1, 21)), 32)


def test_preemption_takes_the_lowest_priority_then_the_newest_and_never_the_oldest():
    run = Run(config(num_blocks=6, token_budget=16))
    for name, priority in [("old", 5), ("vip", 0), ("new", 1)]:
        run.add(request(name, [ord(name[0]) % 9 + 1] * 4, max_tokens=14, priority=priority))
    run.finish()
    order = [e.request_id for e in run.events if isinstance(e, Preempted)]
    assert order[0] == "new"
    assert "old" not in order
    for name, output in run.outputs().items():
        assert output == generate(request(name, [ord(name[0]) % 9 + 1] * 4, max_tokens=14), 24)


def test_a_victim_that_was_served_in_this_step_is_taken_out_of_it():
    """Two blocks are needed and one is left; the newer is served first and must give it to the older."""
    run = Run(config(num_blocks=5))
    requests = [request("older", [1, 2, 3, 4], max_tokens=8), request("newer", [5, 6, 7, 8], max_tokens=8)]
    for one in requests:
        run.add(one)
    for _ in range(5):
        run.step()
    run.scheduler.running = dict(reversed(run.scheduler.running.items()))
    run.step()
    assert chunks(run.plans[-1]) == {0: (8, 9)}
    run.finish()
    assert run.outputs() == {one.id: generate(one, 20) for one in requests}


def test_nobody_is_admitted_into_blocks_that_running_ones_need_next():
    """One block is free and the running prompt needs it for its next token: admission would preempt at once."""
    run = Run(config(num_blocks=3, token_budget=5, max_running=2))
    run.add(request("a", [1] * 8, max_tokens=3))
    run.step()
    run.add(request("b", [2] * 2, max_tokens=2))
    run.finish()
    assert not [e for e in run.events if isinstance(e, Preempted)]
    assert [e.request_id for e in run.events if isinstance(e, Finished)] == ["a", "b"]


def test_the_pool_can_be_filled_to_the_last_block():
    run = Run(config(num_blocks=8, token_budget=32))
    run.add(request("a", range(1, 16), max_tokens=16))
    fill = 0
    while run.step():
        fill = max(fill, run.scheduler.kv.pool.num_active)
    assert fill == 8
    assert len(run.outputs()["a"]) == 16


def test_a_full_pool_of_cached_blocks_is_reused_oldest_first():
    run = Run(config())
    for i in range(6):
        run.run([request(f"r{i}", [i + 1] * 12, max_tokens=1)])
        pool = run.scheduler.kv.pool
        assert pool.num_free + pool.num_cached == 8
    run.run([request("again", [6] * 12, max_tokens=1)])
    assert [e.num_cached for e in run.events if isinstance(e, Admitted)][-1] == 8


@pytest.mark.parametrize(
    ("changes", "length", "code", "numbers"),
    [
        ({}, 32, "context_length_exceeded", ["32 tokens", "at most 31"]),
        ({"num_blocks": 4}, 16, "kv_pool_exceeded", ["16 tokens", "4 blocks of 4"]),
    ],
)
def test_what_can_never_fit_is_refused_at_once_with_the_numbers(changes, length, code, numbers):
    run = Run(config(**changes))
    with pytest.raises(RequestRejected) as caught:
        run.add(request("a", range(1, length + 1)))
    assert caught.value.code == code
    for number in numbers:
        assert number in str(caught.value)
    assert not run.scheduler.has_work


def test_output_is_clamped_to_context_and_pool():
    run = Run(config(num_blocks=4))
    run.run([request("a", range(1, 11), max_tokens=1000)])
    end = next(e for e in run.events if isinstance(e, Finished))
    assert (end.num_generated, end.reason) == (6, "length")


def test_a_request_id_in_use_is_refused():
    run = Run(config())
    run.add(request("a", [1]))
    with pytest.raises(RequestRejected, match="already in use"):
        run.add(request("a", [2]))


def test_abort_of_an_unknown_request_is_nothing():
    run = Run(config())
    run.abort("never seen")
    assert run.events == []


def test_a_result_of_another_step_is_refused():
    run = Run(config())
    run.add(request("a", [1, 2, 3]))
    run.schedule()
    result = run.results[0]
    with pytest.raises(ValueError, match="expected step 0"):
        run.scheduler.commit(type(result)(7, result.tokens, 0.0), 1.0)


def test_a_budget_below_the_number_of_decodes_is_refused():
    with pytest.raises(ConfigError, match="raise token_budget or lower max_running"):
        config(token_budget=3)


def test_illegal_transitions_name_the_legal_ones():
    sequence = Sequence(0, request("a", [1]), 4, 8)
    with pytest.raises(IllegalTransition, match="legal from here: finished, running"):
        sequence.become(Status.SWAPPED)


def test_a_plan_does_not_grow_with_the_context():
    """A long-running decode sends its chunk and, every block_size steps, one block id."""
    run = Run(config(num_blocks=512, block_size=4, max_context=2000, token_budget=1000))
    run.run([request("a", range(1, 1000), max_tokens=20)])
    for plan in run.plans[1:]:
        assert sum(len(update.blocks) for update in plan.blocks) <= 1
        assert not plan.new


class TestTruncate:
    def running(self) -> tuple[Run, Sequence]:
        run = Run(config(token_budget=16))
        run.add(request("a", range(1, 11), max_tokens=8))
        run.step()
        return run, run.scheduler.running[0]

    def test_within_the_unpublished_tail(self):
        run, sequence = self.running()
        run.scheduler.kv.truncate(sequence, 9)
        assert (sequence.num_computed, sequence.num_published, len(sequence.block_table)) == (9, 2, 3)
        run.finish()

    @pytest.mark.parametrize(("cut", "kept"), [(8, 8), (7, 4), (4, 4), (3, 0), (0, 0)])
    def test_a_cut_inside_a_published_block_gives_the_block_back(self, cut, kept):
        """Others may read it, so it must not be written again: its tokens are computed anew elsewhere."""
        run, sequence = self.running()
        run.scheduler.kv.truncate(sequence, cut)
        run.add(request("b", range(1, 10), max_tokens=1))  # reads the blocks that were given back
        assert sequence.num_computed == kept
        assert len(sequence.block_table) == kept // 4
        run.finish()
        assert run.outputs()["a"] == generate(request("a", range(1, 11), max_tokens=8), 32)
