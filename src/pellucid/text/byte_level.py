"""Byte-level BPE tokenizers (GPT-2's scheme), built from a vocabulary and a list of merges.

What a vocabulary file leaves out is how text is cut before merging, and two models with the same vocabulary and another
cut give other tokens. GGUF names the cut (`tokenizer.ggml.pre`); `PRE_TOKENIZERS` holds those that are known here
exactly, and any other name is refused rather than approximated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from pellucid.core.errors import ModelError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2 = rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)


class PreTokenizer(NamedTuple):
    """How text is cut before merging.

    `pattern`: a regular expression whose matches are the pieces; None for GPT-2's own. `single_digits`: each digit is
    cut off first. `whole_words`: a piece that is itself in the vocabulary is taken as it is, whatever the merges say.
    `nfc`: text is composed first. `adds_bos`: what a GGUF without `add_bos_token` means.
    """

    pattern: str | None = None
    single_digits: bool = False
    whole_words: bool = False
    nfc: bool = False
    adds_bos: bool = False


_LLAMA3_CUT = PreTokenizer(_LLAMA3, whole_words=True, adds_bos=True)
_DIGITS_CUT = PreTokenizer(single_digits=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(),
    "smollm": _DIGITS_CUT,
    "starcoder": _DIGITS_CUT,
    "refact": _DIGITS_CUT,
    "codeshell": _DIGITS_CUT,
    "exaone": _DIGITS_CUT,
    "minerva-7b": _DIGITS_CUT,
    "llama-bpe": _LLAMA3_CUT,
    "llama3": _LLAMA3_CUT,
    "llama-v3": _LLAMA3_CUT,
    "falcon3": _LLAMA3_CUT,
    "qwen2": PreTokenizer(_QWEN2, nfc=True),
    "deepseek-r1-qwen": PreTokenizer(_QWEN2),
    "tekken": PreTokenizer(_TEKKEN, whole_words=True, adds_bos=True),
}


def find_pre_tokenizer(name: str | None, origin: str) -> PreTokenizer:
    """The pre-tokenizer called `name`; ModelError naming the known ones for another. `origin` names the file."""
    if name is not None and name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    found = "no tokenizer.ggml.pre (an old conversion)" if name is None else f"tokenizer.ggml.pre = {name!r}"
    raise ModelError(f"{origin} has {found}; known are {', '.join(PRE_TOKENIZERS)}: convert the model again")


def build_byte_level(
    vocab: Mapping[str, int],
    merges: list[tuple[str, str]],
    cut: PreTokenizer,
    *,
    added: Iterable[AddedToken] = (),
    bos: str | None = None,
) -> Backend:
    """A tokenizer of the `tokenizers` library. `added` are matched in text before anything else; `bos`, where given,
    is put in front of every encoded text. Raises ModelError where merges and vocabulary do not fit together."""
    try:
        backend = Backend(models.BPE(dict(vocab), merges, ignore_merges=cut.whole_words))
    except Exception as error:  # the library raises a bare Exception
        raise ModelError(f"the tokenizer's merges do not fit its vocabulary: {error}") from None
    if cut.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if cut.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if cut.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(cut.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    add_tokens(backend, added)
    if bos is not None:
        put_in_front(backend, bos)
    return backend


def add_tokens(backend: Backend, added: Iterable[AddedToken]) -> None:
    """Register tokens that are matched in text as a whole, special ones and others."""
    tokens = list(added)
    backend.add_special_tokens([token for token in tokens if token.special])
    backend.add_tokens([token for token in tokens if not token.special])


def put_in_front(backend: Backend, bos: str) -> None:
    """Make `backend` put `bos` before every text it encodes."""
    token_id = backend.token_to_id(bos)
    if token_id is None:
        raise ModelError(f"the beginning-of-text token {bos!r} is not in the tokenizer's vocabulary")
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 $B:1", special_tokens=[(bos, token_id)]
    )


def byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for: printable Latin-1 characters stand for
    themselves, the other 68 bytes are moved to U+0100 and up, in order (the scheme of GPT-2's encoder)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(moved)})
    return table
