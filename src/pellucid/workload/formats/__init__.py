"""Reading any known trace file as one stream of `TraceRequest`, told apart by content.

`open_trace` looks at the first row, finds the format whose field names it carries (the most specific one wins) and
returns a `TraceFile` that can be iterated as often as wanted, each time as a stream: ten million rows need no more
memory than ten. A bad row stops the reading with file, line, field, value and what was expected; with `skip_bad` it is
counted instead. Adding a format is one parser in `parsers.py` and one line in `FORMATS`.

ServeGen's archives are client profiles and no traces, and may describe hundreds of millions of requests: read as a
trace, one stands for its first `SERVEGEN_ROWS` requests with seed 0, which the header and `note` say.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pellucid.workload.formats import parsers, servegen
from pellucid.workload.formats.fields import RowError
from pellucid.workload.formats.parsers import ReadOptions
from pellucid.workload.formats.source import Kind, Member, Meter, defect, members, rows, sniff
from pellucid.workload.trace import TRACE_VERSION, TraceError, TraceHeader, TraceRequest, Transform

__all__ = ["FORMATS", "Format", "ReadOptions", "TraceFile", "format_names", "open_trace"]

Parser = Callable[[dict[str, Any], ReadOptions], Iterator[TraceRequest]]


class Format(NamedTuple):
    """A public trace format: its fields identify it. `block_size` is the tokens per block id (None: ids are computed
    while reading, 0: it has none). `absolute_time` says that times count from elsewhere than the trace's start."""

    name: str
    kind: Kind
    fields: frozenset[str]
    parse: Parser
    block_size: int | None
    absolute_time: bool = False


def _format(
    name: str, kind: Kind, fields: str, parse: Parser, block_size: int | None, absolute: bool = False
) -> Format:
    return Format(name, kind, frozenset(fields.split(",")), parse, block_size, absolute)


FORMATS: tuple[Format, ...] = (
    _format("pellucid", "jsonl", "pellucid_trace", parsers.pellucid, None),
    _format("mooncake", "jsonl", "timestamp,input_length,output_length,hash_ids", parsers.mooncake, 512),
    _format(
        "bailian",
        "jsonl",
        "chat_id,parent_chat_id,timestamp,input_length,output_length,hash_ids",
        parsers.bailian,
        parsers.BAILIAN_BLOCK_SIZE,
    ),
    _format("azure", "csv", "TIMESTAMP,ContextTokens,GeneratedTokens", parsers.azure, 0, True),
    _format("burstgpt", "csv", "Timestamp,Request tokens,Response tokens", parsers.burstgpt, 0),
    _format("sharegpt", "json", "conversations", parsers.sharegpt, None),
    _format(
        "llmservingsim", "jsonl", "input_toks,output_toks,arrival_time_ns,input_tok_ids", parsers.llmservingsim, None
    ),
    _format("agent", "jsonl", "timestamp,input,output,session_id", parsers.agent_session, None, True),
    _format(
        "vllm-log",
        "jsonl",
        "request_id,input_toks,output_toks,arrival_time,queued_ts,scheduled_ts,first_token_ts,last_token_ts",
        parsers.vllm_log,
        0,
        True,
    ),
)

SERVEGEN = "servegen"
SERVEGEN_ROWS = 2_000_000


def format_names() -> tuple[str, ...]:
    """The names that `--format` accepts."""
    return (*(f.name for f in FORMATS), SERVEGEN)


class TraceFile:
    """A trace on disk. `header` is known at once, `num_skipped` after an iteration has ended, `share_read` during one.
    `note` is what a reader must know of how the file was understood (None: nothing)."""

    def __init__(
        self, path: Path, format_name: str, header: TraceHeader, options: ReadOptions, note: str | None = None
    ) -> None:
        self.path = path
        self.format_name = format_name
        self.header = header
        self.note = note
        self.num_skipped = 0
        self._options = options
        self._share: Callable[[], float] = lambda: 0.0

    @property
    def share_read(self) -> float:
        """How much of the file the present iteration has read, 0 to 1."""
        return self._share()

    def __iter__(self) -> Iterator[TraceRequest]:
        for _, row in self.placed():
            yield row

    def placed(self) -> Iterator[tuple[str, TraceRequest]]:
        """Rows with the place (`file:line`) each one stands at."""
        self.num_skipped = 0
        with members(self.path) as files:
            if self.format_name == SERVEGEN:
                yield from self._generated(files)
                return
            form = next(f for f in FORMATS if f.name == self.format_name)
            files = [member for member in files if _holds(member, form)]
            meter = Meter(member.path for member in files)
            self._share = lambda: meter.share
            streams = [self._read(member._replace(meter=meter), form) for member in files]
            merged = streams[0] if len(streams) == 1 else heapq.merge(*streams, key=_arrival)
            if form.absolute_time:
                merged = _from_first(merged)
            yield from merged

    def _generated(self, files: list[Member]) -> Iterator[tuple[str, TraceRequest]]:
        clients = servegen.load_clients(files)
        expected = max(1.0, min(SERVEGEN_ROWS, servegen.expected_requests(clients)))
        place, number = f"{self.path} (generated)", 0
        self._share = lambda: min(1.0, number / expected)
        for number, row in enumerate(servegen.generate(clients, seed=0), start=1):
            yield place, row
            if number == SERVEGEN_ROWS:
                return

    def _read(self, member: Member, form: Format) -> Iterator[tuple[str, TraceRequest]]:
        options = self._options
        if form.name == "pellucid":
            options = options._replace(block_size=self.header.block_size)
        for index, (place, row) in enumerate(rows(member, form.kind)):
            if index == 0 and form.name == "pellucid":
                continue
            try:
                broken = defect(row)
                if broken:
                    raise TraceError(f"{place}: {broken}")
                for request in form.parse(row, options):
                    yield place, request
            except RowError as error:
                self._bad_row(f"{place}: {error}")
            except TraceError as error:
                if not broken:
                    raise
                self._bad_row(str(error))

    def _bad_row(self, message: str) -> None:
        if not self._options.skip_bad:
            raise TraceError(f"{message} (--skip-bad counts such rows instead)")
        self.num_skipped += 1


