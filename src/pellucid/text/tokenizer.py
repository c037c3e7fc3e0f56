"""Text to token ids and back, over the `tokenizers` library.

One face for every origin: a `tokenizer.json`, a SentencePiece `tokenizer.model`, `vocab.json` with `merges.txt`, or the
metadata of a GGUF (all converted here in a fraction of a second; nothing is cached and transformers is not needed).

Invariants:
- `decode(ids)` is the UTF-8 decoding of the concatenated `token_bytes(id)`, so decoding piece by piece (see
  `detokenizer.py`) and at once agree for every sequence of ids.
- A text gets the beginning-of-text token exactly once if the tokenizer adds one, whether or not the text (a rendered
  chat template, a hand-written prompt) already begins with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pellucid.core.errors import ModelError
from pellucid.text.byte_level import (
    PRE_TOKENIZERS,
    build_byte_level,
    byte_of_character,
    find_pre_tokenizer,
)
from pellucid.text.sentencepiece import SPACE, Pieces, PieceType, build_sentencepiece, read_tokenizer_model

SUPPORTED = "tokenizer.json, tokenizer.model (SentencePiece BPE), or vocab.json with merges.txt"
_SLOW_CLASSES = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}


class Tokenizer:
    """Encodes and decodes. Safe to use from several threads: nothing about it changes after it is built."""

    def __init__(self, backend: Backend, *, bos_token: str | None = None, eos_token: str | None = None) -> None:
        """`bos_token` and `eos_token` are what a chat template may ask for; whether bos is added to text is the
        backend's own rule. Raises ModelError for a kind of tokenizer whose tokens cannot be turned into bytes."""
        self._backend = backend
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        front = backend.encode("").ids
        self._front_id = front[0] if front else None
        added = backend.get_added_tokens_decoder()
        self._literal = {i: token.content.encode() for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_texts = tuple(token.content for token in added.values() if token.special)
        self._byte_level, self._strips_space = _decoding_rule(backend)
        self._byte_of = byte_of_character() if self._byte_level else {}
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`. The text of a special token in it becomes that token. `add_special_tokens` lets the
        tokenizer put its beginning-of-text token in front. The interpreter lock is released meanwhile."""
        return self.encode_parts([text], add_special_tokens=add_special_tokens)

    def encode_parts(self, parts: Sequence[str], *, add_special_tokens: bool = True) -> list[int]:
        """The ids of the parts one after the other: no token, special or other, reaches from one into the next."""
        ids: list[int] = self._backend.encode_batch_fast(parts[:1], add_special_tokens=add_special_tokens)[0].ids
        for encoding in self._backend.encode_batch_fast(parts[1:], add_special_tokens=False):
            ids.extend(encoding.ids)
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self._front_id:
            del ids[0]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `ids`. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary are empty."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._strips_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; a special token's are its own text."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._make_bytes(token_id)
        return found

    def _make_bytes(self, token_id: int) -> bytes:
        if token_id in self._literal:
            return self._literal[token_id]
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes(self._byte_of[character] for character in token)
            except KeyError:  # a token that was never byte-level stands for its own text
                return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace(SPACE, " ").encode()


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a model directory in the Hugging Face layout. Raises ModelError where none is found or it cannot
    be used, naming what is supported."""
    directory = Path(directory)
    config = _read_json(directory / "tokenizer_config.json") if (directory / "tokenizer_config.json").exists() else {}
    bos, eos = _token_text(config.get("bos_token")), _token_text(config.get("eos_token"))
    if (directory / "tokenizer.json").exists():
        path = directory / "tokenizer.json"
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise ModelError(f"{path} cannot be read as a tokenizer: {error}") from None
        return Tokenizer(backend, bos_token=bos, eos_token=eos)
    if (directory / "tokenizer.model").exists():
        # "legacy" is Hugging Face's word for putting a space also before text that follows a special token
        pieces = read_tokenizer_model(directory / "tokenizer.model")
        pieces = replace(pieces, prefix_each_part=config.get("legacy", True))
        backend = build_sentencepiece(pieces, add_bos=config.get("add_bos_token", True))
        return Tokenizer(backend, bos_token=bos or pieces.bos, eos_token=eos or pieces.eos)
    if (directory / "vocab.json").exists() and (directory / "merges.txt").exists():
        return Tokenizer(_from_merges_file(directory, config), bos_token=bos, eos_token=eos)
    raise ModelError(f"{directory} has no tokenizer; supported are {SUPPORTED}")


def tokenizer_from_gguf(metadata: Mapping[str, Any], origin: str = "the GGUF file") -> Tokenizer:
    """The tokenizer that a GGUF's metadata describes. `origin` names the file in errors. Raises ModelError for a
    tokenizer model other than `gpt2` (byte-level BPE) and `llama` (SentencePiece BPE), or an unknown pre-tokenizer."""
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if model not in ("gpt2", "llama") or not tokens:
        found = "no tokenizer" if model is None or not tokens else f"a tokenizer of kind {model!r}"
        raise ModelError(f"{origin} has {found}; supported are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)")
    types = metadata.get("tokenizer.ggml.token_type") or [int(PieceType.NORMAL)] * len(tokens)
    bos, eos = (_gguf_special(metadata, tokens, name) for name in ("bos", "eos"))
    if model == "llama":
        scores = metadata.get("tokenizer.ggml.scores")
        if not scores:
            raise ModelError(f"{origin} has a SentencePiece tokenizer without scores; convert the model again")
        space = metadata.get("tokenizer.ggml.add_space_prefix", True)
        pieces = Pieces(tokens, scores, types, bos, eos, space_prefix=space)
        backend = build_sentencepiece(pieces, add_bos=metadata.get("tokenizer.ggml.add_bos_token", True))
        return Tokenizer(backend, bos_token=bos, eos_token=eos)
    cut = find_pre_tokenizer(metadata.get("tokenizer.ggml.pre"), origin)
    merges = [_pair(line) for line in metadata.get("tokenizer.ggml.merges", ())]
    vocab = {token: i for i, token in enumerate(tokens)}
    added = [
        AddedToken(token, special=kind != PieceType.USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types)
        if kind in (PieceType.CONTROL, PieceType.UNKNOWN, PieceType.USER_DEFINED)
    ]
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", cut.adds_bos)
    backend = build_byte_level(vocab, merges, cut, added=added, bos=bos if adds_bos else None)
    return Tokenizer(backend, bos_token=bos, eos_token=eos)


def _from_merges_file(directory: Path, config: Mapping[str, Any]) -> Backend:
    """vocab.json and merges.txt say nothing of how text is cut: the tokenizer's class does."""
    name = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    if name not in _SLOW_CLASSES:
        raise ModelError(
            f"{directory} has vocab.json and merges.txt of a tokenizer of class {name or 'unknown'!r}; supported are "
            f"{', '.join(_SLOW_CLASSES)}: put the model's tokenizer.json beside them"
        )
    cut = PRE_TOKENIZERS[_SLOW_CLASSES[name]]
    lines = (directory / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [_pair(line) for line in lines if line and not line.startswith("#version")]
    vocab = _read_json(directory / "vocab.json")
    entries = sorted((int(i), entry) for i, entry in config.get("added_tokens_decoder", {}).items())
    added = [
        AddedToken(entry["content"], special=entry.get("special", False), normalized=entry.get("normalized", False))
        for _, entry in entries
    ]
    vocab |= {entry["content"]: i for i, entry in entries}
    return build_byte_level(vocab, merges, cut, added=added)


def _pair(merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not separator:
        raise ModelError(f"the tokenizer has a merge without two sides: {merge!r}")
    return left, right


def _gguf_special(metadata: Mapping[str, Any], tokens: Sequence[str], name: str) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[index] if index is not None and 0 <= index < len(tokens) else None


def _token_text(entry: object) -> str | None:
    """tokenizer_config.json writes a token as its text or as an object with `content`."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def _decoding_rule(backend: Backend) -> tuple[bool, bool]:
    """Whether tokens are byte-level, and whether decoding takes a space off the front of a text."""
    state = b"null" if backend.decoder is None else backend.decoder.__getstate__()
    decoder = json.loads(state) or {}
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        return True, False
    if "ByteFallback" in kinds:
        return False, any(step.get("type") == "Strip" and step.get("start") for step in steps)
    if kinds == ["Metaspace"]:
        return False, steps[0].get("prepend_scheme") != "never"
    raise ModelError(f"the tokenizer decodes by {kinds}; byte-level BPE and SentencePiece are supported")
