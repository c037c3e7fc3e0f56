"""Tokenizers for the text tests: the default model's, and tiny ones made on the spot."""

from __future__ import annotations

import pytest
from tests.default_model import REASON, default_model_path
from tests.text.tiny import tiny_byte_level, tiny_sentencepiece

from pellucid.models.gguf_header import read_gguf_header
from pellucid.text.tokenizer import Tokenizer, tokenizer_from_gguf


@pytest.fixture(scope="session")
def smollm() -> Tokenizer:
    """The default model's tokenizer."""
    path = default_model_path()
    if path is None or not path.exists():
        pytest.skip(REASON)
    return tokenizer_from_gguf(read_gguf_header(path).metadata)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return tiny_byte_level()


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return tiny_sentencepiece()
