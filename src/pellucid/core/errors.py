"""Errors that a caller can act on. Each message says what was found and what to change, in one line."""

from __future__ import annotations

from typing import Literal

RejectingLimit = Literal["tenant", "machine"]


class PellucidError(Exception):
    """Base of every error whose message is meant for the user. Commands print it as one line and exit with 2."""


class ConfigError(PellucidError):
    """A configuration value that cannot work, found while the configuration is built."""


class RequestRejected(PellucidError):
    """A request that is refused when it is added: it can never be served by this engine, or not now.

    `code` is a stable machine-readable word; the numbers are in the message. `retry_after` is None for what can never
    be served, else the seconds after which asking again makes sense; `limit` then says whose bound it was.
    """

    def __init__(
        self, code: str, message: str, *, retry_after: float | None = None, limit: RejectingLimit | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after
        self.limit = limit


class IllegalTransition(PellucidError):
    """A sequence was asked to change to a status that its present status does not lead to."""


class InvariantViolation(AssertionError):
    """A conservation law of the core does not hold. Always a bug of ours, never of the user."""


class EngineDead(PellucidError):
    """The engine is gone; the message says why. Every open request receives this."""


class ModelError(PellucidError):
    """A model that cannot be loaded: path, file, architecture or tokenizer. The message names what is supported."""
