"""Well-known models by name, shipped as the few fields of their config.json that the planner needs (shapes.toml)."""

from __future__ import annotations

import difflib
import re
import tomllib
from importlib.resources import files
from typing import Any

from pellucid.core.errors import ConfigError, ModelError
from pellucid.planner.config_shape import shape_from_config
from pellucid.planner.formats import number_format
from pellucid.planner.quantity import format_count
from pellucid.planner.shape import ModelShape, WeightBytes

_VARIANT = re.compile(r"-(instruct|it|pt|hf|chat|base)(?=-|$)")


def named_shapes() -> dict[str, dict[str, Any]]:
    """Every shipped name with its config fields and `source`."""
    return tomllib.loads(files("pellucid.planner").joinpath("shapes.toml").read_text())


def shape_by_name(name: str) -> ModelShape:
    """The shape called `name`: "llama-3.1-8b", or a published name of it ("meta-llama/Meta-Llama-3.1-8B-Instruct").
    Raises ModelError with the nearest names."""
    table = named_shapes()
    key = _VARIANT.sub("", name.lower().rsplit("/", 1)[-1].removeprefix("meta-"))
    if key not in table:
        near = difflib.get_close_matches(key, table, n=3, cutoff=0.5) or sorted(table)[:3]
        raise ModelError(
            f"model {name!r} is not a directory, a .gguf file, hf:org/name, or one of the {len(table)} names shipped; "
            f"nearest: {', '.join(near)} (`pellucid plan --list` prints all)"
        )
    return shape_from_config(table[key], name=key, origin=f"shapes.toml [{key}]")


def bare_shape(num_params: int, number_format_name: str = "bf16") -> ModelShape:
    """A model of which only the number of parameters is known. Attention and cache figures are then absent.
    Raises ConfigError for a model without parameters."""
    if num_params < 1:
        raise ConfigError(f"--params is {num_params}; a model has at least 1 parameter")
    fmt = number_format("bf16")
    shape = ModelShape(
        name=f"{format_count(num_params)} parameters",
        origin="--params",
        hidden=0,
        vocab=0,
        tied=True,
        groups=(),
        weights=WeightBytes(0, 0, 0, 0),
        weight_format=fmt,
        head_format=fmt,
        cache_format=fmt,
        num_bare_params=num_params,
    )
    return shape.stored_as(number_format_name)
