"""Who is computing which block next, so that a second request with the same prefix waits for it, not repeats it.

Each running sequence that still has full prompt blocks to publish claims the next one: "below this node, under this
key". A request whose cached prefix ends at that node and goes on with that key would compute exactly that block. Once
the block is published the claim moves on, and whoever waited looks again. A claim ends with its holder's prompt,
preemption or end, so nobody waits for something that nobody computes; `prefix_wait_steps` bounds the wait besides.
"""

from __future__ import annotations

from collections.abc import Mapping

from pellucid.core.kv_manager import KVManager, PrefixMatch
from pellucid.core.sequence import Claim, Sequence


class PrefixClaims:
    """At most one claim per sequence, and one holder per claim. Nobody waits for more than `wait_steps` steps."""

    def __init__(self, block_size: int, wait_steps: int) -> None:
        self._block_size, self._wait_steps = block_size, wait_steps
        self._holders: dict[Claim, Sequence] = {}
        self._claims: dict[int, Claim] = {}

    def renew(self, sequence: Sequence) -> None:
        """Claim the next unpublished full block of the sequence's prompt, if there is one and nobody else has it."""
        self.drop(sequence)
        index = sequence.num_published
        if (index + 1) * self._block_size > sequence.num_prompt:
            return
        node = sequence.node
        assert node is not None
        claim = (node if index else sequence.namespace, sequence.key(index))
        if claim not in self._holders:
            self._holders[claim] = sequence
            self._claims[sequence.id] = claim

    def drop(self, sequence: Sequence) -> None:
        """The sequence computes nothing any more (or something else)."""
        claim = self._claims.pop(sequence.id, None)
        if claim is not None:
            del self._holders[claim]

    def match(self, sequence: Sequence, kv: KVManager) -> PrefixMatch | None:
        """The sequence's cached prefix, or None while another sequence is computing the block that would follow it."""
        patient = sequence.num_waited_steps < self._wait_steps
        if patient and sequence.awaited is not None and sequence.awaited in self._holders:
            sequence.num_waited_steps += 1
            return None
        match = kv.match(sequence)
        sequence.awaited = self._awaited(sequence, match, kv.match_limit(sequence))
        if patient and sequence.awaited is not None:
            sequence.num_waited_steps += 1
            return None
        sequence.awaited = None
        return match

    def _awaited(self, sequence: Sequence, match: PrefixMatch, limit: int) -> Claim | None:
        """The claim of somebody who is computing the block after `match` for `sequence`, whose first `limit` tokens
        may come from the cache."""
        index = match.num_blocks
        if (index + 1) * self._block_size > limit:
            return None
        claim = (match.nodes[-1] if index else sequence.namespace, sequence.key(index))
        return claim if claim in self._holders else None

    def held_only_by(self, running: Mapping[int, Sequence]) -> bool:
        """Whether every claim is of a sequence in `running` (by id), and the two views of the claims agree."""
        return len(self._claims) == len(self._holders) and all(
            i in running and self._holders.get(claim) is running[i] for i, claim in self._claims.items()
        )
