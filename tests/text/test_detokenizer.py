"""Text comes out whole characters at a time, and all of it, however the ids arrive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.tiny import tiny_byte_level, tiny_sentencepiece

from pellucid.text.detokenizer import Detokenizer
from pellucid.text.tokenizer import Tokenizer

TOKENIZERS = {"byte-level": tiny_byte_level(), "sentencepiece": tiny_sentencepiece()}
TEXTS = [
    "今天天气很好，我们去公园散步。",
    "family 👩‍👩‍👧‍👦 flag 🏴󠁧󠁢󠁳󠁣󠁴󠁿 skin 👍🏽 done",
    "e\u0301 a\u0308\u0323 नमस्ते 각하 ",
    "한국어 음절이 사라지지 않는다",
]


@st.composite
def id_chunks(draw: st.DrawFn, vocab_size: int) -> list[list[int]]:
    return draw(st.lists(st.lists(st.integers(0, vocab_size + 3), max_size=4), max_size=12))


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_pieces_are_the_decoding_of_all(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    chunks = data.draw(id_chunks(tokenizer.vocab_size))
    for skip in (True, False):
        stream = Detokenizer(tokenizer, skip_special_tokens=skip)
        text = "".join(stream.push(chunk) for chunk in chunks) + stream.flush()
        whole = tokenizer.decode([i for chunk in chunks for i in chunk], skip_special_tokens=skip)
        if kind == "sentencepiece":  # text that goes on keeps the space that starts it
            text = text.removeprefix(" ")
        assert text == whole


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_no_half_characters(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = Detokenizer(tokenizer)
    pieces = [stream.push([i]) for i in ids]
    assert not any("�" in piece for piece in pieces)
    assert stream.flush() == ""
    assert "".join(pieces).removeprefix(" " if kind == "sentencepiece" else "") == text


def test_every_cut_of_a_character_is_held_back_and_flushed_once(byte_level: Tokenizer) -> None:
    for character in "é中👍":
        size = len(character.encode())
        ids = [i for byte in character.encode() for i in _ids_of_byte(byte_level, byte)]
        assert len(ids) == size
        for cut in range(1, size):
            stream = Detokenizer(byte_level)
            assert stream.push(ids[:cut]) == ""
            assert stream.flush() == "�"
            assert stream.flush() == ""


def _ids_of_byte(tokenizer: Tokenizer, byte: int) -> list[int]:
    return [next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte]))]


def test_agrees_with_the_library_on_real_text(smollm: Tokenizer) -> None:
    for text in TEXTS:
        ids = smollm.encode(text)
        stream = Detokenizer(smollm)
        assert "".join(stream.push([i]) for i in ids) + stream.flush() == text
        assert smollm.decode(ids) == smollm._backend.decode(ids)
