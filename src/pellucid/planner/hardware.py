"""Devices as the planner sees them: rates, bandwidth, memory, links. Unknown is absent (None), never guessed.

Every rate is *dense*. The table (hardware.toml) keeps sparse rates apart and names a source for each device; the user's
own file has the same form, and a measured machine (profile.py) becomes a Device too.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from pellucid.core.errors import ConfigError
from pellucid.planner.kernel_rates import KernelRates


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds a step takes besides arithmetic and memory traffic: once, per layer, per sequence. 0 where unmeasured."""

    step_seconds: float = 0.0
    layer_seconds: float = 0.0
    sequence_seconds: float = 0.0


_RATED_FORMATS = ("bf16", "fp16", "fp32", "fp8", "int8", "fp4")


@dataclass(frozen=True, slots=True)
class Overrides:
    """Figures that a user states himself: FLOP/s, bytes/s, bytes, bytes/s. Raises ConfigError for one that is 0."""

    flops: float | None = None
    bandwidth: float | None = None
    memory: int | None = None
    link: float | None = None

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth", "memory", "link"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"--{name} is {value:g}; it must be more than 0")


@dataclass(frozen=True, slots=True)
class Device:
    """One device. `flops`: number format -> dense FLOP/s. `bandwidth`: main memory, bytes/s. `link`: to a peer, one
    way; `host_link`: to host memory, one way. `all_reduce_seconds`: fixed cost of one all-reduce among peers.
    `runtime_memory`: what a serving process holds besides tensors. `kernels`: how fast the engine's own kernels were
    measured to run; with them predictions are of the engine, without them they are the device's ceilings."""

    name: str
    title: str
    flops: Mapping[str, float] = field(default_factory=dict)
    sparse: Mapping[str, float] = field(default_factory=dict)
    accumulate: str | None = None
    bandwidth: float | None = None
    memory: int | None = None
    link: float | None = None
    link_kind: str | None = None
    host_link: float | None = None
    all_reduce_seconds: float | None = None
    runtime_memory: int | None = None
    kernels: KernelRates | None = None
    overheads: Overheads = field(default_factory=Overheads)
    sources: tuple[str, ...] = ()

    def peak(self, number_format: str) -> float:
        """Dense FLOP/s in `number_format`. 16-bit formats stand in for each other. Raises ConfigError if unknown."""
        twin = {"bf16": "fp16", "fp16": "bf16"}.get(number_format, number_format)
        rate = self.flops.get(number_format, self.flops.get(twin))
        if rate is None:
            known = ", ".join(self.flops) or "none"
            raise ConfigError(
                f"{self.name} has no known {number_format} rate (known: {known}); pass --flops, "
                f"or --dtype with another format"
            )
        return rate

    def need_bandwidth(self) -> float:
        """Bytes/s of main memory. Raises ConfigError if unknown."""
        if self.bandwidth is None:
            raise ConfigError(f"{self.name} has no known memory bandwidth; pass --bandwidth")
        return self.bandwidth

    def need_memory(self) -> int:
        """Bytes of memory. Raises ConfigError if unknown."""
        if self.memory is None:
            raise ConfigError(f"{self.name} has no known memory size; pass --memory")
        return self.memory

    def ridge(self, number_format: str) -> float:
        """FLOP/B at which compute and bandwidth take equally long."""
        return self.peak(number_format) / self.need_bandwidth()

    def override(self, given: Overrides) -> Device:
        """The same device with the given figures in place of its own. A rate replaces that of every number format; a
        link replaces both that to peers and that to host memory."""
        changed = self
        if given.flops is not None:
            changed = replace(changed, flops=dict.fromkeys(_RATED_FORMATS, given.flops))
        if given.bandwidth is not None:
            changed = replace(changed, bandwidth=given.bandwidth)
        if given.memory is not None:
            changed = replace(changed, memory=given.memory)
        if given.link is not None:
            changed = replace(changed, link=given.link, host_link=given.link)
        if given.flops is not None or given.bandwidth is not None:
            changed = replace(changed, kernels=None)  # measured with other figures than these
        return changed


CUSTOM = Device("custom", "a device with the given figures")

_ALIASES = {
    "a100-80gb": "a100",
    "a100-sxm": "a100",
    "h100-sxm": "h100",
    "h200-sxm": "h200",
    "b200-sxm": "b200",
    "b300-sxm": "b300",
    "4090": "rtx4090",
    "rtx-4090": "rtx4090",
    "5090": "rtx5090",
    "rtx-5090": "rtx5090",
}
_NUMBERS = ("bandwidth", "memory", "link", "host_link", "all_reduce_seconds")
_TEXTS = ("title", "accumulate", "link_kind")


def devices() -> dict[str, Device]:
    """Every device shipped, by name."""
    text = files("pellucid.planner").joinpath("hardware.toml").read_text()
    return _parse(tomllib.loads(text), "hardware.toml")


def device_by_name(name: str) -> Device:
    """The shipped device called `name`, any case. Raises ConfigError with the nearest names."""
    table = devices()
    key = name.lower().replace("_", "-")
    key = _ALIASES.get(key, key)
    if key not in table:
        near = difflib.get_close_matches(key, table, n=3, cutoff=0.4) or list(table)
        raise ConfigError(
            f"hardware {name!r} is not this-machine, a .toml file, or one of the {len(table)} names shipped; "
            f"nearest: {', '.join(near)} (`pellucid plan --list` prints all)"
        )
    return table[key]


def devices_in(path: Path) -> dict[str, Device]:
    """Devices described in a TOML file of the same form as hardware.toml. Raises ConfigError."""
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file ({error})") from None
    return _parse(rows, str(path))


def _parse(rows: Mapping[str, Any], origin: str) -> dict[str, Device]:
    found = {}
    for name, row in rows.items():
        if not isinstance(row, dict):
            raise ConfigError(f"{origin}: {name} is not a table; each device is one, like [h100]")
        unknown = set(row) - {"flops", "sparse", "sources", *_NUMBERS, *_TEXTS}
        if unknown:
            raise ConfigError(f"{origin} [{name}]: unknown field {sorted(unknown)[0]!r}")
        found[name] = _device(name, row, origin)
    return found


def _device(name: str, row: Mapping[str, Any], origin: str) -> Device:
    def number(key: str) -> float | None:
        return _positive(row[key], origin, name, key) if key in row else None

    def rates(key: str) -> dict[str, float]:
        return {k: _positive(v, origin, name, f"{key}.{k}") for k, v in row.get(key, {}).items()}

    memory = number("memory")
    return Device(
        name=name,
        title=str(row.get("title", name)),
        flops=rates("flops"),
        sparse=rates("sparse"),
        accumulate=row.get("accumulate"),
        bandwidth=number("bandwidth"),
        memory=None if memory is None else int(memory),
        link=number("link"),
        link_kind=row.get("link_kind"),
        host_link=number("host_link"),
        all_reduce_seconds=number("all_reduce_seconds"),
        sources=tuple(row.get("sources", ())),
    )


def _positive(value: object, origin: str, name: str, key: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{origin} [{name}]: {key} is {value!r}; it must be a positive number")
    return value
