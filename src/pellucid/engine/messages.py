"""What passes between a server process and its engine process: msgpack, one tagged struct a message.

Messages are versioned by the code on both sides being the same: the engine process is always started by its client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from pellucid.core.errors import RejectingLimit, RequestRejected
from pellucid.core.events import Event, Finished, Queued, TokensGenerated
from pellucid.core.request import Request, SamplingParams
from pellucid.core.step_record import StepRecord, StepSummary
from pellucid.core.tenants import Tenant
from pellucid.engine.engine import EngineStats
from pellucid.engine.view import EngineView


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


class Reconfigure(msgspec.Struct, tag=True):
    """From the next step on these are the tenants."""

    tenants: list[Tenant]


class AskSteps(msgspec.Struct, tag=True):
    """Send the last `count` step records; `LastSteps` with the same ticket answers, between two steps."""

    ticket: int
    count: int


class Look(msgspec.Struct, tag=True):
    """Answer with a View before the next step."""

    tokens: bool


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
    """Events of one step. A request is queued before its tokens come, and its tokens come before its end."""

    queued: list[Queued]
    tokens: list[TokensGenerated]
    finished: list[Finished]
    stats: EngineStats

    @classmethod
    def of(cls, events: Iterable[Event], stats: EngineStats) -> Output:
        """The events that a request's reader gets; the others are for those who listen in the engine's process."""
        output = cls([], [], [], stats)
        for event in events:
            match event:
                case Queued():
                    output.queued.append(event)
                case TokensGenerated():
                    output.tokens.append(event)
                case Finished():
                    output.finished.append(event)
        return output


class Steps(msgspec.Struct, tag=True):
    """The steps since the last such message, in numbers. Sent unasked, at most twice a second and at most a second
    late, so that metrics and the ops page never ask the engine for anything."""

    summaries: list[StepSummary]


class LastSteps(msgspec.Struct, tag=True):
    """Answers `AskSteps`. The records are as they lie in the ring, so that answering costs the engine a copy;
    `decode_step_record` reads each."""

    ticket: int
    records: list[bytes]


class View(msgspec.Struct, tag=True):
    """The answer to a Look."""

    view: EngineView


class Rejected(msgspec.Struct, tag=True):
    """The scheduler refused a request; the fields are those of RequestRejected."""

    request_id: str
    code: str
    message: str
    retry_after: float | None
    limit: RejectingLimit | None

    @classmethod
    def of(cls, request_id: str, error: RequestRejected) -> Rejected:
        return cls(request_id, error.code, str(error), error.retry_after, error.limit)

    def error(self) -> RequestRejected:
        return RequestRejected(self.code, self.message, retry_after=self.retry_after, limit=self.limit)


class Died(msgspec.Struct, tag=True):
    """The last message of an engine that fails. `expected` errors are the user's to mend and need no traceback."""

    reason: str
    expected: bool


ToEngine = Add | Abort | Reconfigure | AskSteps | Look | Stop
FromEngine = Progress | Ready | Output | Steps | LastSteps | View | Rejected | Died

encode = msgspec.msgpack.Encoder().encode
decode_to_engine: Any = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine: Any = msgspec.msgpack.Decoder(FromEngine).decode
decode_step_record: Callable[[bytes], StepRecord] = msgspec.msgpack.Decoder(StepRecord).decode
