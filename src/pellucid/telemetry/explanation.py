"""A ledger in plain words: what a person would say who has read all its numbers. English and Chinese.

`explain` makes the sentences for one request, `aggregate` the answer to "would a better cache help?" over many. Both
take finished ledgers and decide only what is worth saying (shares of the total, the heaviest blocker); the words stand
in one table a language. What a tenant may not know (who else is there) `redacted` removes before anything is said.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pellucid.core import ledger as cause
from pellucid.core.ledger import Blocker, Causes, LedgerReport, Miss

Language = Literal["en", "zh"]

_WORTH_SAYING = 0.1  # a part of the total below which a cause is left to the numbers
_BEHIND_PROMPTS = (cause.STEP_IN_FLIGHT, cause.CAPACITY, cause.PREFILL_WAIT, cause.DECODE_STALLED)
_OF_ONES_OWN = (cause.PREFILL_OWN, cause.DECODE_OWN)
OF_COMPUTING_PROMPTS = (
    cause.PREFILL_OWN,
    cause.PREFILL_WAIT,
    cause.PREFILL_PROMOTE,
    cause.DECODE_STALLED,
    cause.STEP_IN_FLIGHT,
    cause.CAPACITY,
    cause.FAIRNESS,
    cause.SHARED_PREFIX,
    cause.PREEMPTED_RECOMPUTE,
)
"""What a cache that held every prompt could remove at most: reading one's own, and all waiting for others' prompts.
Part of that waiting has other reasons (slots, decodes in the same step), so the truth is less."""


def redacted(report: LedgerReport, tenant: str) -> LedgerReport:
    """The ledger as its own tenant may see it: others are there, but not who, nor how long their prompts are, and
    nothing of what they have in the cache."""

    def seen(blockers: Iterable[Blocker]) -> tuple[Blocker, ...]:
        return tuple(b if b.tenant == tenant else b._replace(request_id="", tenant="", num_prompt=0) for b in blockers)

    return replace(
        report,
        misses=tuple(_seen_miss(miss, tenant) for miss in report.misses),
        blockers=seen(report.blockers),
        first_blockers=seen(report.first_blockers),
    )


def _seen_miss(miss: Miss, tenant: str) -> Miss:
    """What others have cached is as good as not there."""
    if miss.why == "namespace":
        return Miss(miss.start, miss.end, "cold")
    return miss if miss.tenant == tenant else miss._replace(tenant=None)


def meaning(name: str, language: Language = "en") -> str:
    """What a cause means, in a few words."""
    return _WORDS[language][name]


def explain(report: LedgerReport, language: Language = "en") -> list[str]:
    """A few sentences, the most telling first. Parts that are less than a tenth of the time are left out."""
    words = _WORDS[language]
    if report.first_token_seconds is None:
        return [_never(report, words), *_cache(report, words)]
    return [
        _first_token(report, words),
        *_writing(report, words),
        *_interruptions(report, words),
        *_cache(report, words),
    ]


def _first_token(report: LedgerReport, words: Mapping[str, str]) -> str:
    """What the first token waited for: somebody's prompt, or else its largest cause."""
    total = report.first_token_seconds
    assert total is not None
    causes = dict(report.first_token_causes)
    behind = sum(causes.get(name, 0.0) for name in _BEHIND_PROMPTS)
    if report.first_blockers and behind > _WORTH_SAYING * total:
        blocker = report.first_blockers[0]
        waited = min(blocker.seconds, behind)
        return words["behind"].format(part=_time(waited), total=_time(total), whose=_whose(blocker, words))
    name = max(causes, key=causes.__getitem__, default=cause.PREFILL_OWN)
    return words["first"].format(total=_time(total), part=_time(causes.get(name, 0.0)), cause=words[name])


def _never(report: LedgerReport, words: Mapping[str, str]) -> str:
    causes = dict(report.causes)
    name = max(causes, key=causes.__getitem__, default=cause.ENGINE_GAP)
    part = _time(causes.get(name, 0.0))
    return words["never"].format(total=_time(report.e2e_seconds), part=part, cause=words[name])


