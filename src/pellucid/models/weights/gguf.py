"""The tensors of a GGUF file, mapped into memory: rows of stored bytes, or dequantised. No torch.

Invariants: nothing is copied until asked for; every tensor of the directory lies wholly inside the file, so a truncated
file is an error when it is opened, not a crash in the middle of a load. The header itself is read by
`models/gguf_header.py`; the arithmetic of each quantisation is the `gguf` package's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from pellucid.core.errors import ModelError
from pellucid.models.gguf_header import TensorEntry, read_gguf_header

# Rows are dequantised in slabs of this many numbers, so that a large tensor never exists twice.
_SLAB_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's place. `shape` is row-major (out, in); `storage` names its type, such as "Q4_1"; `offset` counts from
    the beginning of the file."""

    name: str
    shape: tuple[int, ...]
    storage: str
    offset: int
    num_bytes: int


class GgufFile:
    """An open GGUF file: its `metadata` by key and its `tensors` by name.

    Raises ModelError for a file that is not GGUF, is truncated, is one part of several, or holds an unknown type.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        header = read_gguf_header(self.path)
        self.metadata: dict[str, Any] = header.metadata
        if int(self.metadata.get("split.count", 1)) > 1:
            raise ModelError(f"{self.path} is one of {self.metadata['split.count']} parts; merge them into one file")
        self._data: npt.NDArray[np.uint8] = np.memmap(self.path, mode="r")
        self.tensors = {entry.name: self._place(entry, header.data_start) for entry in header.tensors}

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the map; it is unmapped once no array into it is left."""
        self._data = np.empty(0, dtype=np.uint8)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor, a view of the map: `[rows, bytes per row]`, one row where it is a vector."""
        info = self.tensors[name]
        rows = info.shape[0] if len(info.shape) > 1 else 1
        return self._data[info.offset : info.offset + info.num_bytes].reshape(rows, -1)

    def dequantize(self, name: str) -> npt.NDArray[np.float32]:
        """A whole tensor as float32, in its shape."""
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

    def _place(self, entry: TensorEntry, data_start: int) -> TensorInfo:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            quant = GGMLQuantizationType(entry.type)
            block, block_bytes = GGML_QUANT_SIZES[quant]
        except (ValueError, KeyError):
            raise ModelError(f"{self.path}: tensor {entry.name} has the unknown type {entry.type}") from None
        shape = tuple(reversed(entry.shape))
        if not shape or shape[-1] % block:
            raise ModelError(f"{self.path}: tensor {entry.name} {shape} does not divide into {quant.name} blocks")
        num_bytes, offset = math.prod(shape) // block * block_bytes, data_start + entry.offset
        if offset + num_bytes > self._data.shape[0]:
            raise ModelError(
                f"{self.path} is truncated: tensor {entry.name} ends at byte {offset + num_bytes} and the file at "
                f"{self._data.shape[0]}; fetch it again"
            )
        return TensorInfo(entry.name, shape, quant.name, offset, num_bytes)
