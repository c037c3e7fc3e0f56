"""Token ids to text as they come, one stream at a time.

A token is bytes, not characters: a Chinese character or an emoji may be spread over several tokens. Bytes go through an
incremental UTF-8 decoder, which holds back the at most three bytes of a character that is not complete yet.

Invariants: what has been returned never changes; no half of a character is ever returned, nor U+FFFD for one that may
still be completed; all `push`es and the `flush` together are the decoding of all ids at once; the work per token does
not depend on how many came before.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from pellucid.text.tokenizer import Tokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one sequence that goes on from a prompt, so a first space is text and stays."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = _new_decoder(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete; often those of the tokens, sometimes none."""
        data = b"".join([self._bytes_of(i) for i in token_ids if i not in self._skipped])
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left when no token follows: U+FFFD where the last character is incomplete, else nothing."""
        return self._decoder.decode(b"", final=True)