def _writing(report: LedgerReport, words: Mapping[str, str]) -> list[str]:
    """The decode phase, beside what it would have taken alone."""
    seconds = sum(phase.end - phase.start for phase in report.phases if phase.name == "decode")
    num_tokens = report.tokens.output
    if num_tokens < 2 or seconds < _WORTH_SAYING * report.e2e_seconds:
        return []
    floor = report.floors.decode_per_token
    sentence = words["writing"].format(
        part=_time(seconds),
        total=_time(report.e2e_seconds),
        num=f"{num_tokens:,}",
        floor=_time(floor * (num_tokens - 1)),
        each=_time(floor),
    )
    causes = dict(report.causes)
    stalled = causes.get(cause.DECODE_STALLED, 0.0)
    if stalled > _WORTH_SAYING * report.e2e_seconds and report.blockers:
        more = words["stalled"].format(part=_time(stalled), whose=_whose(report.blockers[0], words))
        return [sentence, more]
    return [sentence]


def _interruptions(report: LedgerReport, words: Mapping[str, str]) -> list[str]:
    """What else took a tenth of the time."""
    causes, said = dict(report.causes), []
    preempted = sum(causes.get(name, 0.0) for name in _PREEMPTED)
    if preempted > _WORTH_SAYING * report.e2e_seconds:
        parts = [_time(causes.get(name, 0.0)) for name in _PREEMPTED]
        said.append(
            words["preempted"].format(num=report.num_preemptions, wait=parts[0], swap=parts[1], recompute=parts[2])
        )
    covered = {*_BEHIND_PROMPTS, *_OF_ONES_OWN, *_PREEMPTED, cause.DECODE_BATCH}
    for name, seconds in report.causes:
        if name not in covered and seconds > _WORTH_SAYING * report.e2e_seconds:
            said.append(words["also"].format(part=_time(seconds), cause=words[name]))
    return said


_PREEMPTED = (cause.PREEMPTED_WAIT, cause.PREEMPTED_SWAP, cause.PREEMPTED_RECOMPUTE)


def _cache(report: LedgerReport, words: Mapping[str, str]) -> list[str]:
    """What the prefix hit saved, or why the largest missing part missed."""
    tokens, floors = report.tokens, report.floors
    if tokens.cached:
        saved = _time(floors.without_cache - floors.with_cache)
        said = [words["hit"].format(cached=f"{tokens.cached:,}", prompt=f"{tokens.prompt:,}", saved=saved)]
        return said + [_missed(miss, words) for miss in report.misses if miss.texts is not None]
    misses = [miss for miss in report.misses if miss.why != "partial"]
    if not misses:
        return []
    return [_missed(max(misses, key=lambda m: m.end - m.start), words)]


def _missed(miss: Miss, words: Mapping[str, str]) -> str:
    ago = _time(-miss.at) if miss.at is not None and miss.why == "evicted" else ""
    place = f"{miss.at:,.0f}" if miss.at is not None and miss.why == "divergent" else ""
    whose = words["tenant"].format(tenant=miss.tenant) if miss.tenant else words["somebody"]
    if miss.texts is not None:
        here, there = (json.dumps(text, ensure_ascii=False) for text in miss.texts)
        return words["miss.texts"].format(place=place, here=here, there=there)
    return words["miss." + miss.why].format(ago=ago, place=place, whose=whose)


