"""From a path to rows: plain, gzip or tar.gz files, JSON Lines, CSV or one large JSON list, always as a stream.

The kind of packing is told by magic bytes, the kind of content by its first line; names decide nothing. A row comes
with the place (`file:line`) that an error message will name.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import os
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

import msgspec

from pellucid.workload.trace import TraceError

Kind = Literal["jsonl", "csv", "json"]

_GZIP_MAGIC = b"\x1f\x8b"
_TAR_MAGIC_AT = 257
_MAX_LINE_BYTES = 64 << 20
_PIECE = 1 << 20
_SNIFFED_ROWS = 5


class Meter:
    """How much of several files has been read, told by positions in the files as they lie on disk."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._total = max(1, sum(path.stat().st_size for path in paths))
        self._done = 0
        self._open: list[IO[bytes]] = []

    @contextmanager
    def reading(self, path: Path, data: IO[bytes]) -> Iterator[None]:
        """Count `data`, which was opened from `path`, while the block runs, and as read to its end afterwards."""
        raw: IO[bytes] = getattr(data, "fileobj", data)  # what lies under a gzip stream
        self._open.append(raw)
        try:
            yield
        finally:
            self._open.remove(raw)
            self._done += path.stat().st_size

    @property
    def share(self) -> float:
        """The share that has been read, 0 to 1."""
        return min(1.0, (self._done + sum(file.tell() for file in self._open)) / self._total)


class Member(NamedTuple):
    """One file of rows: `label` for messages, `path` on disk (a tar's member lies in a temporary folder), and who is to
    be told how far reading has come."""

    label: str
    path: Path
    meter: Meter | None = None

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """The file's bytes, unpacked."""
        with open_bytes(self.path) as data:
            if self.meter is None:
                yield data
            else:
                with self.meter.reading(self.path, data):
                    yield data


class PlacedRow(NamedTuple):
    """One decoded row and where it stands."""

    place: str
    row: dict[str, Any]


def open_bytes(path: Path) -> IO[bytes]:
    """The file's bytes, unpacked when they are gzip."""
    try:
        raw = path.open("rb")
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
    if raw.read(2) == _GZIP_MAGIC:
        raw.close()
        return cast("IO[bytes]", gzip.open(path, "rb"))
    raw.seek(0)
    return raw


@contextmanager
def members(path: str | os.PathLike[str]) -> Iterator[list[Member]]:
    """The files of rows behind a path: itself, or the .jsonl, .json and .csv files of a tar archive in name order."""
    path = Path(path)
    if path.is_dir():
        raise TraceError(f"{path} is a folder; a trace is one file (plain, .gz or .tar.gz)")
    with ExitStack() as stack:
        with open_bytes(path) as data:
            is_tar = data.read(_TAR_MAGIC_AT + 5)[_TAR_MAGIC_AT:] == b"ustar"
        if not is_tar:
            yield [Member(str(path), path)]
            return
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pellucid-trace-")))
        yield list(_unpack(path, folder))


def _unpack(path: Path, folder: Path) -> Iterator[Member]:
    """Copy the row files of an archive into `folder` under numbers, so that no name inside can point anywhere else."""
    try:
        with tarfile.open(path) as archive:
            entries = [e for e in archive if e.isfile() and e.name.endswith((".jsonl", ".json", ".csv"))]
            for index, entry in enumerate(sorted(entries, key=lambda e: e.name)):
                target = folder / f"{index:06d}"
                source = archive.extractfile(entry)
                assert source is not None
                with source, open(target, "wb") as out:
                    while piece := source.read(1 << 20):
                        out.write(piece)
                yield Member(f"{path}!{entry.name}", target)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise TraceError(f"{path}: broken archive ({error})") from None


