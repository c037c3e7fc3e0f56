"""Tiny tokenizers made in memory, in the form that model files carry them."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from pellucid.text.sentencepiece import Pieces, PieceType, build_sentencepiece
from pellucid.text.tokenizer import Tokenizer, tokenizer_from_gguf

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs!",
    "def add(first, second):\n    return first + second\n\n\nprint(add(1234, 5678))",
    "the theory of the thing is that they're there, and it's theirs",
    "今天天气很好，我们去公园散步。 Les élèves été où naïve façade.",
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tiny_gguf_metadata(pre: str = "smollm", *, add_bos: bool = False) -> dict[str, Any]:
    """The tokenizer of a GGUF: byte-level BPE with three special tokens and one user-defined."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[*SPECIALS, "<tool>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    vocab = backend.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    types = [PieceType.CONTROL] * len(SPECIALS) + [PieceType.USER_DEFINED]
    types += [PieceType.NORMAL] * (len(tokens) - len(types))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.merges": merges_of(backend),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": add_bos,
    }


def merges_of(backend: Backend) -> list[str]:
    """The merges of a trained BPE, one line each."""
    return [" ".join(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]


def tiny_byte_level() -> Tokenizer:
    return tokenizer_from_gguf(tiny_gguf_metadata())


def tiny_pieces() -> Pieces:
    """A SentencePiece vocabulary: three special pieces, 256 bytes, some letters and words."""
    words = ["▁t", "he", "▁the", "▁a", "an", "▁an", "in", "▁in", "er", "ll", "▁he", "▁hell", "▁hello", "o▁", "▁▁"]
    letters = list("▁etaoinshrdlcumwfgypbvk.,!?\n中")
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    special = [PieceType.UNKNOWN, PieceType.CONTROL, PieceType.CONTROL]
    types = special + [PieceType.BYTE] * 256 + [PieceType.NORMAL] * (len(texts) - 259)
    scores = [0.0] * 259 + [-float(i * 7 % 31) for i in range(len(texts) - 259)]  # not in the order of ids
    return Pieces(texts, scores, [int(kind) for kind in types])


def tiny_sentencepiece() -> Tokenizer:
    return Tokenizer(build_sentencepiece(tiny_pieces(), add_bos=True), bos_token="<s>", eos_token="</s>")
