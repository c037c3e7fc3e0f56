"""Every origin of a tokenizer gives the ids it should, and every other is refused by name."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.tiny import CORPUS, tiny_gguf_metadata, tiny_pieces, tiny_sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

import pellucid
from pellucid.core.errors import ModelError
from pellucid.text.byte_level import PRE_TOKENIZERS, build_byte_level
from pellucid.text.sentencepiece import Pieces, PieceType, build_sentencepiece, read_tokenizer_model
from pellucid.text.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf

SAMPLE = "It's 2024: I'LL pay   $1234!\n\n  Ünïcode 中文字 x_y\tEND\r\n"

# Cut by hand from the definition of each pre-tokenizer; a piece that begins with a space is one with its word.
CUTS = {
    "gpt-2": [
        "It",
        "'s",
        " 2024",
        ":",
        " I",
        "'",
        "LL",
        " pay",
        "  ",
        " $",
        "1234",
        "!",
        "\n\n ",
        " Ünïcode",
        " 中文字",
    ],
    "smollm": ["It", "'s", " ", "2", "0", "2", "4", ":", " I", "'", "LL", " pay", "  ", " $", "1", "2", "3", "4", "!"],
    "llama-bpe": [
        "It",
        "'s",
        " ",
        "202",
        "4",
        ":",
        " I",
        "'LL",
        " pay",
        "  ",
        " $",
        "123",
        "4",
        "!\n\n",
        " ",
        " Ünïcode",
    ],
    "qwen2": ["It", "'s", " ", "2", "0", "2", "4", ":", " I", "'LL", " pay", "  ", " $", "1", "2", "3", "4", "!\n\n"],
    "tekken": ["It", "'s", " ", "2", "0", "2", "4", ":", " I", "'LL", " pay", "  ", " $", "1", "2", "3", "4", "!\n\n"],
}


@pytest.mark.parametrize("name", CUTS)
def test_pre_tokenizers_cut_where_they_should(name: str) -> None:
    alphabet = {character: i for i, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    backend = build_byte_level(alphabet, [], PRE_TOKENIZERS[name])
    pieces = [SAMPLE[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(SAMPLE)]
    assert pieces[: len(CUTS[name])] == CUTS[name]
    assert "".join(pieces) == SAMPLE


def test_unknown_pre_tokenizers_are_refused_by_name() -> None:
    metadata = tiny_gguf_metadata()
    with pytest.raises(ModelError, match=r"'mystery'; known are gpt-2, smollm"):
        tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": "mystery"})
    del metadata["tokenizer.ggml.pre"]
    with pytest.raises(ModelError, match=r"an old conversion"):
        tokenizer_from_gguf(metadata)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.model": "t5"}, "of kind 't5'"),
        ({"tokenizer.ggml.model": None}, "no tokenizer"),
        ({"tokenizer.ggml.tokens": []}, "no tokenizer"),
        ({"tokenizer.ggml.model": "llama"}, "without scores"),
        ({"tokenizer.ggml.merges": ["x"]}, "merge without two sides"),
        ({"tokenizer.ggml.merges": ["nosuch token"]}, "do not fit its vocabulary"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, None),
    ],
)
def test_broken_gguf_tokenizers(change: dict[str, object], words: str | None) -> None:
    metadata = tiny_gguf_metadata() | change
    if words is None:  # a tokenizer that should add a bos it does not have adds none
        assert tokenizer_from_gguf(metadata).encode("") == []
        return
    with pytest.raises(ModelError, match=words):
        tokenizer_from_gguf(metadata, "tiny.gguf")


def test_special_tokens_are_parsed_in_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|im_start|>the<|im_end|><tool>")
    assert (ids[0], ids[-2], ids[-1]) == (1, 2, 3)
    assert byte_level.decode(ids) == "<|im_start|>the<|im_end|><tool>"
    assert byte_level.decode(ids, skip_special_tokens=True) == "the<tool>"
    assert byte_level.special_ids == {0, 1, 2}


def test_parts_never_join(byte_level: Tokenizer) -> None:
    whole = byte_level.encode("<|im_start|>")
    parts = byte_level.encode_parts(["<", "|im_start|>"])
    assert whole == [1]
    assert 1 not in parts
    assert byte_level.decode(parts) == "<|im_start|>"
    assert byte_level.encode_parts(["the", ""]) == byte_level.encode("the")


def test_bos_is_there_exactly_once() -> None:
    tokenizer = tokenizer_from_gguf(tiny_gguf_metadata(add_bos=True))
    bos = tokenizer.bos_token
    assert tokenizer.encode("the")[:1] == [1]
    assert tokenizer.encode(f"{bos}the") == tokenizer.encode("the")
    assert tokenizer.encode(f"{bos}{bos}the")[:2] == [1, 1]
    assert tokenizer.encode_parts(["the", "the", "the"]).count(1) == 1
    assert 1 not in tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode(f"{bos}{bos}the", add_special_tokens=False)[:2] == [1, 1]
    without = tokenizer_from_gguf(tiny_gguf_metadata())
    assert without.encode(f"{bos}{bos}the")[:2] == [1, 1]


def test_ids_outside_the_vocabulary_are_empty(byte_level: Tokenizer) -> None:
    assert byte_level.token_bytes(10**6) == b""


@given(text=st.text())
def test_byte_level_round_trip(text: str) -> None:
    tokenizer = BYTE_LEVEL
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text())
def test_sentencepiece_round_trip(text: str) -> None:
    if "▁" in text:  # the mark itself reads back as a space, in SentencePiece too
        return
    ids = SENTENCEPIECE.encode(text)
    assert SENTENCEPIECE.decode(ids, skip_special_tokens=True) == text


BYTE_LEVEL = tokenizer_from_gguf(tiny_gguf_metadata())
SENTENCEPIECE = tiny_sentencepiece()


def naive_sentencepiece(text: str, pieces: Pieces) -> list[int]:
    """SentencePiece's BPE by its definition: join the neighbours whose joined piece scores best, leftmost first."""
    ids = {piece: i for i, piece in enumerate(pieces.texts)}
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joins = [(-pieces.scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in ids]
        if not joins:
            break
        _, i = min(joins)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    found: list[int] = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


@given(text=st.text(alphabet="thean ilo.中é\n", max_size=30))
def test_sentencepiece_merges_by_score(text: str) -> None:
    assert SENTENCEPIECE.encode(text, add_special_tokens=False) == naive_sentencepiece(text, tiny_pieces())


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def tokenizer_model_bytes(pieces: Pieces, *, kind: int = 2, normalizer: bytes = b"identity") -> bytes:
    """`pieces` in SentencePiece's own file format."""
    out = b""
    for text, score, piece_type in zip(pieces.texts, pieces.scores, pieces.types):
        data = text.encode()
        piece = b"\x0a" + varint(len(data)) + data + b"\x15" + struct.pack("<f", score) + b"\x18" + varint(piece_type)
        out += b"\x0a" + varint(len(piece)) + piece
    trainer = b"\x18" + varint(kind)
    rules = b"\x0a" + varint(len(normalizer)) + normalizer + b"\x18\x01\x20\x00"
    return out + b"\x12" + varint(len(trainer)) + trainer + b"\x1a" + varint(len(rules)) + rules


def test_tokenizer_model_reads_as_written(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(tokenizer_model_bytes(tiny_pieces()))
    pieces = read_tokenizer_model(path)
    assert (pieces.texts, pieces.scores, pieces.types) == (
        tiny_pieces().texts,
        tiny_pieces().scores,
        tiny_pieces().types,
    )
    assert (pieces.bos, pieces.eos) == ("<s>", "</s>")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}, "legacy": false}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("the hello") == SENTENCEPIECE.encode("the hello")
    # legacy puts a space before text that follows a special token; otherwise only the very first gets one
    assert tokenizer.decode(tokenizer.encode("a</s>the")) == "<s> a</s>the"
    assert SENTENCEPIECE.decode(SENTENCEPIECE.encode("a</s>the")) == "<s> a</s> the"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (tokenizer_model_bytes(tiny_pieces(), kind=1), "unigram model"),
        (tokenizer_model_bytes(tiny_pieces(), normalizer=b"nmt_nfkc"), "rewrites text"),
        (tokenizer_model_bytes(tiny_pieces())[:1000], "truncated"),
        (b"\xff\xff\xff", "not a SentencePiece model"),
        (b"", "of 0 pieces"),
    ],
)
def test_tokenizer_models_that_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ModelError, match=words):
        load_tokenizer(tmp_path)


