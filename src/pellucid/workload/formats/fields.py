"""Reading one field of one row, and saying exactly what is wrong with it.

A `RowError` knows field, value and expectation; whoever drives the reading adds file and line.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

Row = Mapping[str, Any]

_MISSING = object()
_SHOWN = 60


class RowError(ValueError):
    """A row that does not say what its format promises."""

    def __init__(self, field: str, value: Any, expected: str) -> None:
        found = "nothing" if value is _MISSING else _short(value)
        super().__init__(f"field {field!r} is {found}; expected {expected}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({type(value).__name__})"


def integer(row: Row, field: str) -> int:
    """A whole number of 0 or more, given as a JSON number or (CSV) as digits."""
    value = row.get(field, _MISSING)
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        return int(value)
    if isinstance(value, float) and value.is_integer() and value >= 0:
        return int(value)
    raise RowError(field, value, "a whole number of 0 or more")


def number(row: Row, field: str) -> float:
    """A finite number of any sign, given as a JSON number or as text."""
    value = row.get(field, _MISSING)
    if type(value) is float or type(value) is int:
        result = float(value)
    elif isinstance(value, str):
        try:
            result = float(value)
        except ValueError:
            raise RowError(field, value, "a number") from None
    else:
        raise RowError(field, value, "a number")
    if result - result != 0.0:
        raise RowError(field, value, "a finite number")
    return result


def text(row: Row, field: str) -> str:
    """A string; a number is taken as its digits (ids come both ways)."""
    value = row.get(field, _MISSING)
    if isinstance(value, str):
        return value
    if type(value) is int:
        return str(value)
    raise RowError(field, value, "a string")


def token_ids(row: Row, field: str) -> tuple[int, ...]:
    """A list of token ids: whole numbers in [0, 2**32)."""
    value = row.get(field, _MISSING)
    if not isinstance(value, list):
        raise RowError(field, value, "a list of token ids")
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) >= 1 << 32):
        wrong = next(token for token in value if type(token) is not int or not 0 <= token < 1 << 32)
        raise RowError(field, wrong, "token ids that are whole numbers in [0, 2**32)")
    return tuple(value)


def block_hashes(row: Row, field: str) -> tuple[int | str, ...]:
    """A list of block ids: whole numbers or strings (hex digests)."""
    value = row.get(field, _MISSING)
    if not isinstance(value, list):
        raise RowError(field, value, "a list of block ids")
    if not set(map(type, value)) <= {int, str}:
        wrong = next(item for item in value if type(item) not in (int, str))
        raise RowError(field, wrong, "block ids that are whole numbers or strings")
    return tuple(value)


def split_tail(
    hashes: tuple[int | str, ...], input_len: int, block_size: int
) -> tuple[tuple[int | str, ...], int | str | None]:
    """Separate the full blocks from a partly filled last one, where the source lists one id per started block.

    A list of any other length than the full or the started blocks is kept whole: `lint` reports it.
    """
    num_full = input_len // block_size
    if len(hashes) == num_full + 1 and input_len % block_size:
        return hashes[:num_full], hashes[num_full]
    return hashes, None


def wall_clock(row: Row, field: str) -> float:
    """A date and time (`2023-11-16 18:15:46.6805900`, with or without an offset; UTC if none) as seconds since 1970."""
    value = row.get(field, _MISSING)
    if not isinstance(value, str) or len(value) < 19:
        raise RowError(field, value, "a date and time like 2023-11-16 18:15:46.6805900")
    try:
        whole = datetime.fromisoformat(value[:19])
        rest = value[19:]
        cut = max(rest.find("+"), rest.find("-"), rest.find("Z"))
        fraction, offset = (rest, "") if cut < 0 else (rest[:cut], rest[cut:])
        if offset:
            whole = datetime.fromisoformat(value[:19] + offset)
        else:
            whole = whole.replace(tzinfo=UTC)
        return whole.timestamp() + (float("0" + fraction) if fraction else 0.0)
    except ValueError:
        raise RowError(field, value, "a date and time like 2023-11-16 18:15:46.6805900") from None
