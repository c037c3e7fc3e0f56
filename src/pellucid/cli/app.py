"""The table of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from pellucid import __version__
from pellucid.cli import chat, fetch, generate, replay, serve

app = typer.Typer(
    name="pellucid",
    help="An LLM serving engine you can see through.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


app.command("serve")(serve.serve)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("fetch")(fetch.fetch)
app.command("replay")(replay.replay_log)
