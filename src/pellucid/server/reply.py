"""One reply on its way: the choices of a request run side by side, and are written whole or in chunks.

Invariants: every chunk is one write of one event; a chunk is sent when it has text, or ids that were asked for, or the
end, so tokens whose text is held back are counted in the next chunk; the finish reason comes exactly once a choice.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pellucid.server.generation import Piece
from pellucid.server.ledgers import OpenLedger
from pellucid.server.openai_types import GenerationBody
from pellucid.server.shapes import Choice, Envelope, Usage
from pellucid.server.streaming import Write, all_of
from pellucid.telemetry.ledger_json import reply_fields

Start = Callable[[Choice], AsyncGenerator[Piece, None]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the text that `echo` puts before the output (empty without `echo`)."""

    token_ids: list[int]
    echo: str = ""


class Reply:
    """`start` begins the generation of a choice; `choices[i]` continues prompt `i // n`."""

    def __init__(
        self, envelope: Envelope, body: GenerationBody, prompts: Sequence[Prompt], usage: Usage, start: Start
    ) -> None:
        self._envelope, self._body, self._prompts, self._usage, self._start = envelope, body, prompts, usage, start
        self._choices = [Choice(i, i // body.n) for i in range(len(prompts) * body.n)]

    async def collect(self) -> bytes:
        """Run all choices to their end; the body of the reply."""
        await all_of([self._collect(choice) for choice in self._choices])
        entries = [
            self._entry(choice, self._envelope.shape.whole(choice.text), choice.token_ids, first=True)
            for choice in self._choices
        ]
        extra = {"usage": self._usage.of(self._choices)} | self._prompt_ids_beside(first=True)
        if self._body.include_ledger:
            extra["ledger"] = await self._ledger()
        return self._envelope.body(entries, extra)

    async def stream(self, write: Write) -> None:
        """Run all choices to their end and write their chunks as they come; usage and ledger last if asked for."""
        await all_of([self._stream(choice, write) for choice in self._choices])
        extra = {"usage": self._usage.of(self._choices)} if self._includes_usage else {}
        if self._body.include_ledger:
            extra["ledger"] = await self._ledger()
        if extra:
            await write(self._envelope.event([], extra))

    def ended(self, now: float) -> list[tuple[OpenLedger, float]]:
        """The choices' ledgers, each with the moment of its last byte: `now`, when the reply ended, for the choice that
        was the last to say something."""
        ledgers = [choice.ledger for choice in self._choices if choice.ledger is not None]
        ends = [ledger.last_sent or now for ledger in ledgers]
        return [(ledger, now if end == max(ends) else end) for ledger, end in zip(ledgers, ends, strict=True)]

    async def _ledger(self) -> dict[str, Any]:
        """The ledger of the reply: that of the choice which the engine ended last."""
        ledgers = [choice.ledger for choice in self._choices if choice.ledger is not None]
        reports = [await ledger.report() for ledger in ledgers]
        last = max(range(len(ledgers)), key=lambda i: ledgers[i].engine_end)
        return reply_fields(reports[last])

    @property
    def _includes_usage(self) -> bool:
        return self._body.stream_options is not None and self._body.stream_options.include_usage

    async def _collect(self, choice: Choice) -> None:
        texts = [self._prompts[choice.prompt].echo]
        async with aclosing(self._start(choice)) as pieces:
            async for piece in pieces:
                choice.take(piece)
                texts.append(piece.text)
        choice.text = "".join(texts)

    async def _stream(self, choice: Choice, write: Write) -> None:
        first = True
        text = self._prompts[choice.prompt].echo
        unsent: list[int] = []
        async with aclosing(self._start(choice)) as pieces:
            async for piece in pieces:
                choice.take(piece)
                text += piece.text
                unsent += piece.token_ids
                if text or choice.finish_reason or (unsent and self._body.return_token_ids):
                    await write(self._chunk(choice, text, unsent, first=first))
                    if choice.ledger is not None:
                        choice.ledger.sent()
                    first, text, unsent = False, "", []

    def _chunk(self, choice: Choice, text: str, token_ids: list[int], *, first: bool) -> bytes:
        entry = self._entry(choice, self._envelope.shape.delta(text, first=first), token_ids, first=first)
        entry["num_tokens"] = len(token_ids)
        extra = self._prompt_ids_beside(first=first)
        if self._includes_usage:
            options = self._body.stream_options
            continuous = options is not None and options.continuous_usage_stats
            extra["usage"] = self._usage.of(self._choices) if continuous else None
        return self._envelope.event([entry], extra)

    def _entry(self, choice: Choice, content: dict[str, Any], token_ids: list[int], *, first: bool) -> dict[str, Any]:
        entry = {"index": choice.index, **content, "logprobs": None, "finish_reason": choice.finish_reason}
        if self._body.return_token_ids:
            entry["token_ids"] = token_ids
            if first and self._envelope.shape.prompt_ids_in_choice:
                entry["prompt_token_ids"] = self._prompts[choice.prompt].token_ids
        return entry

    def _prompt_ids_beside(self, *, first: bool) -> dict[str, Any]:
        if self._body.return_token_ids and first and not self._envelope.shape.prompt_ids_in_choice:
            return {"prompt_token_ids": self._prompts[0].token_ids}
        return {}
