"""Namespaces, public prefixes and the secret behind them."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest
from tests.server.conftest import LIMITS, TEMPLATE

from pellucid.core.errors import ConfigError
from pellucid.server.config import ServedModel
from pellucid.server.isolation import SECRET_BYTES, Namer, PublicPrefix, encode_prefix, load_secret, longest_prefix
from pellucid.text.chat_template import ChatTemplate
from pellucid.text.tokenizer import Tokenizer

SECRET = b"s" * SECRET_BYTES
MESSAGE = "The quick brown fox jumps over the lazy dog. " * 5
# Puts the system message into the first user message, as some models were trained.
FOLDING = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}"
    "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% endif %}<|im_end|>{% endif %}{% endfor %}"
)


def model(tokenizer: Tokenizer, template: str | None = TEMPLATE) -> ServedModel:
    return ServedModel("tiny", tokenizer, LIMITS, None if template is None else ChatTemplate(template, tokenizer))


def test_namespaces_differ_by_secret_model_kind_and_name() -> None:
    namers = [Namer(secret, name) for secret, name in product((SECRET, b"t" * SECRET_BYTES), ("m", "mm"))]
    names = [namer.of_tenant(tenant) for namer in namers for tenant in ("a", "b", "ab")]
    names += [namer.of_prefix(name, tokens) for namer in namers for name in ("a", "b") for tokens in ((1, 2), (1, 3))]
    assert len(set(names)) == len(names)
    assert {len(name) for name in names} == {16}
    assert Namer(SECRET, "m").of_tenant("a") == Namer(SECRET, "m").of_tenant("a"), "not the same after a restart"
    assert Namer(SECRET, "ma").of_tenant("b") != Namer(SECRET, "m").of_tenant("ab"), "two names run together"


def test_a_public_prefix_is_the_head_of_a_conversation_in_whole_blocks(tokenizer: Tokenizer) -> None:
    served = model(tokenizer)
    prefix = encode_prefix("p", MESSAGE, served, Namer(SECRET, "tiny"))
    head = tokenizer.encode(f"<|im_start|>system\n{MESSAGE}<|im_end|>\n")
    assert 0 < len(prefix.tokens) == prefix.num_blocks * 16 <= len(head) < len(prefix.tokens) + 16
    assert list(prefix.tokens) == head[: len(prefix.tokens)]
    for question in ("hi", "", "\n\n", "?", "<|im_end|>"):
        messages = [{"role": "system", "content": MESSAGE}, {"role": "user", "content": question}]
        assert served.chat_template is not None
        prompt = tokenizer.encode_parts(served.chat_template.render(messages))
        assert longest_prefix(prompt, [prefix]) is prefix


@pytest.mark.parametrize(
    ("template", "text", "message"),
    [
        (None, MESSAGE, "tiny has no chat template"),
        (TEMPLATE, "short", r"is \d+ tokens long, less than one block of 16"),
        (FOLDING, MESSAGE, "less than one block"),
        (FOLDING + "{{ messages[0].content }}", MESSAGE, "does not put a system message at the head"),
        ("{{ raise_exception('a user is needed') }}", MESSAGE, "refused the messages: a user is needed"),
    ],
)
def test_a_prefix_that_nobody_could_share_is_refused(
    tokenizer: Tokenizer, template: str | None, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        encode_prefix("p", text, model(tokenizer, template), Namer(SECRET, "tiny"))
    assert str(caught.value).startswith("[public_prefixes] p: ")
    assert str(caught.value).endswith("leave it out")


def test_the_longest_prefix_that_fits_whole_is_taken() -> None:
    short, long = PublicPrefix("s", (1, 2), 1, b"s"), PublicPrefix("l", (1, 2, 3, 4), 2, b"l")
    for order in ([short, long], [long, short]):
        assert longest_prefix([1, 2, 3, 4, 5], order) is long
        assert longest_prefix((1, 2, 3, 4), order) is long
        assert longest_prefix([1, 2, 3], order) is short
        assert longest_prefix([1], order) is None
        assert longest_prefix([2, 1, 2], order) is None
    assert longest_prefix([1, 2], []) is None


def test_the_secret_is_made_once_and_is_its_owners(tmp_path: Path) -> None:
    directory = tmp_path / "state" / "pellucid"
    secret = load_secret(directory)
    assert len(secret) == SECRET_BYTES
    assert load_secret(directory) == secret
    assert load_secret(tmp_path / "other") != secret
    (file,) = directory.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    load_secret(tmp_path)
    (tmp_path / "cache-secret").chmod(mode)
    with pytest.raises(ConfigError, match=rf"cache-secret .*others \(mode {mode:04o}\); remove it"):
        load_secret(tmp_path)


def test_a_secret_of_another_size_or_place_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache-secret"
    for content in (b"", b"x" * 31, b"x" * 33):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match="does not hold 32 bytes; remove it"):
            load_secret(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot keep a secret in .*XDG_STATE_HOME"):
        load_secret(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file to somebody else")
def test_somebody_elses_secret_is_refused(tmp_path: Path) -> None:
    load_secret(tmp_path)
    os.chown(tmp_path / "cache-secret", 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to another user"):
        load_secret(tmp_path)
