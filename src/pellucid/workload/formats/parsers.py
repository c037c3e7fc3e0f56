"""One small parser for each public trace format: a decoded row in, `TraceRequest`s out.

A parser is a function of the row and the reading options. Times may be absolute (a wall clock): the driver in
`formats/__init__.py` subtracts the first. Sources of the column meanings are named beside each parser.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from pellucid.workload.formats import fields
from pellucid.workload.formats.fields import RowError
from pellucid.workload.trace import DEFAULT_BLOCK_SIZE, TraceError, TraceRequest, chain_hashes

Encode = Callable[[str], Sequence[int]]
JsonRow = dict[str, Any]
Parsed = Iterator[TraceRequest]

MOONCAKE_BLOCK_SIZE = 512
BAILIAN_BLOCK_SIZE = 16


class ReadOptions(NamedTuple):
    """How a source is read.

    `encode` turns text into token ids (formats that hold text need it). `block_size` is the tokens per block where
    the ids are computed here, or where the source does not say. `skip_bad` counts bad rows instead of stopping at the
    first.
    """

    encode: Encode | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    skip_bad: bool = False


def mooncake(row: JsonRow, options: ReadOptions) -> Parsed:
    """kvcache-ai/Mooncake, FAST'25 release: milliseconds, one chained id per started block of 512 tokens."""
    yield _hashed(row, MOONCAKE_BLOCK_SIZE, fields.number(row, "timestamp") / 1000.0)


def bailian(row: JsonRow, options: ReadOptions) -> Parsed:
    """Qwen-Bailian usage traces: seconds, 16-token ids, a chat tree in `chat_id` and `parent_chat_id` (-1: none)."""
    request = _hashed(row, BAILIAN_BLOCK_SIZE, fields.number(row, "timestamp"))
    parent = fields.text(row, "parent_chat_id")
    yield msgspec.structs.replace(
        request,
        id=fields.text(row, "chat_id"),
        parent=None if parent == "-1" else parent,
        turn=max(0, fields.integer(row, "turn") - 1) if "turn" in row else None,
        extra={"type": row["type"]} if "type" in row else {},
    )


def _hashed(row: JsonRow, block_size: int, arrival_time: float) -> TraceRequest:
    input_len = fields.integer(row, "input_length")
    hashes, tail = fields.split_tail(fields.block_hashes(row, "hash_ids"), input_len, block_size)
    return TraceRequest(
        arrival_time=arrival_time,
        input_len=input_len,
        output_len=fields.integer(row, "output_length"),
        prefix_block_hash=hashes,
        tail_block_hash=tail,
    )


def azure(row: JsonRow, options: ReadOptions) -> Parsed:
    """Azure/AzurePublicDataset, LLM inference traces of 2023 and 2024: wall clock, lengths, nothing else."""
    yield TraceRequest(
        arrival_time=fields.wall_clock(row, "TIMESTAMP"),
        input_len=fields.integer(row, "ContextTokens"),
        output_len=fields.integer(row, "GeneratedTokens"),
    )


def burstgpt(row: JsonRow, options: ReadOptions) -> Parsed:
    """BurstGPT: seconds, lengths, the model asked and the kind of log. 0 response tokens mark a failed request."""
    known = {"Timestamp", "Request tokens", "Response tokens", "Total tokens", "Session ID"}
    yield TraceRequest(
        arrival_time=fields.number(row, "Timestamp"),
        input_len=fields.integer(row, "Request tokens"),
        output_len=fields.integer(row, "Response tokens"),
        session=row.get("Session ID", ""),
        extra={key: value for key, value in row.items() if key not in known},
    )


def llmservingsim(row: JsonRow, options: ReadOptions) -> Parsed:
    """casys-kaist/LLMServingSim workloads: nanoseconds and real token ids."""
    tokens = fields.token_ids(row, "input_tok_ids")
    input_len = fields.integer(row, "input_toks")
    if len(tokens) != input_len:
        raise RowError("input_tok_ids", f"{len(tokens)} ids", f"input_toks = {input_len} of them")
    yield TraceRequest(
        arrival_time=fields.number(row, "arrival_time_ns") / 1e9,
        input_len=input_len,
        output_len=fields.integer(row, "output_toks"),
        prefix_block_hash=chain_hashes(tokens, options.block_size),
        input_token_ids=tokens,
        output_token_ids=fields.token_ids(row, "output_tok_ids") if "output_tok_ids" in row else None,
    )


def vllm_log(row: JsonRow, options: ReadOptions) -> Parsed:
    """Per-request log of a measured vLLM run: arrival in unix seconds, the engine's stamps on its own monotonic
    clock."""
    queued = fields.number(row, "queued_ts")
    first = fields.number(row, "first_token_ts")
    last = fields.number(row, "last_token_ts")
    output_len = fields.integer(row, "output_toks")
    outcome: dict[str, Any] = {
        "status": "ok",
        "queue_s": fields.number(row, "scheduled_ts") - queued,
        "ttft_s": first - queued,
        "e2e_s": last - queued,
    }
    if output_len > 1:
        outcome["tpot_s"] = (last - first) / (output_len - 1)
    yield TraceRequest(
        id=fields.text(row, "request_id"),
        arrival_time=fields.number(row, "arrival_time"),
        input_len=fields.integer(row, "input_toks"),
        output_len=output_len,
        outcome=outcome,
    )


