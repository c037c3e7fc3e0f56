"""What passes between a server process and its engine process: msgpack, one tagged struct a message.

Messages are versioned by the code on both sides being the same: the engine process is always started by its client.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pellucid.core.events import Finished, TokensGenerated
from pellucid.core.request import Request, SamplingParams
from pellucid.engine.engine import EngineStats


class Add(msgspec.Struct, tag=True):
    """Queue a request. Block keys are a simulator's affair and do not travel."""

    id: str
    prompt: list[int]
    sampling: SamplingParams
    arrival: float
    tenant: str
    priority: int
    deadline: float | None
    cache_key: bytes
    match_limit: int | None
    public_key: bytes
    num_public_blocks: int

    @classmethod
    def of(cls, request: Request) -> Add:
        return cls(
            id=request.id,
            prompt=list(request.prompt),
            sampling=request.sampling,
            arrival=request.arrival,
            tenant=request.tenant,
            priority=request.priority,
            deadline=request.deadline,
            cache_key=request.cache_key,
            match_limit=request.match_limit,
            public_key=request.public_key,
            num_public_blocks=request.num_public_blocks,
        )

    def request(self) -> Request:
        return Request(**{name: getattr(self, name) for name in self.__struct_fields__})


class Abort(msgspec.Struct, tag=True):
    """End a request; nothing is answered for one that has ended."""

    request_id: str


class Stop(msgspec.Struct, tag=True):
    """Leave the loop and exit."""


class Progress(msgspec.Struct, tag=True):
    """What the engine is doing while it starts, for people."""

    text: str


class Ready(msgspec.Struct, tag=True):
    """The engine takes requests. `description` says on what it runs, for people."""

    description: str
    stats: EngineStats


class Output(msgspec.Struct, tag=True):
    """Events of one step. A request's tokens come before its end."""

    tokens: list[TokensGenerated]
    finished: list[Finished]
    stats: EngineStats


class Rejected(msgspec.Struct, tag=True):
    """The scheduler refused a request; `code` and `message` are those of RequestRejected."""

    request_id: str
    code: str
    message: str


class Died(msgspec.Struct, tag=True):
    """The last message of an engine that fails. `expected` errors are the user's to mend and need no traceback."""

    reason: str
    expected: bool


ToEngine = Add | Abort | Stop
FromEngine = Progress | Ready | Output | Rejected | Died

encode = msgspec.msgpack.Encoder().encode
decode_to_engine: Any = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine: Any = msgspec.msgpack.Decoder(FromEngine).decode