def sniff(member: Member) -> tuple[Kind, dict[str, Any]] | None:
    """What the file holds, and its first row that can be decoded (of the first few); None for an empty file."""
    with _reading(member), open_bytes(member.path) as data:
        head = data.read(1)
        while head.isspace():
            head = data.read(1)
    kind: Kind = "jsonl" if head == b"{" else "json" if head == b"[" else "csv"
    if not head:
        return None
    first = [placed.row for placed in itertools.islice(rows(member, kind), _SNIFFED_ROWS)]
    return (kind, min(first, key=lambda row: _BROKEN in row)) if first else None


def rows(member: Member, kind: Kind) -> Iterator[PlacedRow]:
    """All rows of a file, one at a time. Raises TraceError where the text is not what `kind` says."""
    with _reading(member):
        if kind == "jsonl":
            yield from _json_lines(member)
        elif kind == "csv":
            yield from _csv_rows(member)
        else:
            yield from _json_list(member)


@contextmanager
def _reading(member: Member) -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile) as error:
        raise TraceError(f"{member.label}: broken or truncated gzip data ({error})") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{member.label}: not UTF-8 text ({error.reason} at byte {error.start})") from None


def _json_lines(member: Member) -> Iterator[PlacedRow]:
    decode = msgspec.json.Decoder().decode
    label = member.label
    with member.open() as data:
        for line_number, line in enumerate(iter(lambda: data.readline(_MAX_LINE_BYTES), b""), start=1):
            if line.isspace():
                continue
            try:
                row = decode(line)
            except msgspec.DecodeError as error:
                yield PlacedRow(f"{label}:{line_number}", {_BROKEN: f"not JSON ({error})"})
                continue
            if type(row) is not dict:
                yield PlacedRow(f"{label}:{line_number}", {_BROKEN: f"a JSON {type(row).__name__}, not an object"})
                continue
            yield PlacedRow(f"{label}:{line_number}", row)


def _csv_rows(member: Member) -> Iterator[PlacedRow]:
    with member.open() as data, io.TextIOWrapper(data, encoding="utf-8-sig", newline="") as lines:
        table = csv.reader(lines)
        names = [name.strip() for name in next(table, [])]
        for cells in table:
            if not cells:
                continue
            place = f"{member.label}:{table.line_num}"
            if len(cells) != len(names):
                broken = f"{len(cells)} columns where the first line names {len(names)}"
                yield PlacedRow(place, {**dict.fromkeys(names), _BROKEN: broken})
            else:
                yield PlacedRow(place, dict(zip(names, cells)))


def _json_list(member: Member) -> Iterator[PlacedRow]:
    """The objects of one JSON list, decoded one at a time: such files reach gigabytes on a single line."""
    scan = json.JSONDecoder().raw_decode
    buffer, position, index = "", 0, 0
    with member.open() as data, io.TextIOWrapper(data, encoding="utf-8-sig") as text:
        buffer = text.read(_PIECE).lstrip()[1:]
        while True:
            position = _skip_separators(buffer, position)
            try:
                row, position = scan(buffer, position)
            except json.JSONDecodeError as error:
                if buffer.startswith("]", position):
                    return
                more = text.read(max(_PIECE, len(buffer)))
                if not more or len(buffer) > _MAX_LINE_BYTES:
                    raise TraceError(
                        f"{member.label}[{index}]: the JSON list breaks off or is malformed ({error.msg})"
                    ) from None
                buffer, position = buffer[position:] + more, 0
                continue
            place = f"{member.label}[{index}]"
            yield PlacedRow(
                place, row if type(row) is dict else {_BROKEN: f"a JSON {type(row).__name__}, not an object"}
            )
            index += 1


def _skip_separators(buffer: str, position: int) -> int:
    while position < len(buffer) and buffer[position] in ", \t\r\n":
        position += 1
    return position


_BROKEN = "\0broken"


def defect(row: dict[str, Any]) -> str | None:
    """Why the text of this row could not be decoded, or None for a good one."""
    return row.get(_BROKEN)
