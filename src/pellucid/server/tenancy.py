"""The tenants of a running server: which key is whose, what each may ask for, and where its cached blocks are.

A tenants file is read whole into a roster, which replaces the one before in one move; a file that cannot be used
changes nothing. Without a file there is one tenant, without limits or namespace, and only `--api-key` if that.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pellucid.core.errors import ConfigError
from pellucid.core.tenants import Tenant
from pellucid.engine.client import EngineClient
from pellucid.server.access import ANYONE, Access, KnownKey, key_digest
from pellucid.server.config import ServedModel
from pellucid.server.errors import bad_request
from pellucid.server.isolation import Namer, Namespace, PublicPrefix, encode_prefix, load_secret, longest_prefix
from pellucid.server.tenants import TenantEntry, read_tenants
from pellucid.server.usage import FILE_NAME, UsageLog


@dataclass(frozen=True, slots=True)
class Roster:
    """A tenants file, ready for use: `shared` are the public prefixes of a tenant, by its name."""

    access: Access
    entries: Mapping[str, TenantEntry] = field(default_factory=dict)
    shared: Mapping[str, Sequence[PublicPrefix]] = field(default_factory=dict)

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        """As the scheduler is told of them."""
        return tuple(entry.tenant for entry in self.entries.values())

    def __str__(self) -> str:
        public = {prefix.name: prefix for prefixes in self.shared.values() for prefix in prefixes}.values()
        shared = "".join(f", {prefix.name} shared in {prefix.num_blocks} blocks" for prefix in public)
        return f"{len(self.entries)} {'tenant' if len(self.entries) == 1 else 'tenants'}{shared}"


class Tenancy:
    """The present roster, and how to read it anew. `usage` is None where there is only the one tenant."""

    def __init__(self, read: Callable[[], Roster], namer: Namer | None = None, usage: UsageLog | None = None) -> None:
        self.roster = read()
        self.usage = usage
        self._read, self._namer = read, namer

    @classmethod
    def single(cls, api_key: str | None) -> Tenancy:
        """A server without tenants: `api_key`, where there is one, opens everything."""
        return cls(lambda: Roster(Access(None if api_key is None else [_of_api_key(api_key)])))

    @classmethod
    def of_file(cls, path: Path, served: ServedModel, *, api_key: str | None, state_directory: Path) -> Tenancy:
        """The tenants of the file at `path`; `api_key` is one more, the default tenant's and the operator's. Raises
        ConfigError."""
        namer = Namer(load_secret(state_directory), served.name)

        def read() -> Roster:
            return _read_roster(path, served, namer, api_key)

        return cls(read, namer, UsageLog(state_directory / FILE_NAME))

    @asynccontextmanager
    async def keeping_usage(self) -> AsyncIterator[None]:
        """While the block runs, usage is written once a second; what is left of it is written at the end."""
        if self.usage is None:
            yield
            return
        writing = asyncio.create_task(self.usage.run())
        try:
            yield
        finally:
            writing.cancel()
            await asyncio.wait([writing])
            await self.usage.flush()

    @property
    def access(self) -> Access:
        return self.roster.access

    def reload(self, engine: EngineClient) -> None:
        """Read the file again and tell `engine`. Raises ConfigError, and then nothing has changed."""
        self.roster = self._read()
        engine.reconfigure(self.roster.tenants)

    def check_priority(self, tenant: str, priority: int) -> None:
        """Raises ApiError (400) for a priority more urgent than the tenant may ask for."""
        entry = self.roster.entries.get(tenant)
        ceiling = None if entry is None else entry.tenant.priority_ceiling
        if ceiling is not None and priority < ceiling:
            raise bad_request(
                f"priority is {priority}; tenant {tenant} may ask for {ceiling} or higher (lower is served first)",
                param="priority",
                code="priority_above_ceiling",
            )

    def namespace(self, tenant: str, prompt: Sequence[int]) -> Namespace:
        """Where the blocks of this tenant's prompt are looked for."""
        if self._namer is None:
            return Namespace()
        cache_key = self._namer.of_tenant(tenant)
        public = longest_prefix(prompt, self.roster.shared.get(tenant, ()))
        return Namespace(cache_key) if public is None else Namespace(cache_key, public.key, public.num_blocks)


def reload_on_hangup(tenancy: Tenancy, engine: EngineClient, say: Callable[[str], None]) -> None:
    """From now on, SIGHUP reads the tenants file again, and `say` gets one line about it. For the main thread."""

    def reload() -> None:
        try:
            tenancy.reload(engine)
        except ConfigError as error:
            say(f"{error} (the tenants stay as they were)")
        else:
            say(f"tenants read again: {tenancy.roster}")

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)


def _of_api_key(api_key: str) -> KnownKey:
    return KnownKey(key_digest(api_key), ANYONE)


def _read_roster(path: Path, served: ServedModel, namer: Namer, api_key: str | None) -> Roster:
    file = read_tenants(path)
    try:
        prefixes = {name: encode_prefix(name, text, served, namer) for name, text in file.public_prefixes.items()}
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    keys = list(file.known_keys())
    if api_key is not None:
        if any(known.digest == key_digest(api_key) for known in keys):
            raise ConfigError(f"{path} has the hash of the key given with --api-key; a key has one owner")
        keys.append(_of_api_key(api_key))
    entries = {entry.tenant.name: entry for entry in file.entries}
    shared = {name: [prefixes[each] for each in entry.public_prefixes] for name, entry in entries.items()}
    return Roster(Access(keys), entries, shared)