def _whose(blocker: Blocker, words: Mapping[str, str]) -> str:
    if not blocker.request_id:
        return words["another"]
    of_tenant = words["of_tenant"].format(tenant=blocker.tenant) if blocker.tenant else words["of_request"]
    return words["prompt"].format(of_tenant=of_tenant, num=f"{blocker.num_prompt:,}", id=blocker.request_id)


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Many requests together. `causes` are summed over all; `removable_seconds` is the most that a perfect prefix cache
    could have removed of `waited_seconds`, the sum of end-to-end times, of which `own_prefill_seconds` is certain."""

    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    waited_seconds: float
    removable_seconds: float
    own_prefill_seconds: float
    causes: Causes

    @property
    def hit_rate(self) -> float:
        """Cached prompt tokens of all prompt tokens; 0 without any."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def aggregate(reports: Iterable[LedgerReport]) -> Aggregate:
    """Sums over these ledgers, each counted once."""
    count = prompt = cached = output = 0
    waited = 0.0
    causes: dict[str, float] = {}
    for report in reports:
        count += 1
        prompt += report.tokens.prompt
        cached += report.tokens.cached
        output += report.tokens.output
        waited += report.e2e_seconds
        for name, seconds in report.causes:
            causes[name] = causes.get(name, 0.0) + seconds
    return Aggregate(
        count,
        prompt,
        cached,
        output,
        waited,
        sum(causes.get(name, 0.0) for name in OF_COMPUTING_PROMPTS),
        causes.get(cause.PREFILL_OWN, 0.0),
        tuple((name, causes[name]) for name in cause.CAUSES if name in causes),
    )


def explain_aggregate(total: Aggregate, language: Language = "en") -> list[str]:
    """The sentences that settle whether the cache is to blame."""
    words = _WORDS[language]
    if not total.num_requests:
        return [words["nothing"]]
    waited = total.waited_seconds or 1.0
    name, seconds = max(total.causes, key=lambda pair: pair[1])
    return [
        words["hit_rate"].format(
            rate=f"{total.hit_rate:.0%}", part=f"{total.removable_seconds / waited:.0%}", num=f"{total.num_requests:,}"
        ),
        words["certain"].format(
            part=f"{total.own_prefill_seconds / waited:.0%}",
            rest=f"{(total.removable_seconds - total.own_prefill_seconds) / waited:.0%}",
        ),
        words["largest"].format(part=f"{seconds / waited:.0%}", cause=words[name]),
    ]


def _time(seconds: float) -> str:
    """A duration with three digits."""
    if seconds >= 100.0:
        return f"{seconds:,.0f} s"
    if seconds >= 1.0:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms"


