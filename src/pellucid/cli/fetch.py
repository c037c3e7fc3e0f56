"""`pellucid fetch`: have a model on this machine before it is needed (for an image, or a machine without a network)."""

from __future__ import annotations

from typing import Annotated

import typer

from pellucid.models.sources import DEFAULT_MODEL, resolve

MODEL_HELP = "A directory with config.json and safetensors, a .gguf file, hf:ORG/NAME, or pypi:PACKAGE."
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help=MODEL_HELP, envvar="PELLUCID_MODEL", show_envvar=False)
]


def fetch(model: ModelArgument = DEFAULT_MODEL) -> None:
    """Fetch MODEL if it is not here yet, check it, and print where it is."""
    print(resolve(model).path)
