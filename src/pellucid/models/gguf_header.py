"""The head of a GGUF file: its metadata and its tensor directory, read in one pass without touching a weight.

The `gguf` package's reader builds an array view per string, which takes seconds for a vocabulary; this one walks the
bytes once and returns plain Python values, so a process that needs the tokenizer or the shape of a model and not its
weights starts in a fraction of a second and without numpy.

Invariants: nothing is read past the end of the file (a truncated or corrupt file is a ModelError naming the offset);
strings are UTF-8 with invalid bytes replaced; little-endian versions 2 and 3 only, which is all that is published.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from pellucid.core.errors import ModelError

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


class TensorEntry(NamedTuple):
    """One row of the tensor directory. `shape` is in GGUF order (fastest dimension first); `offset` counts from the
    header's `data_start`; `type` is ggml's number for the element type."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata by key (numbers, strings, booleans, lists of these) and the tensors; `data_start` is in bytes."""

    version: int
    metadata: dict[str, Any]
    tensors: tuple[TensorEntry, ...]
    data_start: int


def read_gguf_header(path: str | Path) -> GGUFHeader:
    """Read the head of the GGUF file at `path`. Raises ModelError for anything that is not a whole GGUF header.

    The last one read is kept, for a start asks for it several times: what is returned must not be changed."""
    path = Path(path)
    try:
        status = path.stat()
        return _read(path, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:  # mmap refuses an empty file
        raise ModelError(f"{path} is empty; a GGUF file was expected") from None


@lru_cache(maxsize=1)
def _read(path: Path, identity: tuple[int, ...]) -> GGUFHeader:
    """The header of the file at `path`. `identity` tells a file from another that took its place."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return _Reader(view, str(path)).header()


class _Reader:
    """A cursor over the mapped file; each `_take` checks the end of the file first."""

    def __init__(self, view: mmap.mmap, name: str) -> None:
        self._view = view
        self._size = len(view)
        self._name = name
        self._at = 0

    def header(self) -> GGUFHeader:
        if self._view[:4] != MAGIC:
            raise ModelError(f"{self._name} does not begin with the GGUF magic (found {self._view[:4]!r})")
        self._at = 4
        (version,) = self._take("I")
        if version not in (2, 3):
            hint = "; a big-endian file must be converted" if version & 0xFFFF == 0 else ""
            raise ModelError(f"{self._name} is GGUF version {version}; versions 2 and 3 are supported{hint}")
        num_tensors, num_values = self._take("QQ")
        metadata = {}
        for _ in range(self._plausible(num_values)):
            key = self._string()
            metadata[key] = self._value(self._take("I")[0])
        tensors = tuple(self._tensor() for _ in range(self._plausible(num_tensors)))
        alignment = metadata.get("general.alignment", 32)
        data_start = (self._at + alignment - 1) // alignment * alignment
        if tensors:
            last = max(tensors, key=lambda tensor: tensor.offset)
            if data_start + last.offset >= self._size:
                raise ModelError(
                    f"{self._name} is truncated: tensor {last.name} begins at byte {data_start + last.offset} and the "
                    f"file ends at {self._size}; fetch it again"
                )
        return GGUFHeader(version, metadata, tensors, data_start)

    def _take(self, layout: str) -> tuple[Any, ...]:
        layout = "<" + layout
        end = self._at + struct.calcsize(layout)
        self._check(end)
        values = struct.unpack_from(layout, self._view, self._at)
        self._at = end
        return values

    def _check(self, end: int) -> None:
        if end > self._size:
            raise ModelError(
                f"{self._name} is truncated or corrupt: its header goes on at byte {end} and the file ends at "
                f"{self._size}; fetch it again"
            )

    def _plausible(self, count: int) -> int:
        """`count`, when that many items of at least a byte can still follow."""
        self._check(self._at + count)
        return count

    def _string(self) -> str:
        (length,) = self._take("Q")
        end = self._at + length
        self._check(end)
        text = self._view[self._at : end].decode("utf-8", errors="replace")
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._take("IQ")
            self._plausible(count)
            if item in _SCALARS:
                return list(self._take(f"{count}{_SCALARS[item]}"))
            if item == _STRING:
                return self._strings(count)
            return [self._value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelError(f"{self._name} is corrupt: metadata type {kind} at byte {self._at} does not exist")
        return self._take(_SCALARS[kind])[0]

    def _strings(self, count: int) -> list[str]:
        """As many `_string()`s, unrolled: vocabularies and merges are most of a header's time."""
        view, at, size = self._view, self._at, self._size
        length_at = struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            start = at + 8
            self._check(start)
            at = start + length_at(view, at)[0]
            if at > size:
                self._check(at)
            texts.append(view[start:at].decode("utf-8", errors="replace"))
        self._at = at
        return texts

    def _tensor(self) -> TensorEntry:
        name = self._string()
        (num_dims,) = self._take("I")
        if num_dims > _MAX_DIMS:
            raise ModelError(f"{self._name} is corrupt: tensor {name} has {num_dims} dimensions; at most {_MAX_DIMS}")
        *shape, kind, offset = self._take(f"{num_dims}QIQ")
        return TensorEntry(name, tuple(shape), kind, offset)
