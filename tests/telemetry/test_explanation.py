"""What is said of a ledger, in both languages, and what a tenant may not hear."""

from __future__ import annotations

import pytest
from tests.telemetry.reports import BEHIND_A_DOCUMENT, WRITING, report

from pellucid.core.ledger import CAUSES, Blocker, Floors, Miss, TokenCounts
from pellucid.telemetry import explanation
from pellucid.telemetry.explanation import aggregate, explain, explain_aggregate, redacted


def test_a_cached_request_behind_a_document_hears_whose_it_was():
    first, writing, stalled, cache = explain(BEHIND_A_DOCUMENT)
    assert first == (
        "900 ms of the 980 ms to the first token were spent waiting behind tenant acme's 6,000-token prompt (cmpl-2)."
    )
    assert "Writing 20 tokens took 620 ms" in writing
    assert stalled.startswith("500 ms of the writing were steps held up by other prompts")
    assert cache == "The prefix hit (1,488 of 1,500 prompt tokens) saved about 310 ms."


def test_a_request_that_writes_hears_that_no_cache_helps():
    sentences = explain(WRITING)
    assert any("Writing 800 tokens took 4.1 s of the 4.13 s, one round a token" in s for s in sentences)
    assert any(
        "alone on this machine that is 3.84 s (4.8 ms a token), which no cache can remove" in s for s in sentences
    )


def test_a_tenant_hears_of_others_but_not_who_nor_how_much():
    hidden = redacted(BEHIND_A_DOCUMENT, "own")
    for language in ("en", "zh"):
        said = " ".join(explain(hidden, language))
        assert not any(secret in said for secret in ("acme", "zeta", "6,000", "6000", "cmpl-2"))
    assert "another tenant's prompt" in explain(hidden)[0]
    assert hidden.causes == BEHIND_A_DOCUMENT.causes
    assert "acme" not in repr(hidden)
    assert "6000" not in repr(hidden)


def test_a_tenant_sees_its_own_other_requests():
    assert redacted(BEHIND_A_DOCUMENT, "acme").first_blockers == BEHIND_A_DOCUMENT.first_blockers


def test_a_tenant_cannot_tell_what_others_have_in_the_cache():
    misses = (Miss(0, 5, "namespace"), Miss(5, 9, "evicted", -7.0, "acme"), Miss(9, 10, "partial"))
    seen = redacted(report({"queue.capacity": 1.0}, misses=misses), "own")
    assert seen.misses == (Miss(0, 5, "cold"), Miss(5, 9, "evicted", -7.0, None), Miss(9, 10, "partial"))


@pytest.mark.parametrize(
    ("miss", "said"),
    [
        (Miss(0, 9, "cold"), "nobody had asked it here before"),
        (Miss(0, 9, "evicted", -3.2, "acme"), "until 3.2 s before it came, when tenant acme needed the memory"),
        (Miss(0, 9, "divergent", 37.0), "left what was cached at token 37"),
        (
            Miss(0, 9, "divergent", 37.0, texts=('today is "Monday"', " today is")),
            r'at token 37: it goes on with "today is \"Monday\"", the cache with " today is".',
        ),
        (Miss(0, 9, "namespace"), "only for others"),
        (Miss(0, 9, "off"), "not allowed"),
    ],
)
def test_a_miss_has_its_reason(miss, said):
    sentences = explain(report({"queue.capacity": 0.1}, {"prefill.own": 1.0}, {"decode.own": 0.1}, misses=(miss,)))
    assert said in sentences[-1]


def test_what_took_a_tenth_is_said_and_what_took_less_is_not():
    ledger = report(
        {"queue.memory": 1.0},
        {"prefill.own": 2.0},
        {"decode.own": 1.0, "preempted.wait": 2.0, "preempted.recompute": 1.0},
        {"client": 2.0, "deliver": 0.1},
        num_preemptions=2,
    )
    said = " ".join(explain(ledger))
    assert "preempted 2 times: 2 s waiting, 0 ms copying, 1 s computing again" in said
    assert "2 s were spent waiting for a client that read too slowly" in said
    assert "detokeniz" not in said
    assert "writing it out" not in said


def test_the_aggregate_says_what_a_perfect_cache_would_still_remove():
    total = aggregate([BEHIND_A_DOCUMENT, WRITING])
    assert total.num_requests == 2
    assert total.hit_rate == pytest.approx((1488 + 1425) / 3000)
    removable = 0.412 + 0.020 + 0.547 + 0.5 + 0.004 + 0.020
    assert total.removable_seconds == pytest.approx(removable)
    assert sum(seconds for _, seconds in total.causes) == pytest.approx(total.waited_seconds)
    first = explain_aggregate(total)[0]
    assert "the hit rate was 97%" in first
    assert f"at most {removable / total.waited_seconds:.0%} of what users waited" in first
    assert explain_aggregate(aggregate([])) == ["No request has been kept for this question."]


def test_both_languages_have_every_word():
    english, chinese = explanation._ENGLISH, explanation._CHINESE
    assert english.keys() == chinese.keys()
    assert set(CAUSES) <= english.keys()
    for name, text in english.items():
        assert set(_fields(text)) == set(_fields(chinese[name])), name
    ledger = report({"queue.memory": 1.0}, {"prefill.own": 1.0}, {"decode.own": 3.0}, tokens=TokenCounts(9, 8, 0, 0, 9))
    assert len(explain(ledger, "zh")) == len(explain(ledger, "en"))
    assert "首个 token 用了 2 s" in explain(ledger, "zh")[0]


def _fields(text: str) -> list[str]:
    return [part.split("}")[0] for part in text.split("{")[1:]]


def test_a_request_without_a_token_and_an_unnamed_tenant():
    never = report({"queue.memory": 2.0}, floors=Floors(0.0, 0.0, 0.0))
    assert explain(never) == ["It ended after 2 s without a token; 2 s of that were spent waiting for KV blocks."]
    blocked = report(
        {"queue.step_in_flight": 1.0},
        {"prefill.own": 0.1},
        {"decode.own": 0.0},
        first_blockers=(Blocker("r", "", 7, 1.0),),
    )
    assert "waiting behind a 7-token prompt (r)." in explain(blocked)[0]
