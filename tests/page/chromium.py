"""A headless Chromium, driven over its own protocol: open a page, ask it things, press keys, take pictures."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)


def find_browser() -> str | None:
    """The path of an installed Chromium, or None."""
    return next((path for path in map(shutil.which, BROWSERS) if path), None)


class Page:
    """One page. `complaints` collects console errors and warnings, exceptions and failed requests."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol."""
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        return await asyncio.wait_for(answer, 60)

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        reply = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in reply:
            raise AssertionError(json.dumps(reply["exceptionDetails"]))
        return reply["result"].get("value")

    async def until(self, expression: str, seconds: float = 30.0) -> None:
        """Wait until the expression is true, as JavaScript takes it."""
        try:
            async with asyncio.timeout(seconds):
                while not await self.evaluate(f"Boolean({expression})"):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"never true: {expression}; {self.complaints}") from None

    async def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Lay the page out anew, under a light or a dark system."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def press(self, key: str, code: int) -> None:
        """A key, by its name and its virtual key code."""
        for kind in ("rawKeyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    async def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write what is seen, or all of the page, as PNG."""
        reply = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(reply["data"]))

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            answer = self._answers.pop(event.get("id"), None)
            if answer is not None:
                if "error" in event:
                    answer.set_exception(AssertionError(event["error"]["message"]))
                else:
                    answer.set_result(event["result"])
                continue
            self._note(event.get("method"), event.get("params", {}))

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")

    async def close(self) -> None:
        self._reader.cancel()
        await self._socket.close()


@asynccontextmanager
async def browse(url: str, browser: str) -> AsyncIterator[Page]:
    """A page of a new browser at `url`, 1280 by 900."""
    with tempfile.TemporaryDirectory(prefix="pellucid-chromium-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            browser,
            *_FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            async with aiohttp.ClientSession() as http:
                address = await _address(Path(profile))
                targets = await (await http.get(f"http://{address}/json/list")).json()
                target = next(target for target in targets if target["type"] == "page")
                socket = await http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                await page.size(1280, 900)
                await page.call("Page.navigate", url=url)
                await page.until("location.href !== 'about:blank' && document.readyState === 'complete'")
                yield page
                await page.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it has processes of its own
            await process.wait()


async def _address(profile: Path) -> str:
    """Where the browser listens, as it writes into its profile."""
    said = profile / "DevToolsActivePort"
    async with asyncio.timeout(60):
        while not said.exists() or not (lines := said.read_text().split()):
            await asyncio.sleep(0.05)
    return f"127.0.0.1:{lines[0]}"
