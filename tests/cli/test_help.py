"""`docs/cli.md` is what `--help` says. `make docs` writes it anew."""

from __future__ import annotations

from pathlib import Path

import typer

from pellucid.cli.app import build_app

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def render() -> str:
    """The reference of all commands, made from the same objects that print `--help`."""
    root = typer.main.get_command(build_app())
    lines = [
        "# Commands",
        "",
        "Generated from the program by `make docs`; a test keeps it true.",
        "",
        "Every option of an engine or a server is also an environment variable (`--kv-memory` is",
        "`PELLUCID_KV_MEMORY`) and a key of `--config FILE.toml` (`kv_memory`). A flag wins over the variable, which",
        "wins over the file.",
    ]
    for path, command in _commands(root, ("pellucid",)):
        lines += ["", f"## `{' '.join(path)}`", "", (command.help or "").strip()]
        if command.params:
            lines += ["", "| | | default |", "|---|---|---|", *map(_row, command.params)]
    return "\n".join(lines) + "\n"


def _commands(command, path):
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
        return
    for name in sorted(children):
        yield from _commands(children[name], (*path, name))


def _row(parameter) -> str:
    is_option = parameter.param_type_name == "option"
    name = ", ".join(parameter.opts) if is_option else (parameter.metavar or parameter.name.upper())
    default = getattr(parameter, "show_default", None)
    if not isinstance(default, str):
        absent = any(parameter.default is nothing for nothing in (None, False, ...))
        default = "" if absent else str(parameter.default)
    text = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    return f"| `{name}` | {text} | {default and f'`{default}`'} |"


def test_every_option_has_help_text():
    for path, command in _commands(typer.main.get_command(build_app()), ("pellucid",)):
        assert command.help, path
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{' '.join(path)} {parameter.name} has no help text"


def test_the_page_is_what_the_program_says():
    assert PAGE.read_text(encoding="utf-8") == render(), "docs/cli.md is stale: run `make docs`"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