def test_vocab_and_merges_files_equal_tokenizer_json(tmp_path: Path) -> None:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=350, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.model.save(str(tmp_path))
    config = {
        "tokenizer_class": "GPT2TokenizerFast",
        "eos_token": "<|endoftext|>",
        "added_tokens_decoder": {str(backend.get_vocab_size()): {"content": "<|endoftext|>", "special": True}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(SAMPLE) == backend.encode(SAMPLE).ids
    assert tokenizer.encode("<|endoftext|>") == [backend.get_vocab_size()]
    assert tokenizer.vocab_size == backend.get_vocab_size() + 1
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "MarianTokenizer"}')
    with pytest.raises(ModelError, match="class 'MarianTokenizer'; supported are GPT2Tokenizer, Qwen2Tokenizer"):
        load_tokenizer(tmp_path)


def test_directories_without_a_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer; supported are tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as a tokenizer"):
        load_tokenizer(tmp_path)
    Backend(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="byte-level BPE and SentencePiece are supported"):
        load_tokenizer(tmp_path)


def test_default_model(smollm: Tokenizer) -> None:
    assert smollm.vocab_size == 49152
    assert (smollm.bos_token, smollm.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm.encode("<|im_start|>Hello 2024 world") == [1, 19556, 216, 34, 32, 34, 36, 905]
    assert smollm.decode(smollm.encode(SAMPLE)) == SAMPLE


def test_loading_a_gguf_tokenizer_imports_nothing_heavy() -> None:
    code = (
        "import sys; from pellucid.models.gguf_header import read_gguf_header; import pellucid.text.tokenizer, "
        "pellucid.text.chat_template, pellucid.text.detokenizer, pellucid.text.stop, pellucid.models.sources; "
        "print([m for m in ('torch', 'transformers', 'numpy', 'gguf', 'huggingface_hub') if m in sys.modules])"
    )
    source = str(Path(pellucid.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": source}
    )
    assert done.stdout.strip() == "[]"


def test_piece_types_are_those_of_gguf() -> None:
    assert [kind.value for kind in PieceType] == [1, 2, 3, 4, 5, 6]
    assert build_sentencepiece(tiny_pieces(), add_bos=False).encode("").ids == []
