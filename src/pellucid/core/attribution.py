"""How one step's wall time is shared among the sequences that were computed in it. Pure arithmetic over a `CostModel`.

A step is laid down in three layers, each priced by the model as what it adds to those below: first the sequence's own
chunk as if it were alone, then the other sequences' decodes, then the other sequences' prompt chunks.

    own     = P(own chunk alone)
    batch   = P(all decodes) - P(own chunk alone)
    stalled = P(all chunks)  - P(all decodes)          own + batch + stalled = P(all chunks)

Copies between the tiers are made within the step. What they add to it is part of the last layer that there is, and told
apart as `copying`, so that those whose blocks came back can be charged their part of it by name.

The measured time differs from the predicted P(all chunks), so the layers are scaled to it. Where it exceeds the
prediction by more than the model's spread explains, the rest was nobody's work (the host took the processor away):
`stolen`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pellucid.core.cost import CostModel, StepFeatures
from pellucid.core.plan import Chunk

_SPREADS = 3.0  # standard deviations that a step may lie above its prediction and still be explained by it
_LEAST_SLACK = 0.5  # and never less than this part of the prediction, however sure the model is


class StepShares(NamedTuple):
    """One step's seconds, shared. For every decode `own + batch + stalled + stolen` is the step's wall time, where
    `batch` is `decoding - own`; for every other chunk `own + (what others took) + stolen` is.

    `own` runs parallel to the chunks. `decoding` is what all decodes together took, `stalled` what the other chunks
    added, and `caused` is `stalled` by the index of the chunk that caused it. `copying` is what copies added: a part of
    `stalled`, or of `decoding` where all are decodes, and caused by no chunk.
    """

    own: list[float]
    caused: dict[int, float]
    decoding: float
    stalled: float
    stolen: float
    copying: float = 0.0


def share_step(
    cost: CostModel, chunks: Sequence[Chunk], is_decode: Sequence[bool], wall_seconds: float, copied_bytes: int = 0
) -> StepShares:
    """Share `wall_seconds` of a step. `is_decode` runs parallel to `chunks`; `copied_bytes` moved between tiers in it.

    The model is asked four times for all decodes, however many, and once for each other shape of chunk: alone, a
    decode's time is linear in its context (see `core/cost.py`), so that two points give them all.
    """
    all_features, decode_features, longest = _features(chunks, is_decode, copied_bytes)
    predicted = cost.predict(all_features)
    total = predicted.seconds
    explained = wall_seconds
    if wall_seconds > total + max(_SPREADS * predicted.spread, _LEAST_SLACK * total):
        explained = total
    scale = explained / total if total > 0.0 else 0.0
    copying = 0.0
    if copied_bytes:
        copying = max(0.0, total - cost.predict(all_features._replace(copied_bytes=0)).seconds) * scale
    alone = [total] if len(chunks) == 1 and not copied_bytes else _alone(cost, chunks, is_decode, longest)
    if all(is_decode):
        own = [min(seconds, total) * scale for seconds in alone]
        return StepShares(own, {}, explained, 0.0, wall_seconds - explained, copying)
    decoding = min(cost.predict(decode_features).seconds, total) if longest else 0.0
    own = [min(seconds, decoding if decodes else total) * scale for seconds, decodes in zip(alone, is_decode)]
    stalled = explained - decoding * scale
    others = {index: alone[index] for index, decodes in enumerate(is_decode) if not decodes}
    per_second = max(0.0, stalled - copying) / (sum(others.values()) or 1.0)
    caused = {index: seconds * per_second for index, seconds in others.items()}
    return StepShares(own, caused, decoding * scale, stalled, wall_seconds - explained, copying)


def _features(
    chunks: Sequence[Chunk], is_decode: Sequence[bool], copied_bytes: int
) -> tuple[StepFeatures, StepFeatures, int]:
    """Of all chunks, of the decodes alone, and the longest context of a decode (0 without any)."""
    tokens = attended = context = samples = 0
    decode_tokens = decode_attended = decode_context = decode_samples = num_decodes = longest = 0
    for (_, start, end, samples_here), decodes in zip(chunks, is_decode, strict=True):
        num = end - start
        pairs = num * (start + end + 1) // 2
        if decodes:
            num_decodes += 1
            decode_tokens += num
            decode_attended += pairs
            decode_context += end
            decode_samples += samples_here
            longest = max(longest, end)
        else:
            tokens += num
            attended += pairs
            context += end
            samples += samples_here
    decode = StepFeatures(decode_tokens, decode_attended, decode_context, num_decodes, decode_samples)
    whole = StepFeatures(
        tokens + decode_tokens,
        attended + decode_attended,
        context + decode_context,
        len(chunks),
        samples + decode_samples,
        copied_bytes,
    )
    return whole, decode, longest


def _alone(cost: CostModel, chunks: Sequence[Chunk], is_decode: Sequence[bool], longest: int) -> list[float]:
    """What each chunk would have taken in a step of its own, as the model sees it."""
    shortest = cost.predict(StepFeatures(1, 1, 1, 1, 1)).seconds
    per_token = 0.0
    if longest > 1:
        per_token = (cost.predict(StepFeatures(1, longest, longest, 1, 1)).seconds - shortest) / (longest - 1)
    known: dict[tuple[int, int, bool], float] = {}
    alone = []
    for (_, start, end, samples), decodes in zip(chunks, is_decode, strict=True):
        if decodes and end - start == 1:
            alone.append(shortest + per_token * (end - 1))
            continue
        shape = (start, end, samples)
        seconds = known.get(shape)
        if seconds is None:
            num = end - start
            features = StepFeatures(num, num * (start + end + 1) // 2, end, 1, int(samples))
            seconds = known[shape] = cost.predict(features).seconds
        alone.append(seconds)
    return alone
