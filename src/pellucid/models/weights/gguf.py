"""A GGUF file, mapped into memory: its header as values, its tensors as rows of raw or dequantised numbers. No torch.

Invariants: nothing is copied until asked for; string arrays (a vocabulary, its merges) stay in the map and are decoded
on demand, so opening a file with a large vocabulary costs milliseconds. Every offset is checked against the file's
size, so a truncated file is an error when it is opened, not a crash in the middle of a step.

The format is specified in ggml's `docs/gguf.md`: magic, version, counts, key-value pairs, tensor directory, data.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from pellucid.core.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Value type id -> struct code. 7 is a boolean byte.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Rows are dequantised in slabs of this many numbers, so that a large tensor never exists twice.
_SLAB_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class StringArray:
    """An array of strings left in the file: `count` of them, the first one's length field at byte `offset`."""

    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in the directory. `shape` is row-major (out, in); `storage` names its type, such as "Q4_1"."""

    name: str
    shape: tuple[int, ...]
    storage: str
    offset: int
    num_bytes: int


class GgufFile:
    """An open GGUF file. `metadata` holds scalars, strings and numeric arrays; `tensors` the directory, by name.

    Raises ModelError for a file that is not GGUF, is truncated, or belongs to a set of several files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._data: npt.NDArray[np.uint8] = np.memmap(self.path, mode="r")
        except FileNotFoundError:
            raise ModelError(f"{self.path} does not exist") from None
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.path} cannot be read: {error}") from None
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, OverflowError):
            raise ModelError(f"{self.path} ends or breaks inside its header: truncated or damaged") from None
        if int(self.metadata.get("split.count", 1)) > 1:
            raise ModelError(f"{self.path} is one of {self.metadata['split.count']} parts; merge them into one file")

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the map; it is unmapped once no array into it is left."""
        self._data = np.empty(0, dtype=np.uint8)

    def strings(self, key: str) -> list[str]:
        """The strings of an array in the metadata; empty where there is none."""
        return [raw.decode("utf-8", "replace") for raw in self._raw_strings(key)]

    def find_strings(self, key: str, wanted: Sequence[str]) -> list[int]:
        """Indices in the string array `key` at which one of `wanted` stands."""
        raw = {text.encode() for text in wanted}
        return [i for i, found in enumerate(self._raw_strings(key)) if found in raw]

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor, a view of the map: `[rows, bytes per row]`, one row where it is a vector."""
        info = self.tensors[name]
        rows = info.shape[0] if len(info.shape) > 1 else 1
        return self._data[info.offset : info.offset + info.num_bytes].reshape(rows, -1)

    def dequantize(self, name: str) -> npt.NDArray[np.float32]:
        """A whole tensor as float32, shaped as in the directory."""
        info = self.tensors[name]
        return self._dequantize_rows(info, self.raw(name)).reshape(info.shape)

    def dequantize_slabs(
        self, name: str, order: npt.NDArray[np.int64] | None = None
    ) -> Iterable[tuple[int, npt.NDArray[np.float32]]]:
        """Yield (first row, float32 rows) over a matrix, a bounded slab at a time, rows taken in `order` if given."""
        info, raw = self.tensors[name], self.raw(name)
        step = max(1, _SLAB_ELEMENTS // info.shape[-1])
        for start in range(0, raw.shape[0], step):
            rows = raw[start : start + step] if order is None else raw[order[start : start + step]]
            yield start, self._dequantize_rows(info, rows).reshape(-1, info.shape[-1])

    def _dequantize_rows(self, info: TensorInfo, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        from gguf import GGMLQuantizationType, quants

        try:
            values = quants.dequantize(rows, GGMLQuantizationType[info.storage])
        except NotImplementedError:
            raise ModelError(f"{self.path}: tensor {info.name} is stored as {info.storage}: not supported") from None
        return np.asarray(values, dtype=np.float32)

    def _raw_strings(self, key: str) -> Iterable[bytes]:
        array = self.metadata.get(key)
        if array is None:
            return
        if not isinstance(array, StringArray):
            raise ModelError(f"{self.path}: {key} is not an array of strings")
        data, at = self._data.data, array.offset
        for _ in range(array.count):
            (length,) = struct.unpack_from("<Q", data, at)
            yield bytes(data[at + 8 : at + 8 + length])
            at += 8 + length

    def _read_header(self) -> None:
        data = self._data.data
        if bytes(data[:4]) != _MAGIC:
            raise ModelError(f"{self.path} is not a GGUF file: it begins with {bytes(data[:4])!r}, not {_MAGIC!r}")
        version, num_tensors, num_values = struct.unpack_from("<IQQ", data, 4)
        if version not in _VERSIONS:
            raise ModelError(f"{self.path}: GGUF version {version} is not supported; supported are 2 and 3")
        at = 24
        for _ in range(num_values):
            key, at = _string(data, at)
            (kind,) = struct.unpack_from("<I", data, at)
            self.metadata[key], at = self._value(data, kind, at + 4)
        entries: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(num_tensors):
            name, at = _string(data, at)
            (dims,) = struct.unpack_from("<I", data, at)
            *dimensions, kind, offset = struct.unpack_from(f"<{dims}QIQ", data, at + 4)
            entries.append((name, tuple(reversed(dimensions)), kind, offset))
            at += 4 + 8 * dims + 12
        alignment = int(self.metadata.get("general.alignment", 32))
        base = -(-at // alignment) * alignment
        for name, shape, kind, offset in entries:
            self.tensors[name] = self._tensor_info(name, shape, kind, base + offset)

    def _tensor_info(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            quant = GGMLQuantizationType(kind)
            block, block_bytes = GGML_QUANT_SIZES[quant]
        except (ValueError, KeyError):
            raise ModelError(f"{self.path}: tensor {name} has the unknown type {kind}") from None
        if not shape or shape[-1] % block:
            raise ModelError(f"{self.path}: tensor {name} of shape {shape} does not divide into {quant.name} blocks")
        num_bytes = int(np.prod(shape, dtype=np.int64)) // block * block_bytes
        if offset + num_bytes > self._data.shape[0]:
            raise ModelError(
                f"{self.path} is truncated: tensor {name} ends at byte {offset + num_bytes}, "
                f"the file at {self._data.shape[0]}; fetch it again"
            )
        return TensorInfo(name, shape, quant.name, offset, num_bytes)

    def _value(self, data: memoryview, kind: int, at: int) -> tuple[Any, int]:
        """A metadata value of type `kind` at byte `at`, and the byte behind it."""
        if kind == _STRING:
            return _string(data, at)
        if kind != _ARRAY:
            return struct.unpack_from("<" + self._code(kind), data, at)[0], at + struct.calcsize("<" + self._code(kind))
        item_kind, count = struct.unpack_from("<IQ", data, at)
        at += 12
        if item_kind != _STRING:
            code = f"<{count}{self._code(item_kind)}"
            return list(struct.unpack_from(code, data, at)), at + struct.calcsize(code)
        start = at
        for _ in range(count):
            at += 8 + struct.unpack_from("<Q", data, at)[0]
        return StringArray(count, start), at

    def _code(self, kind: int) -> str:
        try:
            return _SCALARS[kind]
        except KeyError:
            raise ModelError(f"{self.path}: the header holds a value of the unknown type {kind}") from None


def _string(data: memoryview, at: int) -> tuple[str, int]:
    """The string whose 8-byte length stands at byte `at`, and the byte behind it."""
    (length,) = struct.unpack_from("<Q", data, at)
    if at + 8 + length > len(data):
        raise struct.error("string beyond the end")
    return bytes(data[at + 8 : at + 8 + length]).decode(), at + 8 + length
