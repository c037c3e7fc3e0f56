"""Settings reach a command as flag, variable, file and default, in that order; what cannot work is said in one line."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from pellucid.cli.options import settings_options
from pellucid.settings import EngineSettings

seen: list[EngineSettings] = []
app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
@settings_options(EngineSettings)
def probe(word: str = "x", *, settings: EngineSettings) -> None:
    """Remember the settings."""
    seen.append(settings)
    print(word)


def run(*args: str, env: dict[str, str] | None = None):
    seen.clear()
    return CliRunner().invoke(app, list(args), env=env or {})


@pytest.mark.parametrize(
    ("flag", "variable", "file", "expected"),
    [
        (None, None, None, 2**31),
        (None, None, "3GiB", 3 * 2**30),
        (None, "4GiB", "3GiB", 4 * 2**30),
        ("5GiB", "4GiB", "3GiB", 5 * 2**30),
    ],
)
def test_flag_wins_over_variable_wins_over_file_wins_over_default(tmp_path, flag, variable, file, expected):
    config = tmp_path / "pellucid.toml"
    config.write_text("" if file is None else f'kv-memory = "{file}"\nmax_running = 7\n')
    args = ["--config", str(config), *(["--kv-memory", flag] if flag else [])]
    result = run(*args, env={"PELLUCID_KV_MEMORY": variable} if variable else None)
    assert result.exit_code == 0, result.output
    assert seen[0].kv_memory == expected
    assert seen[0].max_running == (64 if file is None else 7)


def test_every_setting_has_a_flag_that_reaches_it():
    result = run(
        *("--device", "cpu", "--dtype", "float32", "--threads", "1", "--block-size", "8", "--kv-memory", "1KiB"),
        *("--max-context", "9", "--max-running", "3", "--token-budget", "5", "--deterministic", "--seed", "4"),
        *("--prefix-cache", "off", "--chunked-prefill", "off", "--isa", "reference", "--input-log", "log.jsonl"),
        *("--weights", "int8", "--step-target", "off", "--policy", "fair", "--max-waiting", "7"),
        *("--swap-memory", "1MiB", "--preemption", "recompute", "--kv-dtype", "int8"),
        *("--step-records", "9"),
    )
    assert result.exit_code == 0, result.output
    defaults = EngineSettings()
    same = [name for name in defaults.__dataclass_fields__ if getattr(defaults, name) == getattr(seen[0], name)]
    assert same == ["device"], "a flag that does not reach its field, or a field without one"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--kv-memory", "3QB"], ["--kv-memory", "3QB", "2GiB"]),
        (["--prefix-cache", "maybe"], ["--prefix-cache", "maybe", "off"]),
        (["--no-such-flag"], ["--no-such-flag"]),
        (["--config", "/no/such/file.toml"], ["/no/such/file.toml"]),
    ],
)
def test_a_bad_flag_is_named_with_what_is_possible(args, words):
    result = run(*args)
    assert result.exit_code == 2
    shown = " ".join(result.output.replace("│", " ").split())
    for word in words:
        assert word in shown
    assert "Traceback" not in result.output


@pytest.mark.parametrize(("text", "words"), [("kv_memry = 1", ["kv_memry", "kv_memory"]), ("a = = 1", ["not TOML"])])
def test_a_bad_configuration_file_is_named(tmp_path, text, words):
    config = tmp_path / "pellucid.toml"
    config.write_text(text)
    result = run("--config", str(config))
    assert result.exit_code == 2
    shown = " ".join(result.output.replace("│", " ").split())
    for word in words:
        assert word in shown
