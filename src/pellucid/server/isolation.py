"""Which prompts may share cached blocks: namespaces that only this server can name, and the exceptions it was told.

A shared prefix cache answers faster where somebody sent the same prompt before, so with one namespace for all, a tenant
could find out by a stopwatch what another one asked (CVE-2025-46570). Here a request's namespace is a keyed hash of its
tenant's name and the model's, never of anything a client sends, and the key is a secret of this machine's user.

A public prefix is a system message that the operator declared: rendered and tokenized as it stands at the head of a
conversation, cut down to whole blocks. A prompt that begins with exactly those tokens, of a tenant that may use it,
finds these blocks in a namespace that all such tenants share; from the first block after them it is alone.
"""

from __future__ import annotations

import os
import secrets
import stat
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from pellucid.core.errors import ConfigError, RequestRejected
from pellucid.server.config import ServedModel

SECRET_NAME = "cache-secret"
SECRET_BYTES = 32
NAMESPACE_BYTES = 16


class Namespace(NamedTuple):
    """Where a prompt's blocks are looked for: the fields of `core.request.Request` by these names."""

    cache_key: bytes = b""
    public_key: bytes = b""
    num_public_blocks: int = 0


@dataclass(frozen=True, slots=True)
class PublicPrefix:
    """`tokens` fill `num_blocks` whole blocks under `key`."""

    name: str
    tokens: tuple[int, ...]
    num_blocks: int
    key: bytes


class Namer:
    """Names namespaces of one model with a secret; equal secrets give equal names."""

    def __init__(self, secret: bytes, model: str) -> None:
        self._secret, self._model = secret, model

    def of_tenant(self, tenant: str) -> bytes:
        """The namespace of everything that this tenant alone sent."""
        return self._name(b"tenant", tenant.encode())

    def of_prefix(self, name: str, tokens: Sequence[int]) -> bytes:
        """The namespace of a public prefix; another text under the same name is another namespace."""
        return self._name(b"public", name.encode(), array("q", tokens).tobytes())

    def _name(self, kind: bytes, *parts: bytes) -> bytes:
        """Each part goes in behind its length, so that no two lists of parts run together to the same bytes."""
        state = blake2b(key=self._secret, digest_size=NAMESPACE_BYTES, person=kind)
        for part in (self._model.encode(), *parts):
            state.update(len(part).to_bytes(8, "little") + part)
        return state.digest()


def encode_prefix(name: str, text: str, served: ServedModel, namer: Namer) -> PublicPrefix:
    """The system message `text` as the head of a conversation with this model. Raises ConfigError where the model has
    no such head, or one shorter than a block."""
    where = f"[public_prefixes] {name}"
    if served.chat_template is None:
        raise ConfigError(
            f"{where}: {served.name} has no chat template, so no conversation begins with it; leave it out"
        )
    system = {"role": "system", "content": text}
    try:
        alone = served.chat_template.render([system], add_generation_prompt=False)
        followed = served.chat_template.render([system, {"role": "user", "content": "?"}])
    except RequestRejected as error:
        raise ConfigError(f"{where}: {error}; leave it out") from None
    encode = served.tokenizer.encode_parts
    block_size = served.limits.block_size
    ids = encode(alone)
    num_blocks = len(ids) // block_size
    tokens = tuple(ids[: num_blocks * block_size])
    if num_blocks == 0:
        raise ConfigError(
            f"{where}: it is {len(ids)} tokens long, less than one block of {block_size}, so that there is nothing to "
            f"share; leave it out"
        )
    if tuple(encode(followed)[: len(tokens)]) != tokens:
        raise ConfigError(
            f"{where}: the chat template of {served.name} does not put a system message at the head by itself; leave "
            f"it out"
        )
    return PublicPrefix(name, tokens, num_blocks, namer.of_prefix(name, tokens))


def longest_prefix(prompt: Sequence[int], prefixes: Iterable[PublicPrefix]) -> PublicPrefix | None:
    """The longest of `prefixes` that `prompt` begins with, if any."""
    fitting = (prefix for prefix in prefixes if tuple(prompt[: len(prefix.tokens)]) == prefix.tokens)
    return max(fitting, key=lambda prefix: prefix.num_blocks, default=None)


def load_secret(directory: Path) -> bytes:
    """The secret in `directory`, made at the first call. Raises ConfigError where it is not this user's alone."""
    path = directory / SECRET_NAME
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _make_secret(path)
        return _read_secret(path)
    except OSError as error:
        raise ConfigError(
            f"cannot keep a secret in {path}: {error.strerror}; make the directory writable, or set XDG_STATE_HOME"
        ) from None


def _make_secret(path: Path) -> None:
    """Under another name first: a server that starts at the same time sees a whole secret or none."""
    temporary = path.with_name(f".{SECRET_NAME}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, secrets.token_bytes(SECRET_BYTES))
        os.fsync(descriptor)
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.close(descriptor)
        os.unlink(temporary)


def _read_secret(path: Path) -> bytes:
    """What is judged is the file that is read, not one that took its place in between."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        secret = file.read(SECRET_BYTES + 1)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{path} belongs to another user; remove it, and a new one is made")
    if mode & 0o077:
        raise ConfigError(f"{path} can be read by others (mode {mode:04o}); remove it, and a new one is made")
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"{path} does not hold {SECRET_BYTES} bytes; remove it, and a new one is made")
    return secret
