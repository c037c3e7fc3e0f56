"""The tenants file: who may ask, with which keys and limits, and which system messages everyone may share.

A file is read whole and strictly: an unknown key, a wrong type or a name that is not declared is one line that says
where it stands, what was found and what is expected. A key is kept as `sha256:` and its digest in hexadecimal (why that
is enough: `access.py`), and belongs to exactly one tenant, or to the operator. Commands change a file by appending a
table, so that comments stay; the result is read again before it replaces the file, in one move.
"""

from __future__ import annotations

import os
import re
import secrets
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from pellucid.core.errors import ConfigError
from pellucid.core.tenants import Tenant
from pellucid.server.access import DEFAULT_TENANT, Caller, KnownKey, key_digest

KEY_BYTES = 32
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME_RULE = "1 to 64 letters, digits, - and _"
_WHOLE = ("a whole number", (int,))
_NUMBER = ("a number", (int, float))
_LIMITS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "weight": _NUMBER,
    "priority_ceiling": _WHOLE,
    "max_running": _WHOLE,
    "max_waiting": _WHOLE,
    "tokens_per_minute": _WHOLE,
    "kv_share": _NUMBER,
}
_NEW_FILE = "# Tenants of a Pellucid server. A running server reads this file again on SIGHUP.\n"


@dataclass(frozen=True, slots=True)
class TenantEntry:
    """A tenant as declared: its limits, the digests of its keys, the names of the public prefixes it shares."""

    tenant: Tenant
    keys: tuple[bytes, ...]
    public_prefixes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TenantsFile:
    """What a tenants file declares. `public_prefixes` are system messages by name."""

    entries: tuple[TenantEntry, ...] = ()
    public_prefixes: Mapping[str, str] = field(default_factory=dict)
    operator_keys: tuple[bytes, ...] = ()

    def known_keys(self) -> Iterator[KnownKey]:
        """Every key, with the caller who brings it."""
        for digest in self.operator_keys:
            yield KnownKey(digest, Caller(None, is_operator=True))
        for entry in self.entries:
            for digest in entry.keys:
                yield KnownKey(digest, Caller(entry.tenant.name))


class NewKey(NamedTuple):
    """A key that was just made: `key` is for its owner and is kept nowhere."""

    key: str

    @property
    def digest(self) -> bytes:
        return key_digest(self.key)

    @property
    def hash(self) -> str:
        """What a file says of it."""
        return f"sha256:{self.digest.hex()}"


def new_key() -> NewKey:
    """A key of 256 bits of chance."""
    return NewKey("plk-" + secrets.token_urlsafe(KEY_BYTES))


def read_tenants(path: Path) -> TenantsFile:
    """The tenants file at `path`. Raises ConfigError, in one line."""
    return parse_tenants(_read(path), str(path))


def parse_tenants(text: str, origin: str) -> TenantsFile:
    """The tenants that `text` declares; `origin` names it in errors. Raises ConfigError, in one line."""
    try:
        document = tomllib.loads(text)
        return _Reader(document).file()
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{origin} is not TOML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None


def add_tenant(path: Path, entry: TenantEntry) -> None:
    """Append a tenant to the file, which is made if there is none. Raises ConfigError, and then changes nothing."""
    name = entry.tenant.name
    _check_name("tenant", name)
    given = {key: value for key, value in asdict(entry.tenant).items() if key != "name"}
    defaults = {limit.name: limit.default for limit in fields(Tenant)}
    lines = [f"[tenants.{name}]", _keys_line(entry.keys)]
    lines += [f"{key} = {value}" for key, value in given.items() if value != defaults[key]]
    if entry.public_prefixes:
        lines.append(f"public_prefixes = {_list(entry.public_prefixes)}")
    text = _read(path) if path.exists() else _NEW_FILE
    if any(known.tenant.name == name for known in parse_tenants(text, str(path)).entries):
        raise ConfigError(f"{path} has a tenant {name!r} already; for another key of its, see `pellucid tenant key`")
    _append(path, text, lines)


def add_operator(path: Path, digest: bytes) -> None:
    """Append the operator's table to the file, which is made if there is none. Raises ConfigError, as add_tenant."""
    text = _read(path) if path.exists() else _NEW_FILE
    if parse_tenants(text, str(path)).operator_keys:
        raise ConfigError(f"{path} has an operator key already; for another one, see `pellucid tenant key`")
    _append(path, text, ["[operator]", _keys_line([digest])])


