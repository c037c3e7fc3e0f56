"""The ops page in a real browser: it renders, follows what happens, explains, and complains of nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from tests.page.chromium import Page, browse, find_browser
from tests.server.conftest import listening
from tests.server.test_end_to_end import Stack

from pellucid.server.app import create_app
from pellucid.server.config import ServedModel, ServerConfig
from pellucid.text.chat_template import ChatTemplate
from pellucid.text.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
READY = "document.getElementById('state').dataset.state === 'ready'"

pytestmark = [pytest.mark.long, pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed")]


class Server(Stack):
    """A stack whose steps take a while, so that there is something to see."""

    def __init__(self, tokenizer: Tokenizer, config: ServerConfig) -> None:
        super().__init__(tokenizer)
        self.executor.seconds = 0.03
        self.script[:] = self.script[:-1]  # and never ends by itself
        served = ServedModel("tiny", tokenizer, self.limits, ChatTemplate(TEMPLATE, tokenizer))
        self.app = create_app(self.client, served, config)


@pytest.fixture
async def server(tokenizer: Tokenizer) -> AsyncIterator[Server]:
    server = Server(tokenizer, ServerConfig())
    async with listening(server.app) as server.url:
        yield server


@pytest.fixture
async def page(server: Server) -> AsyncIterator[Page]:
    async with browse(server.url, find_browser() or "") as page:
        await page.until(READY)
        yield page


async def ask(page: Page, prompt: str, max_tokens: int) -> None:
    """Send a prompt from the playground."""
    for element, value in (("prompt", prompt), ("max-tokens", str(max_tokens))):
        await page.evaluate(f"document.getElementById('{element}').value = {json.dumps(value)}")
    await page.evaluate("document.getElementById('ask').requestSubmit()")


async def load(url: str, num_requests: int, max_tokens: int) -> None:
    """That many requests at once, which share the beginning of their prompts."""

    async def one(http: aiohttp.ClientSession, i: int) -> None:
        body = {"prompt": "the theory of " * 30 + str(i), "max_tokens": max_tokens, "ignore_eos": True}
        async with http.post(url + "/v1/completions", json=body) as reply:
            assert reply.status == 200

    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(one(http, i) for i in range(num_requests)))


def text(element: str) -> str:
    return f"document.getElementById({json.dumps(element)}).textContent"


async def test_an_idle_server(page: Page) -> None:
    assert await page.evaluate("document.title") == "Pellucid"
    assert "tiny" in await page.evaluate(text("model"))
    await page.until(f"{text('pool-size')}.includes('512 blocks of 16 tokens')")
    assert await page.evaluate("!document.getElementById('no-lanes').hidden")
    assert "pellucid measure" in await page.evaluate(text("no-roof"))
    assert page.complaints == []


async def test_it_follows_what_happens(server: Server, page: Page) -> None:
    work = asyncio.create_task(load(server.url, 6, max_tokens=150))
    await page.until(f"{text('running')} === '6'")
    await page.until("document.querySelectorAll('#group-running .lane').length === 6")
    await page.until(f"Number({text('output-rate')}) > 0")
    await page.until(f"{text('causes')}.includes('writing')")
    await page.until("document.querySelectorAll('#branches tr').length >= 1")
    await page.until("document.getElementById('level').getAttribute('aria-label').includes('in use')")
    await work
    await page.until("document.querySelectorAll('#group-ended .lane').length === 6")
    await page.until(f"{text('running')} === '0'")
    assert "6 first tokens" in await page.evaluate(text("ttft-count"))
    assert page.complaints == []


async def test_a_prompt_from_the_playground_has_a_lane_that_is_explained(page: Page) -> None:
    await ask(page, "hi", max_tokens=90)
    await page.until("document.querySelector('.lane[data-mine=true]')")
    await page.until(f"{text('answer')}.length > 20")
    await page.until(f"{text('asked')}.startsWith('90 tokens in')")
    await page.evaluate("document.getElementById('lanes').focus()")
    await page.press("ArrowDown", 40)
    await page.press("Enter", 13)
    await page.until(f"{text('explanation')}.includes('chatcmpl-')")
    await page.until(f"{text('explanation')}.includes('Alone on this machine')")  # the server's own ledger
    explained = await page.evaluate(text("explanation"))
    assert "Ended: length." in explained
    assert "decode.own" in explained
    assert await page.evaluate("document.querySelector('.lane[aria-selected=true]') !== null")
    await page.evaluate("document.querySelector('#explanation .close').click()")
    assert await page.evaluate("document.activeElement.id") == "lanes"
    assert page.complaints == []


async def test_a_block_can_be_pointed_at_with_the_keyboard(server: Server, page: Page) -> None:
    await load(server.url, 2, max_tokens=5)
    await page.until("document.getElementById('level').getAttribute('aria-label').includes('cached 1')")
    await page.evaluate("document.getElementById('blocks').focus()")
    await page.press("ArrowRight", 39)
    assert (await page.evaluate(text("block"))).startswith("Block 0: cached")
    await page.press("ArrowDown", 40)
    assert (await page.evaluate(text("block"))).startswith("Block ")
    assert page.complaints == []


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True])
async def test_it_fits_its_window(server: Server, page: Page, width: int, dark: bool) -> None:
    await page.size(width, 900, dark=dark)
    await load(server.url, 3, max_tokens=20)
    await page.until("document.querySelectorAll('.lane').length === 3")
    assert await page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, ground[4:-1].split(","))) < 60) == dark
    outside = """[...document.querySelectorAll('.panel *')].filter(element => {
        const box = element.getBoundingClientRect(), panel = element.closest('.panel').getBoundingClientRect();
        return box.width && !element.closest('.unseen') && (box.right > panel.right + 1 || box.left < panel.left - 1);
    }).map(element => element.outerHTML.slice(0, 80))"""
    assert await page.evaluate(outside) == []
    assert page.complaints == []


async def test_every_control_has_a_name_and_every_picture_a_text(page: Page) -> None:
    unnamed = """[...document.querySelectorAll('button, input, textarea, canvas, section')].filter(element =>
        !element.textContent.trim() && !element.getAttribute('aria-label') && !element.labels?.length
        && !element.getAttribute('aria-labelledby') && !element.closest('[aria-hidden=true]')
        && !element.closest('.legend')).map(element => element.outerHTML)"""
    assert await page.evaluate(unnamed) == []


async def test_a_theme_is_chosen_and_kept(page: Page) -> None:
    await page.evaluate("document.getElementById('theme').click()")  # light
    await page.evaluate("document.getElementById('theme').click()")
    assert await page.evaluate("document.documentElement.dataset.theme") == "dark"
    await page.call("Page.reload")
    await page.until(f"document.readyState === 'complete' && {READY}")
    assert await page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.complaints == []


async def test_a_pause_holds_the_picture(server: Server, page: Page) -> None:
    await page.evaluate("document.getElementById('pause').click()")
    assert await page.evaluate("document.getElementById('state').dataset.state") == "paused"
    await load(server.url, 1, max_tokens=60)
    assert await page.evaluate("document.querySelectorAll('.lane').length") == 0
    await page.evaluate("document.getElementById('pause').click()")
    await page.until("document.querySelectorAll('.lane').length === 1")


async def test_the_key_is_asked_for_once(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, ServerConfig(api_key="secret"))
    async with listening(server.app) as url, browse(url, find_browser() or "") as page:
        await page.until("document.getElementById('key').open")
        assert "API key" in await page.evaluate(text("key-why"))
        await page.evaluate("document.getElementById('key-value').value = 'secret'")
        await page.evaluate("document.querySelector('#key-form button').click()")
        await page.until(READY)
        page.complaints.clear()  # the browser has noted the 401
        await page.call("Page.reload")
        await page.until(f"document.readyState === 'complete' && {READY}")
        assert not await page.evaluate("document.getElementById('key').open")
        await ask(page, "hi", max_tokens=3)
        await page.until(f"{text('asked')}.startsWith('3 tokens in')")
        assert page.complaints == []


async def test_a_server_that_goes_away_is_said_and_found_again(server: Server, page: Page) -> None:
    server.app.state.feed.close()
    await page.until(f"{text('state')}.includes('trying again')")
    server.app.state.feed._closed = False
    await page.until(READY)
    assert page.complaints == []
