"""Whether a waiting sequence fits beside those that run, and who would have to give way so that it does.

A sequence is admitted only if all its tokens fit beside what every running one needs up to its next token, and a little
more where preemptions were frequent (`core/pressure.py`): prompts that were started in less would preempt each other
half way. Nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from pellucid.core.config import SchedulerConfig
from pellucid.core.draft import Draft
from pellucid.core.kv_manager import KVManager, PrefixMatch
from pellucid.core.policy import Policy
from pellucid.core.preemption import choose_victim
from pellucid.core.pressure import Pressure
from pellucid.core.sequence import Sequence
from pellucid.core.service import ServiceBook


class Room:
    """Looks at the scheduler's state: the pool, who runs (by id), the policy, the tenants' accounts, the pressure."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        running: Mapping[int, Sequence],
        waiting: Policy,
        book: ServiceBook,
        pressure: Pressure,
    ) -> None:
        self._config, self._kv, self._running = config, kv, running
        self._waiting, self._book, self._pressure = waiting, book, pressure

    def fits(self, sequence: Sequence, match: PrefixMatch, draft: Draft, *, without: int = 0, freed: int = 0) -> bool:
        """Whether `sequence` can start; also if `without` running ones were gone and `freed` blocks with them."""
        num_running = len(self._running) - without
        if num_running >= self._config.max_running:
            return False
        if self._pressure.storm and num_running and sequence.num_preemptions == 0:
            return False
        kept_free = draft.promised + self._pressure.headroom * num_running
        return self._kv.can_attach(match, self.num_needed(sequence), kept_free - freed)

    def victims_for(self, sequence: Sequence, match: PrefixMatch, draft: Draft) -> list[Sequence]:
        """Those who must give way so that `sequence` fits, or nobody if all of them would not be enough: who is
        preempted for nothing starts again, and loses its work again, for ever."""
        willing = partial(self._waiting.owed, sequence)
        left, victims, freed = dict(self._running), [], 0
        while victim := choose_victim(left.values(), self._waiting.victim_key, willing=willing):
            del left[victim.id]
            victims.append(victim)
            freed += self._kv.num_held_alone(victim, match) + self.num_promised(victim)
            if self.fits(sequence, match, draft, without=len(victims), freed=freed):
                return victims
        return []

    def at_tenant_limit(self, sequence: Sequence) -> bool:
        """Whether the sequence's tenant runs as many requests, or holds as many blocks, as it may."""
        account = self._book.account(sequence.request.tenant)
        tenant = account.tenant
        if tenant.max_running is not None and account.num_running >= tenant.max_running:
            return True
        if tenant.kv_share == 1.0 or account.num_running == 0:
            return False
        held = sum(len(s.block_table) for s in self._running.values() if s.request.tenant == tenant.name)
        return held + self._kv.num_blocks_for(self.num_needed(sequence)) > tenant.kv_share * self._config.num_blocks

    def num_promised(self, sequence: Sequence) -> int:
        """Blocks a running sequence still needs for the tokens it has and the next one."""
        return self._kv.num_blocks_missing(sequence, self.num_needed(sequence))

    def num_needed(self, sequence: Sequence) -> int:
        """Slots for what the sequence will have after its next sample; the last token of all is never computed on."""
        return min(max(sequence.num_known, sequence.num_tokens + 1), sequence.max_length - 1)