def sharegpt(row: JsonRow, options: ReadOptions) -> Parsed:
    """ShareGPT conversations: each human turn followed by an answer is a request whose prompt is all the text so far.

    The source has no clock: every row arrives at 0 and `lint` says so.
    """
    encode = _encoder(options, "ShareGPT conversations")
    turns = row.get("conversations")
    if not isinstance(turns, list):
        raise RowError("conversations", turns, "a list of {from, value}")
    history: list[int] = []
    index = 0
    for asked, answered in itertools.pairwise(turns):
        if not (isinstance(asked, dict) and isinstance(answered, dict)):
            raise RowError("conversations", asked, "a list of {from, value}")
        if asked.get("from") not in ("human", "user") or answered.get("from") not in ("gpt", "assistant", "chatgpt"):
            continue
        history += encode(fields.text(asked, "value"))
        answer = tuple(encode(fields.text(answered, "value")))
        yield TraceRequest(
            arrival_time=0.0,
            input_len=len(history),
            output_len=len(answer),
            prefix_block_hash=chain_hashes(history, options.block_size),
            session=fields.text(row, "id") if "id" in row else "",
            turn=index,
            input_token_ids=tuple(history),
            output_token_ids=answer,
        )
        history += answer
        index += 1


def agent_session(row: JsonRow, options: ReadOptions) -> Parsed:
    """LMCache agent sessions: microseconds, full prompt and answer texts, a session id. Closed loop by construction."""
    encode = _encoder(options, "agent sessions with full text")
    prompt = tuple(encode(fields.text(row, "input")))
    answer = tuple(encode(fields.text(row, "output")))
    yield TraceRequest(
        arrival_time=fields.number(row, "timestamp") / 1e6,
        input_len=len(prompt),
        output_len=len(answer),
        prefix_block_hash=chain_hashes(prompt, options.block_size),
        session=fields.text(row, "session_id"),
        input_token_ids=prompt,
        output_token_ids=answer,
    )


def _encoder(options: ReadOptions, what: str) -> Encode:
    if options.encode is None:
        raise TraceError(
            f"{what} need a tokenizer to be counted in tokens: pass --tokenizer FILE (a tokenizer.json), "
            f"or --tokenizer bytes to count every UTF-8 byte as one token"
        )
    return options.encode


def pellucid(row: JsonRow, options: ReadOptions) -> Parsed:
    """Our own rows; fields that are not ours are kept. A row has few of the optional fields, so only those that are
    there are looked at."""
    found: dict[str, Any] = {
        field: _OPTIONAL[field](row, field) for field, value in row.items() if value is not None and field in _OPTIONAL
    }
    input_len = fields.integer(row, "input_len")
    tokens = found.get("input_token_ids")
    if tokens is not None and len(tokens) != input_len:
        raise RowError("input_token_ids", f"{len(tokens)} ids", f"input_len = {input_len} of them")
    if tokens is not None and options.block_size and "prefix_block_hash" not in found:
        found["prefix_block_hash"] = chain_hashes(tokens, options.block_size)
    if not row.keys() <= _OURS:
        found["extra"] = {key: value for key, value in row.items() if key not in _OURS}
    yield TraceRequest(
        arrival_time=fields.number(row, "arrival_time"),
        input_len=input_len,
        output_len=fields.integer(row, "output_len"),
        **found,
    )


def _object(row: JsonRow, field: str) -> dict[str, Any]:
    value = row[field]
    if not isinstance(value, dict):
        raise RowError(field, value, "an object")
    return value


def _signed(row: JsonRow, field: str) -> int:
    value = row[field]
    if type(value) is not int:
        raise RowError(field, value, "a whole number (lower is served first)")
    return value


def _block_hash(row: JsonRow, field: str) -> int | str:
    value = row[field]
    if type(value) is not int and type(value) is not str:
        raise RowError(field, value, "a block id: a whole number or a string")
    return value


_OURS = frozenset(TraceRequest.__struct_fields__) - {"extra"}
_OPTIONAL: dict[str, Callable[[JsonRow, str], Any]] = {
    "prefix_block_hash": fields.block_hashes,
    "tail_block_hash": _block_hash,
    "id": fields.text,
    "tenant": fields.text,
    "session": fields.text,
    "turn": fields.integer,
    "parent": fields.text,
    "priority": _signed,
    "deadline_s": fields.number,
    "input_token_ids": fields.token_ids,
    "output_token_ids": fields.token_ids,
    "sampling": _object,
    "outcome": _object,
}
