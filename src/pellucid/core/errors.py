"""Errors that a caller can act on. Each message says what was found and what to change, in one line."""

from __future__ import annotations


class PellucidError(Exception):
    """Base of every error whose message is meant for the user. Commands print it as one line and exit with 2."""


class ConfigError(PellucidError):
    """A configuration value that cannot work, found while the configuration is built."""


class RequestRejected(PellucidError):
    """A request that can never be served by this engine, refused when it is added.

    `code` is a stable machine-readable word; the numbers are in the message.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class IllegalTransition(PellucidError):
    """A sequence was asked to change to a status that its present status does not lead to."""


class InvariantViolation(AssertionError):
    """A conservation law of the core does not hold. Always a bug of ours, never of the user."""


class EngineDead(PellucidError):
    """The engine is gone; the message says why. Every open request receives this."""


class ModelError(PellucidError):
    """A model that cannot be loaded: path, file, architecture or tokenizer. The message names what is supported."""