def _holds(member: Member, form: Format) -> bool:
    """Whether a file of an archive is of the archive's format (archives carry licences and indexes as well)."""
    found = sniff(member)
    return found is not None and found[0] == form.kind and form.fields <= found[1].keys()


def _arrival(item: tuple[str, TraceRequest]) -> float:
    return item[1].arrival_time


def _from_first(items: Iterator[tuple[str, TraceRequest]]) -> Iterator[tuple[str, TraceRequest]]:
    origin: float | None = None
    for place, row in items:
        if origin is None:
            origin = row.arrival_time
        yield place, msgspec.structs.replace(row, arrival_time=row.arrival_time - origin)


def open_trace(
    path: str | os.PathLike[str], *, format_name: str | None = None, options: ReadOptions | None = None
) -> TraceFile:
    """Find out what a file is and prepare to read it.

    Raises TraceError for a file that cannot be read, whose first row fits no known format, or that is not of the format
    named.
    """
    if format_name is not None and format_name not in format_names():
        raise TraceError(f"unknown format {format_name!r}; known: {', '.join(format_names())}")
    options = options or ReadOptions()
    path = Path(path)
    note = None
    with members(path) as files:
        if servegen.is_servegen(files):
            found: str = SERVEGEN
            header, note = _profile_header(path, servegen.load_clients(files))
        else:
            form, first = _detect(path, files, format_name)
            found = form.name
            header = _header(path, form, first, options)
    if format_name is not None and found != format_name:
        raise TraceError(f"{path} is a {found} trace, not {format_name}")
    return TraceFile(path, found, header, options, note)


def _profile_header(path: Path, clients: Sequence[servegen.Client]) -> tuple[TraceHeader, str]:
    expected = servegen.expected_requests(clients)
    arguments: dict[str, Any] = {"seed": 0}
    part = f"all {expected:,.0f} or so"
    if expected > SERVEGEN_ROWS:
        arguments["requests"] = SERVEGEN_ROWS
        part = f"the first {SERVEGEN_ROWS:,} of about {expected:,.0f}"
    note = (
        f"{path.name} holds profiles of {len(clients)} clients and no trace: {part} requests that they describe are "
        f"generated (seed 0); `pellucid trace synth --servegen` makes other parts"
    )
    return TraceHeader(0, f"{path.name} (servegen)", (Transform("synth-servegen", arguments),)), note


def _detect(path: Path, files: list[Member], wanted: str | None) -> tuple[Format, dict[str, Any]]:
    if not files:
        raise TraceError(f"{path}: the archive holds no .jsonl, .json or .csv file")
    seen = ""
    for member in files:
        found = sniff(member)
        if found is None:
            continue
        kind, first = found
        fitting = [f for f in FORMATS if f.kind == kind and f.fields <= first.keys() and wanted in (None, f.name)]
        if fitting:
            return max(fitting, key=lambda f: len(f.fields)), first
        fields = ", ".join(repr(key)[:40] for key in list(first)[:8])
        seen = seen or defect(first) or f"it has the fields {fields}"
    wanted_fields = f"{wanted} needs {_fields_of(wanted)}" if wanted else f"known formats: {', '.join(format_names())}"
    raise TraceError(f"{path}: the first rows fit no format: {seen or 'there is none'}; {wanted_fields}")


def _fields_of(name: str) -> str:
    return ", ".join(sorted(next((f.fields for f in FORMATS if f.name == name), {"*-trace.csv", "*-dataset.json"})))


def _header(path: Path, form: Format, first: dict[str, Any], options: ReadOptions) -> TraceHeader:
    if form.name != "pellucid":
        block_size = options.block_size if form.block_size is None else form.block_size
        return TraceHeader(block_size, f"{path.name} ({form.name})")
    version, unit, block_size = first["pellucid_trace"], first.get("time_unit", "s"), first.get("block_size", 0)
    if version != TRACE_VERSION:
        raise TraceError(f"{path}:1: field 'pellucid_trace' is {version!r}; this version reads {TRACE_VERSION}")
    if unit != "s":
        raise TraceError(f"{path}:1: field 'time_unit' is {unit!r}; expected 's'")
    if type(block_size) is not int or block_size < 0:
        raise TraceError(f"{path}:1: field 'block_size' is {block_size!r}; expected a whole number of 0 or more")
    try:
        transforms = msgspec.convert(first.get("transforms", []), tuple[Transform, ...])
    except msgspec.ValidationError as error:
        raise TraceError(f"{path}:1: field 'transforms': {error}") from None
    return TraceHeader(block_size, str(first.get("origin", "")), transforms)
