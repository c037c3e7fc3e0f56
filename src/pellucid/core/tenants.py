"""Whom fairness is owed to: a tenant's weight and limits, as the core needs them. Keys and names of people live above.

A request names its tenant; one that no `Tenant` describes gets `Tenant(name)`: weight 1 and no limits.
"""

from __future__ import annotations

from dataclasses import dataclass

from pellucid.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tenant:
    """`weight`: share of the service relative to others. `priority_ceiling`: the most urgent priority (lowest number)
    that it may ask for. `max_running`, `max_waiting`: requests computed and queued at once. `tokens_per_minute`:
    uncached prompt tokens and output tokens. `kv_share`: the part of the KV pool, in (0, 1], that its running requests
    may hold, and above which its cached blocks are the first to be evicted. None means no limit."""

    name: str
    weight: float = 1.0
    priority_ceiling: int | None = None
    max_running: int | None = None
    max_waiting: int | None = None
    tokens_per_minute: int | None = None
    kv_share: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.weight < float("inf"):
            raise ConfigError(f"tenant {self.name!r}: weight is {self.weight}; it must be above 0")
        if not 0.0 < self.kv_share <= 1.0:
            raise ConfigError(f"tenant {self.name!r}: kv_share is {self.kv_share}; it must lie in (0, 1]")
        for limit in ("max_running", "max_waiting", "tokens_per_minute"):
            value = getattr(self, limit)
            if value is not None and value < 1:
                raise ConfigError(f"tenant {self.name!r}: {limit} is {value}; it must be at least 1")
