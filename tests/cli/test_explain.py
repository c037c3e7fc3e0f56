"""`pellucid explain`: one request, the slowest, all of them; in words, bars and JSON; from a store without a server."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tests.telemetry.reports import BEHIND_A_DOCUMENT, WRITING, stored
from typer.testing import CliRunner, Result

from pellucid.cli.app import build_app
from pellucid.core.errors import PellucidError
from pellucid.telemetry.store import Store, StoreError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    store = Store(tmp_path / "store.sqlite")
    now = time.time()
    store.put(stored("cmpl-11", BEHIND_A_DOCUMENT, tenant="lab", at=now))
    store.put(stored("chatcmpl-22", WRITING, tenant="acme", at=now - 1000))
    store.close()
    return store.path


def run(path: Path, *arguments: str, env: dict[str, str] | None = None) -> Result:
    command = ["explain", *arguments, "--store", str(path)]
    return CliRunner().invoke(build_app(["explain"]), command, env={"LANG": "C"} | (env or {}))


def test_a_request_in_words_a_bar_and_numbers(path: Path) -> None:
    out = run(path, "cmpl-11").stdout
    lines = out.splitlines()
    assert lines[0].startswith("cmpl-11, lab, ")
    assert "waiting behind tenant acme's 6,000-token prompt" in lines[1]
    bars = [line for line in lines if "to the first token" in line or "to the last byte" in line][-2:]
    widths = [sum(line.count(shade) for shade in "█▓▒░▞▚") for line in bars]
    assert widths[1] == 72
    assert widths[0] == round(72 * 0.98 / BEHIND_A_DOCUMENT.e2e_seconds)
    assert any("prefill.wait" in line and "0.5470" in line and "34.1" in line for line in lines)


def test_the_beginning_of_an_id_will_do_and_an_unknown_one_is_said(path: Path) -> None:
    assert run(path, "chat").stdout.startswith("chatcmpl-22")
    failed = run(path, "nothing")
    assert isinstance(failed.exception, PellucidError)
    assert "no request 'nothing' is in the store" in str(failed.exception)
    assert isinstance(run(path.with_name("none"), "x").exception, StoreError)


def test_the_slowest_and_their_filters(path: Path) -> None:
    def ids(*arguments: str) -> list[str]:
        return [document["id"] for document in json.loads(run(path, "--json", *arguments).stdout)]

    assert ids("--slowest", "5") == ["chatcmpl-22", "cmpl-11"]
    assert ids("--slowest", "1") == ["chatcmpl-22"]
    assert ids("--slowest", "5", "--since", "10m") == ["cmpl-11"]
    assert ids("--slowest", "5", "--tenant", "acme") == ["chatcmpl-22"]


def test_all_together_and_as_json(path: Path) -> None:
    out = run(path).stdout
    assert out.startswith("Over 2 requests the hit rate was 97%; a perfect cache would still remove at most 26%")
    document = json.loads(run(path, "--json").stdout)
    assert document["num_requests"] == 2
    assert sum(document["causes"].values()) == pytest.approx(document["waited_seconds"])
    one = json.loads(run(path, "cmpl-11", "--json").stdout)
    assert one["ledger"]["first_token"]["causes"]["prefill.wait"] == 0.547
    assert run(path, "--since", "1s", "--tenant", "acme").stdout.startswith("No request has been kept")


def test_the_language_is_the_locales_or_the_one_asked_for(path: Path) -> None:
    assert "命中率" in run(path, "--lang", "zh").stdout
    assert "命中率" in run(path, env={"LANG": "zh_CN.UTF-8"}).stdout
    assert "hit rate" in run(path, "--lang", "en", env={"LC_ALL": "zh_CN.UTF-8"}).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--since", "soon"], "expected a duration such as"),
        (["--slowest", "0"], "greater than or equal to 1"),
        (["cmpl-11", "--slowest", "2"], "an ID stands alone"),
        (["--lang", "xx"], "'xx' is not one of"),
    ],
)
def test_what_cannot_be_answered_is_refused(path: Path, arguments: list[str], said: str) -> None:
    result = run(path, *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", "").split())
