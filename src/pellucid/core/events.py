"""What a commit, an abort or an add produced, for whoever listens: request streams, metrics, recorders.

Events are facts in the past tense; nothing in the core reacts to them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pellucid.core.ledger import Causes, LedgerReport

FinishReason = Literal["stop", "length", "abort", "deadline"]
"""Why a request ended; "deadline": its deadline passed while it waited, and nothing of it was or will be computed."""


class Queued(NamedTuple):
    """A request was accepted. `predicted_ttft` is what it may expect from now to its first token, in seconds; None
    where nothing is known yet of the machine's speed."""

    request_id: str
    predicted_ttft: float | None


class Admitted(NamedTuple):
    """A request got its first blocks. `num_cached` prompt tokens came from the prefix cache."""

    request_id: str
    num_prompt: int
    num_cached: int
    queue_seconds: float


class TokensGenerated(NamedTuple):
    """New output tokens of one request, in order. Never empty, never includes tokens sent before."""

    request_id: str
    token_ids: tuple[int, ...]
    num_cached: int


Fate = Literal["swap", "recompute"]


class Preempted(NamedTuple):
    """A running request lost its blocks; `num_lost` computed tokens must be computed again or copied back. `fate` is
    what was predicted to be cheaper for those that do not survive in the device's cache."""

    request_id: str
    num_lost: int
    fate: Fate


class Resumed(NamedTuple):
    """A preempted request runs again: of its tokens so many were still on the device, were copied back from the host,
    and must be computed again."""

    request_id: str
    num_kept: int
    num_promoted: int
    num_recomputed: int


class Finished(NamedTuple):
    """The last event of a request. `ledger` says where its time in the engine went (None only from engines that keep
    none, such as fakes)."""

    request_id: str
    reason: FinishReason
    num_prompt: int
    num_generated: int
    num_cached: int
    ledger: LedgerReport | None = None

    @property
    def causes(self) -> Causes:
        """(cause, seconds) of the whole request; they sum to its time in the engine."""
        return self.ledger.causes if self.ledger else ()


Event = Queued | Admitted | TokensGenerated | Preempted | Resumed | Finished


class BlockStored(NamedTuple):
    """A full block entered the prefix tree. Digests chain: a digest names the block and everything before it."""

    digest: bytes
    parent: bytes
    block: int


class BlockRemoved(NamedTuple):
    """A block left the prefix tree. `block` is -1 for one that was on the host only."""

    digest: bytes
    block: int


BlockEvent = BlockStored | BlockRemoved
