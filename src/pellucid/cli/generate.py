"""`pellucid generate`: one prompt, answered on the terminal as it is made."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pellucid.cli.fetch import MODEL_HELP
from pellucid.cli.options import settings_options
from pellucid.cli.progress import loading, stderr
from pellucid.core.request import SamplingParams
from pellucid.llm import LLM, Completion
from pellucid.models.sources import DEFAULT_MODEL
from pellucid.settings import EngineSettings

ModelOption = Annotated[str, typer.Option("--model", help=MODEL_HELP, envvar="PELLUCID_MODEL", show_envvar=False)]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 always takes the most likely token.")]
TopP = Annotated[float, typer.Option("--top-p", help="Sample from the likeliest tokens that make up this probability.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End at this text; may be given several times.")]


@settings_options(EngineSettings)
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    model: ModelOption = DEFAULT_MODEL,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    stop: Stop = None,
    *,
    settings: EngineSettings,
) -> None:
    """Continue PROMPT and print the text as it comes."""
    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    with loading("starting") as progress:
        llm = LLM.of(settings, model, progress=progress)
    for piece in llm.stream(text, sampling, stop=stop or ()):
        if isinstance(piece, Completion):
            print()
            note = f"{piece.num_prompt_tokens} prompt tokens, {len(piece.token_ids)} generated ({piece.finish_reason})"
            stderr.print(f"[dim]{note}[/dim]")
        else:
            print(piece, end="", flush=True)
