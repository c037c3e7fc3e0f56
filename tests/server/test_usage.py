"""Usage survives the server, adds up across servers, and waits for nobody's disk."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from pellucid.core.errors import ConfigError
from pellucid.server.usage import UsageLog, UsageRow, read_usage

DAY_ONE = 1_767_225_600.0  # 2026-01-01T00:00:00Z


async def test_counts_add_up_by_tenant_and_day_and_across_servers(tmp_path: Path) -> None:
    path = tmp_path / "state" / "usage.sqlite"
    now = [DAY_ONE]
    logs = [UsageLog(path, lambda: now[0]), UsageLog(path, lambda: now[0])]
    for now[0] in (DAY_ONE, DAY_ONE + 86_399, DAY_ONE + 86_400):
        for log in logs:
            log.add("b", prompt_tokens=10, cached_tokens=3, output_tokens=1)
            log.add("a", prompt_tokens=1, cached_tokens=0, output_tokens=5)
        await asyncio.gather(*(log.flush() for log in logs))
    await logs[0].flush()
    assert read_usage(path) == [
        UsageRow("2026-01-01", "a", 4, 4, 0, 20),
        UsageRow("2026-01-01", "b", 4, 40, 12, 4),
        UsageRow("2026-01-02", "a", 2, 2, 0, 10),
        UsageRow("2026-01-02", "b", 2, 20, 6, 2),
    ]
    assert [row.tenant for row in read_usage(path, "2026-01-02")] == ["a", "b"]
    assert read_usage(path, "2025-12-31") == []


async def test_what_cannot_be_written_now_is_written_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "usage.sqlite"
    log = UsageLog(path, lambda: DAY_ONE)
    good = path.read_bytes()
    path.write_bytes(b"this is no database" * 100)
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            log.add("a", prompt_tokens=1, cached_tokens=2, output_tokens=3)
            await log.flush()
    assert len(caplog.messages) == 1, "it is said once"
    assert "cannot use" in caplog.messages[0]
    path.write_bytes(good)
    await log.flush()
    assert read_usage(path) == [UsageRow("2026-01-01", "a", 2, 2, 4, 6)]


def test_a_place_that_cannot_be_used_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot use .*usage.sqlite"):
        UsageLog(tmp_path / "file" / "usage.sqlite")
    with pytest.raises(ConfigError, match=r"there is no .*--tenants"):
        read_usage(tmp_path / "none.sqlite")


async def test_the_file_is_its_owners_only(tmp_path: Path) -> None:
    log = UsageLog(tmp_path / "usage.sqlite", lambda: DAY_ONE)
    log.add("a", prompt_tokens=1, cached_tokens=0, output_tokens=5)
    await log.flush()
    assert (tmp_path / "usage.sqlite").stat().st_mode & 0o777 == 0o600
