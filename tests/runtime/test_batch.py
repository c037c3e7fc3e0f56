"""The mirror against a plain dictionary of lists, over random lives of sequences (hypothesis), and its refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.core.errors import InvariantViolation
from pellucid.core.plan import BlockUpdate, Chunk, NewSequence, StepPlan
from pellucid.core.request import SamplingParams
from pellucid.runtime.batch import SequenceMirror

GREEDY = SamplingParams(temperature=0.0)


def new(seq_id: int, tokens: list[int]) -> NewSequence:
    return NewSequence(seq_id, tuple(tokens), len(tokens), GREEDY)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_batches_equal_lists_of_lists(data: st.DataObject) -> None:
    """Whatever comes and goes, a batch holds each chunk's tokens, positions and slots, spelt out one by one."""
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    mirror = SequenceMirror(block_size)
    tokens: dict[int, list[int]] = {}
    tables: dict[int, list[int]] = {}
    for step in range(data.draw(st.integers(1, 8))):
        gone = data.draw(st.lists(st.sampled_from(sorted(tokens)), unique=True)) if tokens else []
        for seq_id in gone:
            del tokens[seq_id], tables[seq_id]
        count = data.draw(st.integers(0 if tokens else 1, 12))
        added = {step * 100 + i: data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=90)) for i in range(count)}
        updates = []
        for seq_id, prompt in added.items():
            tokens[seq_id], tables[seq_id] = list(prompt), []
        for seq_id in tokens:  # every sequence gets the blocks it needs, and may have its last ones replaced
            start = max(0, len(tables[seq_id]) - data.draw(st.integers(0, 1)))
            need = -(-len(tokens[seq_id]) // block_size)
            fresh = tuple(data.draw(st.integers(0, 999)) for _ in range(need - start))
            tables[seq_id][start:] = fresh
            if fresh:
                updates.append(BlockUpdate(seq_id, start, fresh))
        mirror.apply(StepPlan(step, (), tuple(new(i, t) for i, t in added.items()), tuple(updates), tuple(gone)))
        assert mirror.num_sequences == len(tokens)
        chunks = []
        for seq_id in data.draw(st.lists(st.sampled_from(sorted(tokens)), min_size=1, unique=True)):
            end = len(tokens[seq_id])
            chunks.append(Chunk(seq_id, data.draw(st.integers(0, end - 1)), end, data.draw(st.booleans())))
        tile = data.draw(st.sampled_from([1, 8]))
        batch = mirror.build(chunks, lambda rows, tile=tile: -(-rows // tile) * tile)

        rows = [(c.seq_id, p) for c in chunks for p in range(c.start, c.end)]
        slots = [tables[s][p // block_size] * block_size + p % block_size for s, p in rows]
        assert batch.layout.slots.tolist() == slots
        assert batch.token_ids[: len(rows)].tolist() == [tokens[s][p] for s, p in rows]
        assert batch.positions[: len(rows)].tolist() == [p for _, p in rows]
        assert len(batch.token_ids) == len(batch.positions) == len(rows) + -len(rows) % tile
        last_rows = np.cumsum([c.num_tokens for c in chunks]) - 1
        sampled = [i for i, c in enumerate(chunks) if c.samples]
        assert batch.sample_rows.tolist() == last_rows[sampled].tolist()
        assert [mirror.sampling(line)[0] for line in batch.sample_lines] == [chunks[i].seq_id for i in sampled]
        mirror.append(batch, np.arange(len(sampled)))
        for token, i in enumerate(sampled):
            tokens[chunks[i].seq_id].append(token)


def test_refusals() -> None:
    """A plan that skips a sequence's tokens, blocks or existence is named, not computed."""
    mirror = SequenceMirror(4)
    mirror.apply(StepPlan(0, (), (new(1, [5] * 6),), (BlockUpdate(1, 0, (9,)),)))
    with pytest.raises(InvariantViolation, match=r"end=5.*6 tokens are known and 1 blocks of 4"):
        mirror.build([Chunk(1, 0, 5, True)], int)
    mirror.apply(StepPlan(1, (), blocks=(BlockUpdate(1, 1, (8,)),)))
    with pytest.raises(InvariantViolation, match=r"end=7.*6 tokens are known"):
        mirror.build([Chunk(1, 6, 7, True)], int)
    with pytest.raises(InvariantViolation, match="cannot be computed"):
        mirror.build([Chunk(1, 3, 3, True)], int)
    with pytest.raises(InvariantViolation, match="sequence 2, which the executor was never told of"):
        mirror.build([Chunk(2, 0, 1, True)], int)
    with pytest.raises(InvariantViolation, match="sequence 1 is new, and already known"):
        mirror.apply(StepPlan(2, (), (new(1, [1]),)))
    mirror.apply(StepPlan(3, (), (new(1, [1]),), released=(1,)))
    with pytest.raises(InvariantViolation, match="1 tokens are known and 0 blocks"):
        mirror.build([Chunk(1, 0, 1, True)], int)