class _Reader:
    """Turns a TOML document into a TenantsFile. Errors do not name the file."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._owners: dict[bytes, str] = {}

    def file(self) -> TenantsFile:
        _check_keys("the file", self._document, ("operator", "public_prefixes", "tenants"))
        prefixes = self._table(self._document, "public_prefixes", "")
        for name, text in prefixes.items():
            _check_name("public prefix", name)
            if not isinstance(text, str) or not text:
                raise _wrong("[public_prefixes]", name, text, "the text of a system message")
        operator = self._table(self._document, "operator", "")
        _check_keys("[operator]", operator, ("keys",))
        operator_keys = self._keys("[operator]", operator) if "operator" in self._document else ()
        tables = self._table(self._document, "tenants", "")
        entries = tuple(self._entry(name, self._table(tables, name, "tenants."), prefixes) for name in tables)
        return TenantsFile(entries, prefixes, operator_keys)

    def _entry(self, name: str, table: dict[str, Any], prefixes: Mapping[str, str]) -> TenantEntry:
        where = f"[tenants.{name}]"
        _check_name("tenant", name)
        _check_keys(where, table, ("keys", *_LIMITS, "public_prefixes"))
        for key, (expected, kinds) in _LIMITS.items():
            if key in table and type(table[key]) not in kinds:
                raise _wrong(where, key, table[key], expected)
        shared = table.get("public_prefixes", [])
        if not isinstance(shared, list) or any(entry not in list(prefixes) for entry in shared):
            known = f"a list of names from [public_prefixes] ({', '.join(prefixes) or 'which declares none'})"
            raise _wrong(where, "public_prefixes", shared, known)
        tenant = Tenant(name, **{key: table[key] for key in _LIMITS if key in table})
        return TenantEntry(tenant, self._keys(where, table), tuple(shared))

    def _keys(self, where: str, table: dict[str, Any]) -> tuple[bytes, ...]:
        """The digests in `keys`. What stands there in their place is not shown: it may be a key."""
        hashes = table.get("keys")
        if not isinstance(hashes, list) or not hashes:
            raise ConfigError(f"{where} keys must be a list of key hashes; `pellucid tenant key` makes one")
        for entry in hashes:
            if not isinstance(entry, str) or not _HASH.fullmatch(entry):
                raise ConfigError(f"{where} keys may hold only texts of sha256: and 64 hexadecimal digits")
            owner = self._owners.setdefault(_digest(entry), where)
            if owner != where:
                raise ConfigError(f"{where} keys holds a key of {owner}; a key has one owner")
        return tuple(map(_digest, hashes))

    @staticmethod
    def _table(parent: dict[str, Any], name: str, prefix: str) -> dict[str, Any]:
        table = parent.get(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{prefix}{name} is {_shown(table)}; it must be a table, [{prefix}{name}]")
        return table


def _digest(hash_text: str) -> bytes:
    return bytes.fromhex(hash_text.removeprefix("sha256:"))


def _check_name(what: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"a {what} is named {name!r}; a name has {_NAME_RULE}")
    if what == "tenant" and name == DEFAULT_TENANT:
        raise ConfigError(f"a tenant is named {name!r}, which is the tenant of --api-key; choose another name")


def _check_keys(where: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(f"{where} has an unknown key {key!r}; keys are {', '.join(known)}")


def _wrong(where: str, key: str, value: Any, expected: str) -> ConfigError:
    found = f"{key} is missing" if value is None else f"{key} is {_shown(value)}"
    return ConfigError(f"{where} {found}; it must be {expected}")


def _shown(value: Any) -> str:
    """A value of a TOML document, in one line."""
    return repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."


def _keys_line(digests: list[bytes] | tuple[bytes, ...]) -> str:
    return f"keys = {_list([f'sha256:{digest.hex()}' for digest in digests])}"


def _list(names: list[str] | tuple[str, ...]) -> str:
    """A TOML array of strings that need no escapes."""
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None


def _append(path: Path, text: str, lines: list[str]) -> None:
    """Put a table at the end of the file, and the new file in the place of the old one in one move."""
    text = text.rstrip("\n") + "\n\n" + "\n".join(lines) + "\n"
    parse_tenants(text, str(path))
    target = path.resolve()  # a link keeps pointing to the file
    try:
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                os.fchmod(descriptor, mode)
                file.write(text)
                file.flush()
                os.fsync(descriptor)
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
