"""Quantities as people write them ("2TB/s", "989TF", "80GB", "70B", "30ms") to numbers in base units, and back.

Two invariants: a decimal prefix is a power of 1000 and a binary one ("GiB") a power of 1024, never mixed; and a number
without a unit is taken in the base unit (bytes, bytes/s, FLOP/s, seconds, a count).
"""

from __future__ import annotations

import math
import re

from pellucid.core.errors import ConfigError

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "m": 60.0, "min": 60.0, "h": 3600.0}
_NUMBER = re.compile(r"^\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([^\d\s].*?)?\s*$")


def parse_bytes(text: str) -> int:
    """ "80GB" -> 80e9, "2GiB" -> 2 * 2**30, "1000" -> 1000. Raises ConfigError."""
    return round(_scaled(text, "a size in bytes such as 80GB or 2GiB", _byte_units()))


def parse_rate(text: str) -> float:
    """Bytes per second: "2TB/s" -> 2e12, "50GB/s" -> 5e10. Raises ConfigError."""
    units = {f"{name}{tail}": scale for name, scale in _byte_units().items() for tail in ("/s", "ps")}
    return _scaled(text, "a rate in bytes per second such as 2TB/s or 50GB/s", {"": 1.0, **units})


def parse_flops(text: str) -> float:
    """Operations per second: "989TF", "989TFLOPS", "1.3PFLOP/s", "400TOPS". Raises ConfigError."""
    tails = ("F", "FLOPS", "FLOP/s", "FLOPs", "OPS", "OP/s", "OPs")
    units = {f"{prefix}{tail}": scale for prefix, scale in _DECIMAL.items() for tail in tails}
    return _scaled(text, "a rate of operations such as 989TF or 1.3PFLOPS", {"": 1.0, **units})


def parse_seconds(text: str) -> float:
    """A duration: "30s", "100ms", "2m", "0.5". Raises ConfigError."""
    return _scaled(text, "a duration such as 30s or 100ms", _SECONDS)


def parse_count(text: str) -> int:
    """A number of things: "70e9", "70B", "8k" (thousand), "4Ki" (1024), "131072". Raises ConfigError."""
    units = {**_DECIMAL, **_BINARY, "B": 1e9, "b": 1e9, "m": 1e6}
    value = _scaled(text, "a count such as 70B, 70e9 or 8192", units)
    if value != round(value):
        raise ConfigError(f"{text!r} is not a whole number")
    return round(value)


def format_bytes(value: float, *, digits: int = 4) -> str:
    """ "140 GB", "131.1 kB": decimal prefixes."""
    return _prefixed(value, "B", digits)


def format_rate(value: float) -> str:
    """ "3.35 TB/s"."""
    return _prefixed(value, "B/s", 4)


def format_flops(value: float, unit: str = "FLOP", *, digits: int = 4) -> str:
    """ "989 TFLOP/s" with unit="FLOP/s", "14.2 TFLOP" for an amount."""
    return _prefixed(value, unit, digits)


def format_seconds(value: float, *, digits: int = 4) -> str:
    """ "70 ms", "1.25 s", "3.1 h"."""
    if value >= 7200:
        return f"{value / 3600:.{digits}g} h"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= scale:
            return f"{value / scale:.{digits}g} {unit}"
    return f"{value / 1e-9:.{digits}g} ns" if value > 0 else "0 s"


def format_count(value: float) -> str:
    """ "70B", "8.03B", "135M": as model sizes are spoken of."""
    for suffix, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.4g}{suffix}"
    return f"{value:g}"


def format_ceiling(value: float, decimals: int = 2) -> str:
    """A ceiling, rounded *down* so that the printed figure is never out of reach: 14.2857 -> "14.28"."""
    scale = 10**decimals
    # One part in 1e12 forgives binary fractions such as 0.28 * 100 = 28.000000000000004 without ever rounding up.
    return f"{math.floor(value * scale * (1 + 1e-12)) / scale:,.{decimals}f}"


def _byte_units() -> dict[str, float]:
    return {"": 1.0, "B": 1.0} | {f"{p}B": s for p, s in {**_DECIMAL, **_BINARY}.items()}


def _scaled(text: str, wanted: str, units: dict[str, float]) -> float:
    match = _NUMBER.match(text)
    if match is None or (match[2] or "") not in units:
        raise ConfigError(f"{text!r} is not {wanted}")
    value = float(match[1]) * units[match[2] or ""]
    if not math.isfinite(value):
        raise ConfigError(f"{text!r} is too large to be {wanted}")
    return value


def _prefixed(value: float, unit: str, digits: int) -> str:
    for prefix, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.{digits}g} {prefix}{unit}".rstrip()
    return f"{value:.{digits}g} {unit}".rstrip()