_ENGLISH = {
    "behind": "{part} of the {total} to the first token were spent waiting behind {whose}.",
    "first": "The first token took {total}; {part} of that were spent {cause}.",
    "never": "It ended after {total} without a token; {part} of that were spent {cause}.",
    "writing": "Writing {num} tokens took {part} of the {total}, one round a token; alone on this machine that is "
    "{floor} ({each} a token), which no cache can remove.",
    "stalled": "{part} of the writing were steps held up by other prompts, most of all by {whose}.",
    "preempted": "It was preempted {num} times: {wait} waiting, {swap} copying, {recompute} computing again.",
    "also": "{part} were spent {cause}.",
    "hit": "The prefix hit ({cached} of {prompt} prompt tokens) saved about {saved}.",
    "miss.cold": "Nothing of its prompt was in the cache: nobody had asked it here before.",
    "miss.evicted": "Its prompt had been in the cache until {ago} before it came, when {whose} needed the memory.",
    "miss.divergent": "Its prompt left what was cached at token {place}.",
    "miss.texts": "Its prompt left what was cached at token {place}: it goes on with {here}, the cache with {there}.",
    "miss.namespace": "Its prompt was in the cache, but only for others.",
    "miss.off": "It was not allowed to use the cache.",
    "prompt": "{of_tenant} {num}-token prompt ({id})",
    "of_tenant": "tenant {tenant}'s",
    "of_request": "a",
    "another": "another tenant's prompt",
    "tenant": "tenant {tenant}",
    "somebody": "somebody",
    "hit_rate": "Over {num} requests the hit rate was {rate}; a perfect cache would still remove at most {part} of "
    "what users waited.",
    "certain": "{part} went into reading one's own prompt, {rest} into waiting that others' prompts may have caused.",
    "largest": "The largest part, {part}, was spent {cause}.",
    "nothing": "No request has been kept for this question.",
    **cause.CAUSES,
    cause.DECODE_BATCH: "in steps that were longer because other sequences decoded in them",
    cause.DECODE_STALLED: "in steps that were longer because of other requests' prompts",
    cause.ENGINE_GAP: "between steps, or in a step that the machine was taken away from",
}
_CHINESE = {
    "behind": "到首个 token 的 {total} 中，有 {part} 在等待{whose}。",
    "first": "首个 token 用了 {total}，其中 {part} 用于{cause}。",
    "never": "{total} 后结束，没有产生 token；其中 {part} 用于{cause}。",
    "writing": "{total} 中有 {part} 用于逐个生成 {num} 个 token，每个 token 一轮；"
    "即使独占本机也需要 {floor}（每个 {each}），任何缓存都无法省去。",
    "stalled": "生成过程中有 {part} 被其他请求的提示词拖慢，主要是{whose}。",
    "preempted": "被抢占 {num} 次：等待 {wait}，搬移 {swap}，重新计算 {recompute}。",
    "also": "另有 {part} 用于{cause}。",
    "hit": "前缀命中（{prompt} 个提示 token 中的 {cached} 个）约省下 {saved}。",
    "miss.cold": "提示词完全不在缓存中：这里此前没有人发送过。",
    "miss.evicted": "提示词曾在缓存中，在请求到达前 {ago} 因{whose}需要内存而被淘汰。",
    "miss.divergent": "提示词从第 {place} 个 token 起与缓存内容不同。",
    "miss.texts": "提示词从第 {place} 个 token 起与缓存内容不同：提示词接下来是 {here}，缓存中是 {there}。",
    "miss.namespace": "提示词在缓存中，但只属于其他租户。",
    "miss.off": "该请求不允许使用缓存。",
    "prompt": "{of_tenant} {num} 个 token 的提示词（{id}）",
    "of_tenant": "租户 {tenant} 的",
    "of_request": "一个",
    "another": "另一个租户的提示词",
    "tenant": "租户 {tenant} ",
    "somebody": "其他请求",
    "hit_rate": "{num} 个请求的缓存命中率为 {rate}；即使缓存完美，最多也只能再减少用户等待时间的 {part}。",
    "certain": "其中 {part} 用于计算自己的提示词，{rest} 是可能由其他提示词造成的等待。",
    "largest": "占比最大的是{cause}，为 {part}。",
    "nothing": "没有符合条件的请求记录。",
    cause.TOKENIZE: "把文本切分为 token",
    cause.GRAMMAR: "等待输出约束编译完成",
    cause.TENANT_LIMIT: "因租户自身的上限而排队",
    cause.FAIRNESS: "因公平调度让其他租户先行而排队",
    cause.MEMORY: "等待空闲的 KV 块",
    cause.CAPACITY: "等待运行名额或步内的空位",
    cause.STEP_IN_FLIGHT: "等待到达时正在计算的那一批",
    cause.SHARED_PREFIX: "等待另一个请求算完相同的前缀",
    cause.PREFILL_OWN: "计算自己的提示词",
    cause.PREFILL_PROMOTE: "把缓存的前缀从主机内存搬回",
    cause.PREFILL_WAIT: "提示词计算途中等待步内的其他计算",
    cause.DECODE_OWN: "生成自己的 token（如同独占）",
    cause.DECODE_BATCH: "因同批的其他序列也在生成而变长的步",
    cause.DECODE_STALLED: "因其他请求的提示词而变长的步",
    cause.PREEMPTED_WAIT: "被抢占后等待",
    cause.PREEMPTED_SWAP: "在主机内存与设备之间搬移自己的块",
    cause.PREEMPTED_RECOMPUTE: "重新计算因抢占而丢失的内容",
    cause.ENGINE_GAP: "步与步之间，或计算途中机器被占用",
    cause.DELIVER: "把 token 变回文本并写出",
    cause.CLIENT: "等待读取过慢的客户端",
}
_WORDS: Mapping[Language, Mapping[str, str]] = {"en": _ENGLISH, "zh": _CHINESE}
