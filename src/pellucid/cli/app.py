"""The table of commands. A command's module is imported when that command is asked for: most import more than they need
to share, and `pellucid serve` should not wait for the libraries of `pellucid trace`."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Annotated

import typer

from pellucid import __version__

# Command -> module below pellucid.cli and the function in it; a module's `app` is a group of commands.
COMMANDS = {
    "serve": "serve:serve",
    "generate": "generate:generate",
    "chat": "chat:chat",
    "fetch": "fetch:fetch",
    "plan": "plan:plan",
    "fit": "plan:fit",
    "measure": "measure:measure",
    "doctor": "doctor:doctor",
    "bench": "bench:bench",
    "report": "bench:report",
    "top": "top:top",
    "trace": "trace:app",
    "replay": "replay:replay_log",
    "tenant": "tenant:app",
    "explain": "explain:explain_requests",
    "steps": "steps:steps",
}


def build_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The command line with these commands."""
    app = typer.Typer(
        name="pellucid",
        help="An LLM serving engine you can see through.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_root)
    for name in names:
        module, _, attribute = COMMANDS[name].partition(":")
        found = getattr(import_module(f"pellucid.cli.{module}"), attribute)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)
    return app


def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit
