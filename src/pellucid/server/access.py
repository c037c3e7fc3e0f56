"""Who is asking, and what they may see: the one place where a bearer key becomes a caller.

A route calls one of the `require_*` functions first, before it reads the body. A caller is a tenant, or the operator,
or both: without tenants a server has one tenant, whose key (where there is one) is the operator's as well.

A key is known by its SHA-256 digest only. Tenants' keys are 256 bits of chance, so nobody can guess one from its digest
however fast the hash is; a slow hash (scrypt, Argon2) defends passwords that people choose, and here would only make
every request dear, the wrong ones first. (An `--api-key` may be weak, but its digest is written nowhere.) A digest is
compared with all known ones, each in constant time and without leaving at the first that fits, so the time of a
refusal says nothing about any key. Every refusal reads the same.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from starlette.requests import Request as HttpRequest

from pellucid.server.errors import ApiError

DEFAULT_TENANT = "default"


def key_digest(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).digest()


class Caller(NamedTuple):
    """Whoever sent a request. `tenant` is None for a key that only opens views."""

    tenant: str | None
    is_operator: bool = False

    def may_see(self, tenant: str) -> bool:
        """Whether what belongs to `tenant` may be shown to this caller. What may not be seen does not exist: 404."""
        return self.is_operator or self.tenant == tenant


ANYONE = Caller(DEFAULT_TENANT, is_operator=True)


class KnownKey(NamedTuple):
    """The digest of a key, and who brings it."""

    digest: bytes
    caller: Caller


class Access:
    """The keys of a server; None where no key is asked, and everyone is the default tenant and the operator."""

    def __init__(self, keys: Sequence[KnownKey] | None) -> None:
        self._keys = keys

    @property
    def asks_for_keys(self) -> bool:
        return self._keys is not None

    def identify(self, authorization: str) -> Caller:
        """The caller who brings this `Authorization` header. Raises ApiError (401)."""
        if self._keys is None:
            return ANYONE
        scheme, _, key = authorization.partition(" ")
        digest = key_digest(key.strip())
        found = None
        for known in self._keys:
            if hmac.compare_digest(known.digest, digest):
                found = known.caller
        if found is None or scheme.lower() != "bearer":
            raise ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found


class HasAccess(Protocol):
    """What an application has as `app.state.tenancy`, as far as it matters here."""

    @property
    def access(self) -> Access: ...


def require_key(http: HttpRequest) -> Caller:
    """Any caller known here. Raises ApiError (401)."""
    tenancy: HasAccess = http.app.state.tenancy
    return tenancy.access.identify(http.headers.get("authorization", ""))


def require_tenant(http: HttpRequest) -> str:
    """The tenant whose work is asked for. Raises ApiError: 401, or 403 for a key that only opens views."""
    caller = require_key(http)
    if caller.tenant is None:
        raise ApiError(
            403, "the operator key opens views of all tenants; use a tenant's key to generate", code="tenant_key_needed"
        )
    return caller.tenant


def require_operator(http: HttpRequest) -> Caller:
    """The operator, for whatever shows more than one tenant. Raises ApiError: 401, or 403 for a tenant's key."""
    caller = require_key(http)
    if not caller.is_operator:
        raise ApiError(
            403,
            f"{http.url.path} shows all tenants; it needs the operator key (`pellucid tenant operator`)",
            code="operator_key_needed",
        )
    return caller
