"""A conversation to the text that a model was trained on, by the model's own Jinja template.

A template writes special tokens (`<|im_start|>`) between pieces of what users wrote, and the result is tokenized as one
text. So that no user can write such a token, a mark is put inside every special token's text within a message before
rendering, and the rendered text is cut at the marks: `render` returns parts, and `Tokenizer.encode_parts` lets no token
reach from one part into the next. A message without such text, which is nearly every message, gives a single part and
exactly the tokens of the rendered text.

A `developer` message, OpenAI's newer word, is given to the template as `system`.

Limits: a template that itself assembles a special token out of pieces of several messages is not defended against, nor
is a special token of a single character, nor structure that a template writes as plain text (Llama 2's `[INST]`). A
SentencePiece tokenizer puts a space before each part.

Templates run in Jinja's immutable sandbox with the functions that Hugging Face templates may use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pellucid.core.errors import ModelError, RequestRejected
from pellucid.text.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
_FIRST_MARK = 0xE000  # the private-use area: no text has a meaning there


class ChatTemplate:
    """Renders conversations for one tokenizer. `now` is what `strftime_now` in a template asks for the time."""

    def __init__(self, source: str, tokenizer: Tokenizer, *, now: Callable[[], datetime] = datetime.now) -> None:
        """Raises ModelError where `source` is not a template."""
        self._source = source
        self._tokens = {"bos_token": tokenizer.bos_token or "", "eos_token": tokenizer.eos_token or ""}
        texts = sorted((text for text in tokenizer.special_texts if len(text) > 1), key=len, reverse=True)
        self._special = re.compile(f"(?={'|'.join(map(re.escape, texts))})") if texts else None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template cannot be parsed: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[str]:
        """The parts of the rendered conversation (see the module). A message has `role` (one of ROLES) and `content`,
        a string or a list of `{"type": "text", "text": ...}`. Raises RequestRejected for any other, and where the
        template refuses the conversation."""
        if not messages:
            raise RequestRejected("invalid_messages", "messages is empty; at least one message is needed")
        plain = [_plain(message, i) for i, message in enumerate(messages)]
        mark = self._unused_mark(plain)
        if self._special is not None:
            for message in plain:
                message["content"] = self._break_special_tokens(message["content"], mark)
        try:
            text = self._template.render(
                messages=plain,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise RequestRejected(
                "invalid_messages", f"the model's chat template refused the messages: {error}"
            ) from None
        return text.split(mark)

    def _break_special_tokens(self, content: str, mark: str) -> str:
        """`content` with the mark behind the first character of each special token's text, overlapping ones too."""
        assert self._special is not None
        starts = [match.start() for match in self._special.finditer(content)]
        for start in reversed(starts):
            content = content[: start + 1] + mark + content[start + 1 :]
        return content

    def _unused_mark(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A private-use character that occurs neither in the messages nor in the template."""
        used = set(self._source).union(*(message["content"] for message in messages))
        return next(mark for code in range(_FIRST_MARK, 0x110000) if (mark := chr(code)) not in used)


def load_chat_template(directory: str | Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template of a model directory: `chat_template.jinja`, or `chat_template` of `tokenizer_config.json`
    (of several the one named default). None where the model has none. Raises ModelError for an unreadable one."""
    directory = Path(directory)
    try:
        if (directory / "chat_template.jinja").exists():
            return ChatTemplate((directory / "chat_template.jinja").read_text(encoding="utf-8"), tokenizer)
        if not (directory / "tokenizer_config.json").exists():
            return None
        source = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"the chat template of {directory} cannot be read: {error}") from None
    if isinstance(source, list):
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    return ChatTemplate(source, tokenizer) if isinstance(source, str) else None


def chat_template_from_gguf(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template in a GGUF's metadata; None where it has none."""
    source = metadata.get("tokenizer.chat_template")
    return ChatTemplate(source, tokenizer) if source else None


def _plain(message: Mapping[str, Any], index: int) -> dict[str, str]:
    """A message as `role` and a single string of content; the texts of a list are joined as they are."""
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise RequestRejected("invalid_messages", f"messages[{index}].role is {role!r}; it must be one of {ROLES}")
    role = "system" if role == "developer" else role
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not isinstance(content, list):
        raise RequestRejected("invalid_messages", f"messages[{index}].content must be a string or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestRejected(
                "invalid_messages",
                f"messages[{index}].content[{i}] has type {kind!r}; this model takes parts of type 'text' only",
            )
        texts.append(part["text"])
    return {"role": role, "content": "".join(texts)}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's `tojson`: unlike Jinja's, it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  (an instance variable in the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
