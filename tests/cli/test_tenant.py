"""`pellucid tenant`: a key alone on stdout, everything else on stderr, one line for what is wrong."""

from __future__ import annotations

import asyncio
import csv
import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from pellucid.cli.app import build_app
from pellucid.core.errors import ConfigError
from pellucid.core.tenants import Tenant
from pellucid.server.access import key_digest
from pellucid.server.tenants import read_tenants
from pellucid.server.usage import UsageLog


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("PELLUCID_TENANTS", raising=False)
    return tmp_path


def run(line: str, status: int = 0) -> Result:
    result = CliRunner().invoke(build_app(["tenant"]), ["tenant", *line.split()])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result


def printed_key(result: Result) -> str:
    """The one line on stdout, which occurs nowhere else."""
    key = result.stdout.removesuffix("\n")
    assert key.startswith("plk-")
    assert "\n" not in key
    assert key not in result.stderr
    return key


def test_a_tenant_is_made_with_its_limits_and_its_key_is_kept_nowhere(home: Path) -> None:
    (home / "mine.toml").write_text('public_prefixes.p = "a text"\n')
    key = printed_key(
        run(
            "new acme --tenants mine.toml --weight 2 --priority-ceiling -3 --max-running 4 --max-waiting 5 "
            "--tokens-per-minute 600 --kv-share 0.5 --public-prefix p"
        )
    )
    (entry,) = read_tenants(home / "mine.toml").entries
    assert entry.tenant == Tenant("acme", 2.0, -3, 4, 5, 600, 0.5)
    assert entry.public_prefixes == ("p",)
    assert entry.keys == (key_digest(key),)
    assert key not in (home / "mine.toml").read_text()


def test_the_operator_and_further_keys(home: Path) -> None:
    run("new acme")
    operator = printed_key(run("operator"))
    assert read_tenants(home / "tenants.toml").operator_keys == (key_digest(operator),)
    result = run("key")
    assert f"sha256:{key_digest(printed_key(result)).hex()}" in result.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("new acme", "has a tenant 'acme' already"),
        ("operator", "has an operator key already"),
        ("new x --weight 0", "weight is 0.0; it must be above 0"),
        ("new x/y", "a name has"),
        ("list --tenants none.toml", "cannot read none.toml"),
        ("usage --day yesterday", "it must be a date such as"),
        ("usage", "there is no .*usage.sqlite"),
    ],
)
def test_what_is_wrong_is_one_line_and_changes_nothing(home: Path, line: str, message: str) -> None:
    run("new acme")
    run("operator")
    before = (home / "tenants.toml").read_text()
    with pytest.raises(ConfigError, match=message) as caught:
        run(line)
    assert "\n" not in str(caught.value)
    assert (home / "tenants.toml").read_text() == before


def test_the_list(home: Path) -> None:
    run("new acme --weight 2")
    run("new lab --max-running 3")
    rows = json.loads(run("list --json").stdout)
    assert [(row["name"], row["keys"], row["weight"], row["max_running"]) for row in rows] == [
        ("acme", 1, 2.0, None),
        ("lab", 1, 1.0, 3),
    ]
    assert "acme" in run("list").stdout


def test_usage_in_three_forms(home: Path) -> None:
    log = UsageLog(home / "state" / "pellucid" / "usage.sqlite", lambda: 1_767_225_600.0)
    log.add("acme", prompt_tokens=1000, cached_tokens=20, output_tokens=3)
    asyncio.run(log.flush())
    rows = list(csv.DictReader(run("usage --csv").stdout.splitlines()))
    assert rows == [
        {
            "day": "2026-01-01",
            "tenant": "acme",
            "requests": "1",
            "prompt_tokens": "1000",
            "cached_tokens": "20",
            "output_tokens": "3",
        }
    ]
    assert (
        run("usage --csv --day 2026-01-02").stdout == "day,tenant,requests,prompt_tokens,cached_tokens,output_tokens\n"
    )
    assert json.loads(run("usage --json --day 2026-01-01").stdout)[0]["prompt_tokens"] == 1000
    assert "1,000" in run("usage").stdout
