"""SentencePiece BPE tokenizers (Llama 2, Mistral), built from pieces and scores: no protobuf, no sentencepiece.

SentencePiece merges the pair whose joined piece scores highest; the `tokenizers` library wants the pairs in that order.
So each way of cutting a piece into two other pieces becomes a merge, ranked by the score of the whole. The pieces come
from a GGUF or from a `tokenizer.model`, of whose protocol-buffer encoding the few fields needed are read here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pellucid.core.errors import ModelError
from pellucid.text.byte_level import add_tokens, put_in_front

SPACE = "▁"  # what a space is inside a piece


class PieceType(IntEnum):
    """What a piece is; the numbers are SentencePiece's, and GGUF's `token_type` uses the same."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Pieces:
    """A SentencePiece vocabulary: three lists in id order, the special pieces and how text is prepared.

    `space_prefix`: a space is put before text. `prefix_each_part`: also before text that follows a special token, as
    llama.cpp and the older Hugging Face tokenizers do.
    """

    texts: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    bos: str | None = "<s>"
    eos: str | None = "</s>"
    space_prefix: bool = True
    prefix_each_part: bool = True


def build_sentencepiece(pieces: Pieces, *, add_bos: bool) -> Backend:
    """A tokenizer of the `tokenizers` library that gives the same ids as SentencePiece's own BPE."""
    vocab = {text: i for i, text in enumerate(pieces.texts)}
    unknown = next((t for t, kind in zip(pieces.texts, pieces.types) if kind == PieceType.UNKNOWN), None)
    has_bytes = any(kind == PieceType.BYTE for kind in pieces.types)
    backend = Backend(
        models.BPE(vocab, _merges(pieces, vocab), unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
    )
    if not pieces.space_prefix:
        backend.normalizer = normalizers.Replace(" ", SPACE)
    elif pieces.prefix_each_part:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if pieces.space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    add_tokens(backend, _added(pieces))
    if add_bos and pieces.bos is not None:
        put_in_front(backend, pieces.bos)
    return backend


def _merges(pieces: Pieces, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every cut of a piece into two pieces, best score of the whole first; among equals the lower ids first."""
    ranked = []
    for i, (text, score, kind) in enumerate(zip(pieces.texts, pieces.scores, pieces.types)):
        if kind not in (PieceType.NORMAL, PieceType.USER_DEFINED, PieceType.UNUSED):
            continue
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in vocab and right in vocab:
                ranked.append((-score, i, vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _added(pieces: Pieces) -> Iterator[AddedToken]:
    """Pieces matched in text as a whole. One with a space mark is left to the merges: it is matched before spaces are
    marked, so it would never be found."""
    for text, kind in zip(pieces.texts, pieces.types):
        if kind in (PieceType.CONTROL, PieceType.UNKNOWN):
            yield AddedToken(text, special=True, normalized=False)
        elif kind == PieceType.USER_DEFINED and SPACE not in text:
            yield AddedToken(text, special=False, normalized=False)


# Field numbers of sentencepiece_model.proto.
_MODEL_PIECE, _MODEL_TRAINER, _MODEL_NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_TYPE = 1, 2, 3
_TRAINER_TYPE, _TRAINER_BOS, _TRAINER_EOS = 3, 41, 42
_NORMALIZER_NAME, _NORMALIZER_PREFIX, _NORMALIZER_SQUEEZE = 1, 3, 4
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


def read_tokenizer_model(path: Path) -> Pieces:
    """The vocabulary in a SentencePiece `tokenizer.model`. Raises ModelError for one that is not BPE, that rewrites
    text (an `nmt_nfkc` normalizer, squeezed spaces), or that cannot be read."""
    texts: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, int | float | bytes] = {}
    normalizer: dict[int, int | float | bytes] = {}
    try:
        for field, value in _fields(path.read_bytes()):
            if field == _MODEL_PIECE:
                piece = dict(_fields(value))
                texts.append(_bytes(piece.get(_PIECE_TEXT, b"")).decode("utf-8"))
                scores.append(float(piece.get(_PIECE_SCORE, 0.0)))
                types.append(int(piece.get(_PIECE_TYPE, PieceType.NORMAL)))
            elif field == _MODEL_TRAINER:
                trainer = dict(_fields(value))
            elif field == _MODEL_NORMALIZER:
                normalizer = dict(_fields(value))
    except (ValueError, TypeError, IndexError, struct.error) as error:
        raise ModelError(f"{path} is not a SentencePiece model, or is truncated ({error})") from None
    kind = _MODEL_TYPES.get(int(trainer.get(_TRAINER_TYPE, 1)), "unknown")
    if not texts or kind != "bpe":
        raise ModelError(f"{path} is a SentencePiece {kind} model of {len(texts)} pieces; BPE is supported")
    name = _bytes(normalizer.get(_NORMALIZER_NAME, b"identity")).decode() or "identity"
    if name != "identity" or normalizer.get(_NORMALIZER_SQUEEZE, 1):
        raise ModelError(
            f"{path} rewrites text before it tokenizes it (normalizer {name!r}), which is not supported; "
            f"put the model's tokenizer.json beside it"
        )
    pieces = Pieces(texts, scores, types, space_prefix=bool(normalizer.get(_NORMALIZER_PREFIX, 1)))
    return replace(
        pieces,
        bos=_piece_at(pieces, _signed(int(trainer.get(_TRAINER_BOS, 1)))),
        eos=_piece_at(pieces, _signed(int(trainer.get(_TRAINER_EOS, 2)))),
    )


def _piece_at(pieces: Pieces, index: int) -> str | None:
    return pieces.texts[index] if 0 <= index < len(pieces.texts) else None


def _signed(value: int) -> int:
    """A protocol-buffer int32, which travels as an unsigned varint of 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _bytes(value: int | float | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("a number where text was expected")
    return value


def _fields(message: int | float | bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """The (field number, value) pairs of one protocol-buffer message, nested messages as bytes."""
    data = _bytes(message)
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        field, wire = tag >> 3, tag & 7
        value: int | float | bytes
        if wire == 0:
            value, at = _varint(data, at)
        elif wire == 5:
            (value,) = struct.unpack_from("<f", data, at)
            at += 4
        elif wire == 1:
            (value,) = struct.unpack_from("<d", data, at)
            at += 8
        elif wire == 2:
            length, at = _varint(data, at)
            value = data[at : at + length]
            if len(value) < length:
                raise ValueError(f"the data ends within field {field}")
            at += length
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        yield field, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
