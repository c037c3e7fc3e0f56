"""Every error of the HTTP surface, in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

One that a bound caused also says `limit`, whose bound it was ("tenant" or "machine"), and, where asking again makes
sense, `retry_after`, in seconds.

One table says which status an error of the lower rooms becomes; anything not in it is a bug of ours and a 500.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from pellucid.core.errors import ConfigError, EngineDead, PellucidError, RequestRejected
from pellucid.core.request import Request
from pellucid.engine.client import EngineState

RETRY_AFTER_SECONDS = 2  # an engine that is starting is asked again this soon

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
    504: "deadline_error",
}
_TOO_LONG = ("context_length_exceeded", "kv_pool_exceeded")  # one code for clients, which act on it


class ApiError(PellucidError):
    """An error with its HTTP status. `param` names the field at fault, `code` is a stable word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        more: Mapping[str, str | float] | None = None,
    ) -> None:
        """`more` stands beside the four fields that every error has."""
        super().__init__(message)
        self.status, self.code, self.param, self.headers, self.more = status, code, param, headers, more

    def body(self) -> bytes:
        """The JSON body, also sent as the last event of a stream that fails."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error | dict(self.more or {})})

    def response(self) -> Response:
        return Response(self.body(), self.status, dict(self.headers or {}), "application/json")


class DeadlineExceeded(ApiError):
    """The deadline of `request`, which came at `arrival`, passed while it waited."""

    def __init__(self, request: Request, arrival: float) -> None:
        allowed = "" if request.deadline is None else f" of {1000 * (request.deadline - arrival):.0f} ms"
        super().__init__(
            504,
            f"the deadline{allowed} passed while the request waited; nothing of it was computed",
            code="deadline_exceeded",
        )


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param, code=code)


def not_ready(state: EngineState, reason: str) -> ApiError:
    """The refusal of an engine that is starting or dead."""
    if state == "starting":
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
        return ApiError(503, f"the engine is starting: {reason or 'loading'}", code="engine_starting", headers=headers)
    return ApiError(503, f"the engine has stopped: {reason}", code="engine_dead")


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of `error`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestRejected) and error.retry_after is not None:
        return _not_now(error, error.retry_after)
    if isinstance(error, RequestRejected):
        code = "context_length_exceeded" if error.code in _TOO_LONG else error.code
        return ApiError(400, str(error), code=code, more=None if error.limit is None else {"limit": error.limit})
    if isinstance(error, ConfigError):  # a sampling parameter out of range
        return bad_request(str(error), code="invalid_value")
    if isinstance(error, EngineDead):
        return not_ready("dead", str(error))
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def _not_now(error: RequestRejected, retry_after: float) -> ApiError:
    """The refusal of what may be asked again: 429 for a bound of the tenant's own, 503 for one of the machine."""
    return ApiError(
        429 if error.limit == "tenant" else 503,
        str(error),
        code=error.code,
        headers={"Retry-After": str(max(1, math.ceil(retry_after)))},
        more={"limit": error.limit or "machine", "retry_after": round(retry_after, 3)},
    )
