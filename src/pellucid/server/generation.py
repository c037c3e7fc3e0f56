"""One choice, from a request to pieces of text: the engine's tokens detokenized, cut at stop strings, counted.

Invariants: the last piece, and only the last, has a finish reason; the token counts of all pieces add up to what the
engine generated up to there; leaving before the end (a stop string, a cancelled task, a closed iterator) closes the
engine's stream, which aborts the request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple, cast

from pellucid.core.errors import RequestRejected
from pellucid.core.events import Finished, Queued, TokensGenerated
from pellucid.core.request import Request
from pellucid.engine.client import EngineClient, StreamEvent
from pellucid.server.errors import ApiError, DeadlineExceeded
from pellucid.server.meter import Meter
from pellucid.text.detokenizer import Detokenizer
from pellucid.text.stop import StopMatcher
from pellucid.text.tokenizer import Tokenizer


class Piece(NamedTuple):
    """Text that may be shown and the tokens that arrived with it; either may be empty while something is held back."""

    text: str
    token_ids: tuple[int, ...]
    num_cached: int
    finish_reason: str | None


async def generate(
    engine: EngineClient, request: Request, *, tokenizer: Tokenizer, stops: Sequence[str], meter: Meter
) -> AsyncGenerator[Piece, None]:
    """The pieces of one request. Raises what the engine raises, and ApiError where it ends the request by itself."""
    end = "disconnect"
    try:
        async with aclosing(_pieces(engine, request, tokenizer, stops, meter)) as pieces:
            async for piece in pieces:
                if piece.finish_reason is not None:
                    end = piece.finish_reason
                yield piece
    except RequestRejected as error:
        end = "rejected"
        meter.rejected(error)
        raise
    except Exception as error:
        end = "deadline" if isinstance(error, DeadlineExceeded) else "error"
        raise
    finally:
        meter.end(end)


async def _pieces(
    engine: EngineClient, request: Request, tokenizer: Tokenizer, stops: Sequence[str], meter: Meter
) -> AsyncGenerator[Piece, None]:
    text, stop = Detokenizer(tokenizer), StopMatcher(stops)
    stream = cast("AsyncGenerator[StreamEvent, None]", engine.submit(request))
    async with aclosing(stream) as events:
        async for event in events:
            if isinstance(event, Queued):
                meter.queued(event)
            elif isinstance(event, TokensGenerated):
                meter.tokens(event)
                shown = stop.push(text.push(event.token_ids))
                yield Piece(shown, event.token_ids, event.num_cached, None if stop.found is None else "stop")
                if stop.found is not None:
                    return
            else:
                meter.finished(event)
                _check_end(event, request, meter)
                shown = stop.push(text.flush()) + stop.flush()
                yield Piece(shown, (), event.num_cached, event.reason)
                return
    raise RuntimeError(f"the stream of request {request.id} ended without a Finished event")


def _check_end(event: Finished, request: Request, meter: Meter) -> None:
    """Raises ApiError for an end that is no answer."""
    if event.reason == "abort":
        raise ApiError(503, "the engine aborted the request", code="aborted")
    if event.reason == "deadline":
        raise DeadlineExceeded(request, meter.arrival)
