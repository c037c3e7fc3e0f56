"""A request as it was asked, frozen: token ids in, sampling, priority. Text never reaches this far down.

Requests are what a trace stores and the input log records, so everything here can be written as JSON and read back.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from pellucid.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1.0 and `min_p` 0.0 switch their filter off. The filters apply in the
    order temperature, top-k, top-p, min-p. With a `seed`, the token at a position depends on the seed and that
    position alone, never on what else is in the batch.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not self.temperature >= 0.0:
            raise ConfigError(f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p is {self.top_p}; it must lie in (0, 1]")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; it must be 0 (off) or more")
        if not 0.0 <= self.min_p <= 1.0:
            raise ConfigError(f"min_p is {self.min_p}; it must lie in [0, 1]")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `arrival` is in seconds on the clock of whoever calls the scheduler.

    `prompt` is a sequence of token ids; in a simulator it may be a `range` of the right length whose values mean
    nothing, with `block_keys` naming the blocks instead (a trace's hash ids, full blocks in position order).
    `cache_key` names the prefix-cache namespace; the core compares it and never learns what it means. The first
    `num_public_blocks` blocks live in the namespace `public_key` instead, which others may share; what follows them is
    found under `cache_key` only. `priority`: lower is served first. `deadline` is on the clock of `arrival`.
    `match_limit` bounds how many prompt tokens may come from the cache (0: none; None: no bound).
    """

    id: str
    prompt: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    arrival: float = 0.0
    tenant: str = ""
    priority: int = 0
    deadline: float | None = None
    cache_key: bytes = b""
    match_limit: int | None = None
    public_key: bytes = b""
    num_public_blocks: int = 0
    block_keys: tuple[Hashable, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.prompt) == 0:
            raise ConfigError(f"request {self.id!r} has an empty prompt; it needs at least one token")

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; fields at their default are left out. `from_json` reads it back to an equal request."""
        row: dict[str, Any] = {"id": self.id, "prompt": list(self.prompt), "sampling": _changed(self.sampling)}
        row |= _changed(self, leave_out=("id", "prompt", "sampling"))
        for name in ("cache_key", "public_key"):
            if name in row:
                row[name] = row[name].hex()
        return row

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Request:
        """The request that `to_json` wrote. Raises KeyError or TypeError for a row of another shape."""
        sampling = dict(row.get("sampling", {}))
        if "stop_token_ids" in sampling:
            sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
        keys = row.get("block_keys")
        return cls(
            id=row["id"],
            prompt=tuple(row["prompt"]),
            sampling=SamplingParams(**sampling),
            arrival=row.get("arrival", 0.0),
            tenant=row.get("tenant", ""),
            priority=row.get("priority", 0),
            deadline=row.get("deadline"),
            cache_key=bytes.fromhex(row.get("cache_key", "")),
            match_limit=row.get("match_limit"),
            public_key=bytes.fromhex(row.get("public_key", "")),
            num_public_blocks=row.get("num_public_blocks", 0),
            block_keys=None if keys is None else tuple(keys),
        )


def _changed(value: Any, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of a dataclass that are not at their default, tuples as lists."""
    chosen = [field for field in fields(value) if field.name not in leave_out]
    items = {field.name: getattr(value, field.name) for field in chosen if getattr(value, field.name) != field.default}
    return {name: list(item) if isinstance(item, tuple) else item for name, item in items.items()}
