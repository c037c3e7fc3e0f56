"""The tokenizer of the server's tests."""

from tests.server.conftest import tokenizer as tokenizer
