"""`--tokenizer` of the trace and bench commands: from a word to a function from text to token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pellucid.core.errors import ModelError

HELP = (
    "How text becomes tokens: a tokenizer.json, a model as `serve` takes it, or 'bytes' (every UTF-8 byte is a token)."
)


def encoder(name: str | None) -> Callable[[str], Sequence[int]] | None:
    """The encoding function of this name (None for None). No beginning-of-text token is added.

    Raises ModelError for a file that is no tokenizer or a model that has none.
    """
    if name is None:
        return None
    if name == "bytes":
        return lambda text: text.encode()
    if name.endswith(".json"):
        if not Path(name).is_file():
            raise ModelError(f"--tokenizer {name}: no such file")
        return _from_file(name)
    from pellucid.build import load_model

    tokenizer = load_model(name).tokenizer
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def _from_file(path: str) -> Callable[[str], Sequence[int]]:
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception for any defect of the file
        raise ModelError(f"--tokenizer {path}: not a tokenizer.json ({error})") from None
    return lambda text: list(backend.encode(text, add_special_tokens=False).ids)
