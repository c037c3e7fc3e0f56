"""What each tenant received and may receive: weighted virtual token counters, places held, token rates.

A tenant's `service` grows by `prompt_weight` for each uncached prompt token that is computed for it, `output_weight`
for each token it gets and `cached_weight` for each token found in the cache, all divided by its weight. Work that the
engine repeats (after a preemption) is charged once. A tenant that comes back from idleness is lifted to the least
service among those that are active, so idleness earns no credit. The idea is that of virtual token counters
(arXiv 2401.00588).

Invariants: service never falls; a tenant is active while it has a waiting or running request; `virtual`, the least
service among active tenants, never falls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pellucid.core.tenants import Tenant

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
CACHED_WEIGHT = 1.0 / 64
SECONDS_PER_MINUTE = 60.0
_MANY_ACCOUNTS = 1024


@dataclass(slots=True)
class Account:
    """One tenant's counters. `rate_level` is what it may still compute now under `tokens_per_minute`, in tokens; it
    may be below 0, since what was admitted is finished."""

    tenant: Tenant
    service: float = 0.0
    num_waiting: int = 0
    num_running: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    rate_level: float = 0.0
    rate_at: float = field(default=float("-inf"))

    @property
    def active(self) -> bool:
        return self.num_waiting + self.num_running > 0


class ServiceBook:
    """The accounts of all tenants. `quantum`, in service units, is how far locality and chance may lead one ahead."""

    def __init__(self, tenants: Iterable[Tenant], quantum: float) -> None:
        self.quantum = quantum
        self.virtual = 0.0
        self._tenants: dict[str, Tenant] = {}
        self._accounts: dict[str, Account] = {}
        self.reconfigure(tenants)

    def reconfigure(self, tenants: Iterable[Tenant]) -> None:
        """Take new weights and limits; counters stay."""
        self._tenants = {tenant.name: tenant for tenant in tenants}
        for name, account in self._accounts.items():
            account.tenant = self._tenants.get(name) or Tenant(name)

    def account(self, name: str) -> Account:
        """The account of a tenant, opened when first asked for."""
        account = self._accounts.get(name)
        if account is None:
            if len(self._accounts) > _MANY_ACCOUNTS:
                self._forget_idle()
            account = self._accounts[name] = Account(self._tenants.get(name) or Tenant(name))
        return account

    def accounts(self) -> list[Account]:
        """Every account that is open, in the order in which they were opened."""
        return list(self._accounts.values())

    def service(self, name: str) -> float:
        return self.account(name).service

    def entitlement(self, name: str) -> float:
        """The share of places that is due to `name` among the tenants that are active now, itself included."""
        weight = self.account(name).tenant.weight
        total = sum(a.tenant.weight for a in self._accounts.values() if a.active and a.tenant.name != name)
        return weight / (weight + total)

    def ahead(self) -> list[str]:
        """Tenants that are more than a quantum ahead of the least-served one with a request waiting."""
        waiting = [a.service for a in self._accounts.values() if a.num_waiting]
        if not waiting:
            return []
        limit = min(waiting) + self.quantum
        return [a.tenant.name for a in self._accounts.values() if a.service > limit]

    def gap(self) -> float:
        """The largest difference of service between two tenants with a request waiting."""
        waiting = [a.service for a in self._accounts.values() if a.num_waiting]
        return max(waiting) - min(waiting) if waiting else 0.0

    # -- places ----------------------------------------------------------------------------------------------------

    def wait(self, name: str) -> None:
        """A request of `name` begins to wait."""
        account = self.account(name)
        if not account.active:
            self._advance()
            account.service = max(account.service, self.virtual)
        account.num_waiting += 1

    def unwait(self, name: str) -> None:
        """It waits no longer."""
        account = self.account(name)
        account.num_waiting -= 1
        self._left(account)

    def start(self, name: str) -> None:
        """A request of `name`, which was waiting, runs."""
        account = self.account(name)
        account.num_waiting -= 1
        account.num_running += 1

    def stop(self, name: str) -> None:
        """A request of `name` runs no longer."""
        account = self.account(name)
        account.num_running -= 1
        self._left(account)

    def stop_to_wait(self, name: str) -> None:
        """A running request of `name` waits again."""
        account = self.account(name)
        account.num_running -= 1
        account.num_waiting += 1

    # -- charges ---------------------------------------------------------------------------------------------------

    def charge(self, name: str, *, prompt: int = 0, output: int = 0, cached: int = 0) -> None:
        """Count tokens that were computed, generated or found in the cache for `name`."""
        account = self.account(name)
        account.prompt_tokens += prompt
        account.output_tokens += output
        account.cached_tokens += cached
        account.rate_level -= prompt + output
        tokens = PROMPT_WEIGHT * prompt + OUTPUT_WEIGHT * output + CACHED_WEIGHT * cached
        account.service += tokens / account.tenant.weight

    def seconds_until_allowed(self, name: str, now: float) -> float:
        """Seconds until `name` is within its tokens per minute (0: now). The allowance is a bucket of one minute's
        tokens that fills evenly; a request may start while it is not empty."""
        account = self.account(name)
        limit = account.tenant.tokens_per_minute
        if limit is None:
            return 0.0
        rate = limit / SECONDS_PER_MINUTE
        elapsed = now - account.rate_at
        account.rate_level = float(limit) if elapsed >= 1e9 else min(account.rate_level + elapsed * rate, float(limit))
        account.rate_at = now
        return 0.0 if account.rate_level > 0 else (1.0 - account.rate_level) / rate

    def _left(self, account: Account) -> None:
        """Whoever leaves last takes the time along: who comes next starts where it stopped."""
        if not account.active:
            self._advance()
            if not any(a.active for a in self._accounts.values()):
                self.virtual = max(self.virtual, account.service)

    def _advance(self) -> None:
        active = [a.service for a in self._accounts.values() if a.active]
        if active:
            self.virtual = max(self.virtual, min(active))

    def _forget_idle(self) -> None:
        """Drop accounts that say nothing: idle, not configured, not ahead, so that coming back would lift them."""
        self._accounts = {
            name: account
            for name, account in self._accounts.items()
            if account.active or name in self._tenants or account.service > self.virtual
        }
