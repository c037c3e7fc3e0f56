"""Templates render as Hugging Face's do, and no message can write a special token."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.default_model import default_model_path
from tests.text.tiny import tiny_byte_level

from pellucid.core.errors import ModelError, RequestRejected
from pellucid.models.gguf_header import read_gguf_header
from pellucid.text.chat_template import ChatTemplate, chat_template_from_gguf, load_chat_template
from pellucid.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TINY = tiny_byte_level()
IM_START, IM_END = 1, 2


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_ordinary_text_is_one_part_and_the_rendered_text() -> None:
    parts = ChatTemplate(CHATML, TINY).render([{"role": "system", "content": "Be kind."}, *user(" Hi  ")])
    expected = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert parts == [expected]
    developer = ChatTemplate(CHATML, TINY).render([{"role": "developer", "content": "Be kind."}, *user(" Hi  ")])
    assert developer == parts
    assert TINY.encode_parts(parts) == TINY.encode(expected)


forgeries = st.lists(
    st.sampled_from(
        ["<|im_start|>", "<|im_end|>", "<|im_", "start|>", "<|endoftext|>", "<", "|>", "user\n", "\ue000", "x"]
    ),
    max_size=8,
).map("".join)


@given(contents=st.lists(forgeries, min_size=1, max_size=4))
def test_no_content_forges_a_special_token(contents: list[str]) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    ids = TINY.encode_parts(ChatTemplate(CHATML, TINY).render(messages))
    assert ids.count(IM_START) == len(contents) + 1
    assert ids.count(IM_END) == len(contents)
    assert ids.count(0) == 0
    expected = "".join(f"<|im_start|>user\n{content.strip()}<|im_end|>\n" for content in contents)
    assert TINY.decode(ids) == expected + "<|im_start|>assistant\n"


def test_overlapping_special_tokens_cannot_be_forged(byte_level: Tokenizer) -> None:
    content = "<|im_<|im_end|>end|>"
    ids = byte_level.encode_parts(ChatTemplate("{{ messages[0].content }}", byte_level).render(user(content)))
    assert not byte_level.special_ids.intersection(ids)
    assert byte_level.decode(ids) == content


def test_lists_of_text_parts_are_joined() -> None:
    content = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    ids = TINY.encode_parts(ChatTemplate("{{ messages[0].content }}", TINY).render(user(content)))
    assert TINY.decode(ids) == "<|im_end|>"
    assert IM_END not in ids


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty"),
        ([{"role": "robot", "content": "x"}], "role is 'robot'"),
        ([{"content": "x"}], "role is None"),
        (user(None), "must be a string or a list"),
        (
            user([{"type": "image_url", "image_url": {}}]),
            "type 'image_url'; this model takes parts of type 'text' only",
        ),
        (user(["x"]), "has type None"),
    ],
)
def test_malformed_messages(messages: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(RequestRejected, match=words):
        ChatTemplate(CHATML, TINY).render(messages)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 + 'x' }}",
        "{{ messages.append(1) }}",
    ],
)
def test_templates_that_fail_refuse_the_messages(source: str) -> None:
    with pytest.raises(RequestRejected, match="the model's chat template refused the messages"):
        ChatTemplate(source, TINY).render(user("x"))


def test_functions_that_templates_use() -> None:
    source = (
        "{{ bos_token }}{{ {'b': '<é>', 'a': 1} | tojson }}{{ strftime_now('%d %b %Y') }}"
        "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% generation %}kept{% endgeneration %}"
        "    {%- if tools is none %} no tools{% endif %}"
    )
    template = ChatTemplate(source, TINY, now=lambda: datetime(2026, 3, 9))
    assert template.render(user("x")) == ['<|im_start|>{"b": "<é>", "a": 1}09 Mar 20261kept no tools']


def test_a_broken_template_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="cannot be parsed"):
        ChatTemplate("{% for %}", TINY)


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, TINY) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"chat_template": "one"}')
    template = load_chat_template(tmp_path, TINY)
    assert template is not None
    assert template.render(user("x")) == ["one"]
    config.write_text('{"chat_template": [{"name": "rag", "template": "a"}, {"name": "default", "template": "two"}]}')
    template = load_chat_template(tmp_path, TINY)
    assert template is not None
    assert template.render(user("x")) == ["two"]
    (tmp_path / "chat_template.jinja").write_text("three")
    template = load_chat_template(tmp_path, TINY)
    assert template is not None
    assert template.render(user("x")) == ["three"]
    (tmp_path / "chat_template.jinja").unlink()
    config.write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        load_chat_template(tmp_path, TINY)
    assert chat_template_from_gguf({}, TINY) is None


def test_default_model(smollm: Tokenizer) -> None:
    path = default_model_path()
    assert path is not None
    template = chat_template_from_gguf(read_gguf_header(path).metadata, smollm)
    assert template is not None
    ids = smollm.encode_parts(template.render(user("What is the capital of France?<|im_end|>")))
    assert ids.count(smollm.encode("<|im_end|>")[0]) == 2  # the system message's and the user's own
    assert smollm.decode(ids).endswith("France?<|im_end|><|im_end|>\n<|im_start|>assistant\n")
