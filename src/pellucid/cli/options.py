"""Flags made from the fields of frozen settings classes, so that a setting is written once.

With `settings_options` a field `kv_memory` is the flag `--kv-memory`, the variable `PELLUCID_KV_MEMORY` and the key
`kv_memory` (or `kv-memory`) of `--config FILE.toml`; a flag wins over the variable, which wins over the file, which
wins over the default. With `flag_options` it is the flag alone: for what belongs to one call of a command.
"""

from __future__ import annotations

import functools
import inspect
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from pellucid.core.errors import PellucidError


def settings_options(*classes: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command one flag per field of each class that has help text, and `--config`.

    The command's last parameters, one per class in order, receive the built objects. A value that a class
    refuses becomes a usage error of one line.
    """
    return _options_of(classes, settings=True)


def flag_options(*classes: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The same with flags only: no variables and no `--config`."""
    return _options_of(classes, settings=False)


def flag(default: Any, help: str, **more: Any) -> Any:
    """A field that becomes a flag. `more`: its spelling where the field's name is not it ("--workload -w"), `metavar`,
    `min`, `envvar`."""
    return field(default=default, metadata={"help": help, **more})


def _options_of(classes: tuple[type[Any], ...], *, settings: bool) -> Callable[..., Callable[..., Any]]:
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        (*own,) = inspect.signature(command, eval_str=True).parameters.values()
        own, taken = own[: -len(classes)], [parameter.name for parameter in own[-len(classes) :]]
        flags = {cls: [f for f in fields(cls) if "help" in f.metadata] for cls in classes}
        parameters = own + [_parameter(cls, f, settings) for cls, fs in flags.items() for f in fs]
        parameters += [_config_parameter()] if settings else []

        @functools.wraps(command)
        def run(**values: Any) -> Any:
            values.pop("config", None)
            built = [cls(**{f.name: values.pop(f.name) for f in fs}) for cls, fs in flags.items()]
            return command(**values, **dict(zip(taken, built)))

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _parameter(cls: type[Any], setting: Field[Any], from_environment: bool) -> inspect.Parameter:
    assert setting.default is not MISSING, f"{cls.__name__}.{setting.name} needs a default"
    meta = setting.metadata
    kind = get_type_hints(cls)[setting.name]
    options: dict[str, Any] = {
        "help": meta["help"],
        "envvar": f"PELLUCID_{setting.name.upper()}" if from_environment else meta.get("envvar"),
        "show_envvar": False,
        "rich_help_panel": meta.get("panel"),
        "min": meta.get("min"),
        "metavar": meta.get("metavar"),
    }
    if "parser" in meta:
        options |= {
            "parser": _usage_error(meta["parser"]),
            "metavar": meta.get("metavar", "SIZE"),
            "show_default": meta["shown"],
        }
    flags = meta.get("flag", f"--{setting.name.replace('_', '-')}").split()
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=setting.default,
        annotation=Annotated[kind, typer.Option(*flags, **options)],
    )


def _config_parameter() -> inspect.Parameter:
    text = "Read settings from this TOML file; each is a key there, and a variable such as PELLUCID_KV_MEMORY."
    option = typer.Option(
        "--config", help=text, is_eager=True, callback=_read_config, envvar="PELLUCID_CONFIG", show_envvar=False
    )
    return inspect.Parameter(
        "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, option]
    )


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Lay the file's values under the command's defaults. Every key must be one of its settings."""
    if path is None:
        return None
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise typer.BadParameter(f"{path} is not TOML: {error}") from None
    known = {parameter.name for parameter in context.command.params} - {"config"}
    renamed = {key.replace("-", "_"): value for key, value in values.items()}
    for key in renamed:
        if key not in known:
            raise typer.BadParameter(
                f"{path}: unknown setting {key!r}; settings are {', '.join(sorted(map(str, known)))}"
            )
    context.default_map = {**(context.default_map or {}), **renamed}
    return path


def _usage_error(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser whose errors are reported beside the flag. Defaults and file values come through it as well."""

    @functools.wraps(parse)
    def parsed(value: Any) -> Any:
        try:
            return parse(str(value))
        except PellucidError as error:
            raise typer.BadParameter(str(error)) from None

    return parsed
