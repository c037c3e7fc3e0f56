"""`pellucid chat`: a conversation on the terminal, with what the prefix cache saved said after each turn."""

from __future__ import annotations

from typing import Annotated

import typer

from pellucid.cli.generate import MaxTokens, ModelOption, Temperature
from pellucid.cli.options import settings_options
from pellucid.cli.progress import loading, stderr
from pellucid.core.errors import RequestRejected
from pellucid.core.request import SamplingParams
from pellucid.llm import LLM, Completion
from pellucid.models.sources import DEFAULT_MODEL
from pellucid.settings import EngineSettings


@settings_options(EngineSettings)
def chat(
    model: ModelOption = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option("--system", help="A system message to begin with.")] = None,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = 0.0,
    *,
    settings: EngineSettings,
) -> None:
    """Talk to a model. An empty line or Ctrl-D ends the conversation."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    with loading("starting") as progress:
        llm = LLM.of(settings, model, progress=progress)
    messages = [] if system is None else [{"role": "system", "content": system}]
    stderr.print(f"[dim]{llm.model.files.name}. An empty line or Ctrl-D ends the conversation.[/dim]")
    while text := _read():
        messages.append({"role": "user", "content": text})
        try:
            messages.append({"role": "assistant", "content": _answer(llm, messages, sampling)})
        except RequestRejected as error:
            stderr.print(f"[red]{error}[/red]\nThe conversation has grown too long; start a new one.")
            return


def _read() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return ""


def _answer(llm: LLM, messages: list[dict[str, str]], sampling: SamplingParams) -> str:
    """Print the reply as it comes, then what it cost; returns its text."""
    reply = ""
    for piece in llm.chat(messages, sampling):
        if isinstance(piece, Completion):
            print()
            reply = piece.text
            cached = f"{piece.num_cached_tokens} of {piece.num_prompt_tokens} prompt tokens came from the prefix cache"
            cut = "; cut at --max-tokens" if piece.finish_reason == "length" else ""
            stderr.print(f"[dim]{cached}; {len(piece.token_ids)} generated{cut}[/dim]")
        else:
            print(piece, end="", flush=True)
    return reply
