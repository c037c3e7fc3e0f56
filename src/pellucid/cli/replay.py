"""`pellucid replay`: decide a recorded run again, and say whether every decision is the same. Needs no model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from pellucid.core.errors import PellucidError
from pellucid.core.input_log import replay
from pellucid.core.scheduler import Scheduler


def replay_log(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A file written with --input-log.")],
    show: Annotated[bool, typer.Option("--show", help="Print every decision.")] = False,
) -> None:
    """Replay the calls recorded in FILE and compare every plan with the recorded one."""
    num_plans = 0
    try:
        for decision in replay(_rows(path), Scheduler):
            if decision.recorded != decision.replayed:
                raise PellucidError(f"{path}: decision {num_plans} was {decision.recorded}, is now {decision.replayed}")
            num_plans += decision.replayed is not None
            if show and decision.replayed is not None:
                print(decision.replayed)
    except (ValueError, KeyError) as error:
        raise PellucidError(f"{path} is not a complete input log: {error}") from None
    print(f"{num_plans} steps decided again, all as recorded")


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from map(json.loads, file)
    except OSError as error:
        raise PellucidError(f"cannot read {path}: {error.strerror}") from None
