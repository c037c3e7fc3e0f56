"""The ops page's routes: `/` and `/ops/*` are plain files without data, `/v1/live` is the data and asks for the key.

The page fetches nothing from anywhere else, and its content policy says so to the browser.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from pellucid.server.access import require_operator
from pellucid.server.errors import ApiError
from pellucid.server.ops.live import LiveFeed
from pellucid.server.streaming import EventStream, Outlet

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class OpsRoutes:
    """The page's files are read once."""

    def __init__(self, feed: LiveFeed) -> None:
        self._feed = feed
        page = files("pellucid.server.ops").joinpath("page")
        self._files = {
            item.name: item.read_bytes() for item in page.iterdir() if item.name.rpartition(".")[2] in _KINDS
        }

    def add_to(self, app: FastAPI) -> None:
        """Declare the routes."""
        app.add_api_route("/v1/live", self.live, methods=["GET"], include_in_schema=False)
        for path, answer in (("/", self.page), ("/ops/{name}", self.file)):
            app.add_api_route(path, answer, methods=["GET", "HEAD"], include_in_schema=False)

    async def live(self, http: HttpRequest) -> Response:
        """What the engine is doing, once a second, as server-sent events."""
        require_operator(http)
        return EventStream(self._feed.watch, {}, Outlet())

    async def page(self, http: HttpRequest) -> Response:
        """The ops page."""
        return self._answer("index.html")

    async def file(self, http: HttpRequest, name: str) -> Response:
        """A part of the ops page."""
        return self._answer(name)

    def _answer(self, name: str) -> Response:
        content = self._files.get(name)
        if content is None:
            raise ApiError(404, f"the ops page has no file {name!r}", code="not_found")
        return Response(content, 200, _HEADERS, _KINDS[name.rpartition(".")[2]])
