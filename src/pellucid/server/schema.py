"""The OpenAPI document's view of what this server reads by hand: bodies from their types, and every error status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from pellucid.server.openai_types import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from pellucid.telemetry.prometheus import CONTENT_TYPE

ERROR_STATUSES: Mapping[int, str] = {
    400: "The request cannot be served as it is; the message says what to change.",
    401: "The API key is missing or wrong.",
    403: "The API key is valid, but not for this.",
    404: "No such model.",
    413: "The body is too large.",
    429: "A limit of the tenant is reached; see Retry-After.",
    503: "A limit of the machine is reached or the engine is starting (see Retry-After), or it has stopped.",
    504: "The request's deadline passed while it waited.",
}
_BODIES: tuple[type[msgspec.Struct], ...] = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
_REFERENCES, _COMPONENTS = msgspec.json.schema_components(_BODIES, ref_template="#/components/schemas/{name}")
_JSON: Mapping[str, Any] = {"application/json": {"schema": {"type": "object"}}}
_STREAM: Mapping[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}
_METRICS: Mapping[str, Any] = {CONTENT_TYPE: {"schema": {"type": "string"}}}


def request_body(body: type[msgspec.Struct]) -> dict[str, Any]:
    """A route's entry for a body of this type."""
    schema = _REFERENCES[_BODIES.index(body)]
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def responses(*, streams: bool = False, metrics: bool = False) -> dict[int | str, dict[str, Any]]:
    """A route's replies: JSON, a stream of events as well, or metrics; and the errors."""
    content = _METRICS if metrics else {**_JSON, **_STREAM} if streams else _JSON
    nullable = {"type": ["string", "null"]}
    fields = {"message": {"type": "string"}, "type": {"type": "string"}, "param": nullable, "code": nullable}
    error = {"type": "object", "properties": fields, "required": list(fields)}
    schema = {"type": "object", "properties": {"error": error}, "required": ["error"]}
    errors: dict[int | str, dict[str, Any]] = {
        status: {"description": text, "content": {"application/json": {"schema": schema}}}
        for status, text in ERROR_STATUSES.items()
    }
    return {200: {"description": "As asked.", "content": dict(content)}, **errors}


def openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document with the bodies' schemas, which it has not seen itself."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update({name: _with_nulls(component) for name, component in _COMPONENTS.items()})
        app.openapi_schema = document
    return app.openapi_schema


def _with_nulls(component: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object whose optional fields may also be null, which means the same as absent."""
    required = component.get("required", [])
    properties = {
        name: schema if name in required else {"anyOf": [schema, {"type": "null"}]}
        for name, schema in component.get("properties", {}).items()
    }
    return component | {"properties": properties}
