"""Prompts that a server cannot have seen before, yet share exactly the prefixes that the workload says they share.

A block id is realised as a run of words (or token ids) drawn from a generator seeded by the run's salt and the id, so
equal prefixes of a trace become equal prefixes on the wire, and another run with another salt shares nothing with this
one. Words are common English ones that usual tokenizers keep whole behind a space: a prompt of n words is about n
tokens. Ids come from the target's own tokenizer, so their number is exact.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain

from pellucid.workload.trace import BlockHash, TraceRequest

_COMMON = """
    about above across after again against air all along also always animal another answer any appear area around
    ask away back base beautiful because become before began behind best better between big bird black blue body
    book both box boy bring brought build came can car care carry change children city class clear close cold color
    come common complete could country course cover cross cut dark day deep different direct door down draw drive
    dry during each early earth east eat end enough even ever every eye face fact family far farm fast father feel
    few field final find fire first fish five fly follow food foot force form found four free friend from full game
    gave get girl give gold good great green ground group grow half hand happen hard head hear heat help here high
    hold home horse hot hour house hundred idea inch island just keep kind king knew know land large last late laugh
    law lead learn leave left let letter life light line list listen little live long look low machine made main
    make man many map mark may mean measure men might mile mind miss money moon more morning most mother mountain
    move much music must name near need never new next night north note nothing notice noun number object off often
    old once one only open order other out over own page paper part pass pattern people perhaps person picture piece
    place plain plan plane plant play point poor port pose power present press problem produce product pull put
    question quick rain ran reach read ready real record red remember rest right river road rock room round rule run
    said same saw say school science sea second see seem sentence serve set several shape she ship short should show
    side simple since sing sit six size sleep slow small snow some song soon sound south spell stand star start
    state stay step still stood stop story street strong study such sun sure surface table tail take talk teach tell
    ten test than them then there these thing think third thought thousand three through time together told took top
    toward town travel tree true try turn two under unit until upon usual very voice vowel walk wall want war warm
    watch water wave way week weight well west wheel where which while white whole wind with wonder wood word work
    world would write year young
"""
WORDS = tuple(_COMMON.split())

_CACHED_BLOCKS = 4096


class PromptMaker:
    """Realises prompts for one run. Without `token_ids` prompts are text, with them lists of ids from that pool."""

    def __init__(self, salt: str, token_ids: Sequence[int] | None = None) -> None:
        self.salt = salt
        self._token_ids = tuple(token_ids) if token_ids is not None else None
        self._block = lru_cache(maxsize=_CACHED_BLOCKS)(self._draw)

    def fresh(self, name: str, num_tokens: int) -> str | list[int]:
        """A prompt that shares nothing with any other name."""
        return self._join([self._draw(f"fresh/{name}", num_tokens)])

    def shared(self, prefix: str, num_prefix: int, name: str, num_own: int) -> str | list[int]:
        """`num_prefix` tokens common to all prompts of this prefix, then `num_own` of its own."""
        return self._join([self._block(f"shared/{prefix}", num_prefix), self._draw(f"fresh/{name}", num_own)])

    def realise(self, row: TraceRequest, block_size: int, name: str) -> str | list[int]:
        """The prompt of a trace's row: its blocks, then a tail that is shared only where the trace says so."""
        parts = [self._block(f"block/{block}", block_size) for block in row.prefix_block_hash]
        num_tail = row.input_len - len(row.prefix_block_hash) * block_size
        if num_tail > 0:
            own = f"block/{row.tail_block_hash}" if row.tail_block_hash is not None else f"fresh/{name}"
            parts.append(self._draw(own, num_tail))
        return self._join(parts)

    def _draw(self, name: str, num_tokens: int) -> tuple[str, ...] | tuple[int, ...]:
        rng = random.Random(f"{self.salt}/{name}")
        if self._token_ids is not None:
            return tuple(rng.choices(self._token_ids, k=num_tokens))
        return tuple(rng.choices(WORDS, k=num_tokens))

    def _join(self, parts: Iterable[Iterable[str | int]]) -> str | list[int]:
        if self._token_ids is not None:
            return [int(token) for token in chain.from_iterable(parts)]
        return " ".join(str(word) for word in chain.from_iterable(parts))


def expected_cached(rows: Iterable[TraceRequest], block_size: int) -> list[int]:
    """Per row the prompt tokens that a cache without limit would save: full blocks, at least one token computed."""
    seen: set[BlockHash] = set()
    expected = []
    for row in rows:
        num_hits = 0
        for block in row.prefix_block_hash:
            if block not in seen:
                break
            num_hits += 1
        seen.update(row.prefix_block_hash)
        expected.append(min(num_hits, max(0, row.input_len - 1) // block_size) * block_size if block_size else 0)
    return expected
