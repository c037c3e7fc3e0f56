"""Each prompt block that was not in the cache has its reason."""

from __future__ import annotations

from tests.core.fakes import Run

from pellucid.core.config import SchedulerConfig
from pellucid.core.events import Finished
from pellucid.core.ledger import Miss
from pellucid.core.misses import _chained
from pellucid.core.request import Request, SamplingParams

SIZE = 4


def run_of(**config) -> Run:
    return Run(
        SchedulerConfig(**({"num_blocks": 16, "block_size": SIZE, "max_context": 60, "token_budget": 64} | config))
    )


def ask(run: Run, prompt, **fields) -> tuple[Miss, ...]:
    """The misses of one request that is served alone, one second after whatever was before."""
    run.now += 1.0
    name = f"r{len(run.ended_at)}"
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    run.add(Request(name, tuple(prompt), sampling, run.now, **fields))
    run.finish()
    (report,) = [e.ledger for e in run.events if isinstance(e, Finished) and e.request_id == name]
    assert report is not None
    return report.misses


def test_nobody_asked_before_then_everything_is_there():
    run = run_of()
    assert ask(run, range(1, 14)) == (Miss(0, 3, "cold"), Miss(3, 4, "partial"))
    assert ask(run, range(1, 14)) == (Miss(3, 4, "partial"),)
    assert ask(run, range(1, 13)) == (Miss(2, 3, "partial"),), "the last token of a prompt is always computed"


def test_a_prompt_shorter_than_a_block_is_only_that():
    assert ask(run_of(), [1, 2]) == (Miss(0, 1, "partial"),)


def test_the_first_token_that_differs_is_named():
    run = run_of()
    ask(run, range(1, 14))
    changed = [1, 2, 3, 4, 5, 6, 99, 8, 9, 10, 11, 12, 13]
    assert ask(run, changed) == (Miss(1, 3, "divergent", 6.0, there=(7, 8)), Miss(3, 4, "partial"))
    assert ask(run, [1, 2, 3, 4, 98, 6, 7, 8, 9])[0] == Miss(1, 2, "divergent", 4.0, there=(5, 6, 7, 8))
    assert ask(run, [1, 9, 9, 9, 9])[0] == Miss(0, 1, "divergent", 1.0, there=(2, 3, 4))
    assert ask(run, [7, 7, 7, 7, 7])[0] == Miss(0, 1, "cold"), "every prompt differs from others at its first token"


def test_what_goes_on_where_nobody_went_is_cold():
    run = run_of()
    ask(run, range(1, 10))
    assert ask(run, range(1, 20)) == (Miss(2, 4, "cold"), Miss(4, 5, "partial"))


def test_what_was_evicted_says_when_and_for_whom():
    run = run_of(num_blocks=8, max_context=32)
    ask(run, range(1, 14), tenant="lab")
    ask(run, range(100, 131), tenant="acme")
    evicted_at = run.ended_at["r1"] - 0.001
    first, rest = ask(run, range(1, 14), tenant="lab")[0], ask(run, range(1, 14), tenant="lab")
    assert first._replace(at=None) == Miss(0, 3, "evicted", None, "acme")
    assert first.at is not None
    assert first.at == evicted_at - (run.ended_at["r2"] - 0.001)
    assert rest == (Miss(3, 4, "partial"),), "it is back"


def test_what_only_others_have_is_in_another_namespace():
    run = run_of()
    ask(run, range(1, 14), cache_key=b"acme")
    assert ask(run, range(1, 14), cache_key=b"lab") == (Miss(0, 3, "namespace"), Miss(3, 4, "partial"))


def test_what_the_request_may_not_take_is_off():
    run = run_of()
    ask(run, range(1, 18))
    assert ask(run, range(1, 18), match_limit=8) == (Miss(2, 4, "off"), Miss(4, 5, "partial"))
    assert ask(run_of(prefix_cache=False), range(1, 14)) == (Miss(0, 3, "off"), Miss(3, 4, "partial"))


def test_digests_are_those_of_the_tree():
    run = run_of()
    ask(run, range(1, 14), cache_key=b"x")
    for node in run.scheduler.kv.tree.nodes():
        assert node.parent is not None
        assert _chained(node.parent.digest, node.key) == node.digest


def test_blocks_with_names_of_their_own_have_reasons_too():
    run = run_of()
    ask(run, range(9), block_keys=(71, 72))
    assert ask(run, range(9), block_keys=(71, 73)) == (Miss(1, 2, "divergent", 4.0), Miss(2, 3, "partial"))
