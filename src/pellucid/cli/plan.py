"""`pellucid plan` and `pellucid fit`: what a model costs on a device, and what to pass to `serve` on this one.

Results go to stdout (one JSON document with --json), everything else to stderr. Mounted with `app.command()`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from pellucid.cli import plan_view
from pellucid.core.errors import ConfigError, ModelError
from pellucid.models.sources import resolve
from pellucid.planner.compare import compare, paradox
from pellucid.planner.fit import FREE_SHARE, fit_serve
from pellucid.planner.fleet import Demand, size_fleet
from pellucid.planner.hardware import CUSTOM, Device, Overrides, device_by_name, devices, devices_in
from pellucid.planner.memory import Batching
from pellucid.planner.named_shapes import bare_shape, named_shapes, shape_by_name
from pellucid.planner.plan import Plan, Scenario
from pellucid.planner.plot import write_plot
from pellucid.planner.profile import default_path, read_profile
from pellucid.planner.quantity import parse_bytes, parse_count, parse_flops, parse_rate, parse_seconds
from pellucid.planner.shape import ModelShape
from pellucid.runtime.machine import available_bytes
from pellucid.sizing import host_device, shape_at, shape_in

THIS_MACHINE = "this-machine"

T = TypeVar("T")


def plan(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL", help="A directory, a .gguf file, hf:org/name, pypi:PACKAGE, or a name (see --list)."
        ),
    ] = None,
    params: Annotated[
        str | None, typer.Option(metavar="N", help="Instead of MODEL: only how many parameters (70e9, 70B).")
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="A name (see --list), a .toml file, or this-machine (see `pellucid measure`)."),
    ] = None,
    bandwidth: Annotated[str | None, typer.Option(metavar="RATE", help="Memory bandwidth: 2TB/s.")] = None,
    flops: Annotated[str | None, typer.Option(metavar="RATE", help="Dense rate of the model's format: 989TF.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="BYTES", help="Memory of one device: 80GB.")] = None,
    link: Annotated[
        str | None, typer.Option(metavar="RATE", help="Link to peers and to host memory, one way: 50GB/s.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Store the weights as bf16, fp8, int8, int4, q4_k, ...")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Keep the KV cache as bf16, fp8, int8, ...")] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    context: Annotated[
        str | None, typer.Option(metavar="N", help="Tokens a sequence ends with (default: prompt + output).")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(help="Sequences at once.")] = None,
    prompt: Annotated[str, typer.Option(metavar="N", help="Prompt tokens.")] = "1024",
    output: Annotated[str, typer.Option(metavar="N", help="Output tokens.")] = "256",
    prefix_hit: Annotated[float, typer.Option(help="Share of the prompt found in the prefix cache.")] = 0.0,
    chunk: Annotated[
        int | None,
        typer.Option(help="Prompt tokens per step (default: all; 512 on a measured machine, as `serve` does)."),
    ] = None,
    slo_ttft: Annotated[str | None, typer.Option(metavar="TIME", help="Objective for the first token: 2s.")] = None,
    slo_itl: Annotated[str | None, typer.Option(metavar="TIME", help="Objective between tokens: 50ms.")] = None,
    memory_fraction: Annotated[float, typer.Option(help="Part of the device's memory to use.")] = 0.9,
    price_per_hour: Annotated[float | None, typer.Option(help="Price of one device and hour.")] = None,
    users: Annotated[int | None, typer.Option(help="People to serve: prints replicas and cost.")] = None,
    think_time: Annotated[
        str, typer.Option(metavar="TIME", help="Between an answer and the next question: 30s.")
    ] = "0s",
    compare_with: Annotated[
        list[str] | None,
        typer.Option("--compare", metavar="NAME...", help="Several devices side by side: --compare h100 h20 mi300x."),
    ] = None,
    stages: Annotated[bool, typer.Option("--stages", help="Prefill beside decode in one table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write the roofline to a .html, .svg or .png file.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Each figure with its formula and inputs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    list_names: Annotated[bool, typer.Option("--list", help="Print the names of models and devices.")] = False,
) -> None:
    """What a model costs on a device: memory, time, ceilings. Every figure with its formula under --explain."""
    views = {"--list": list_names, "--compare": compare_with, "--stages": stages, "--json": as_json}
    _check_views({**views, "--explain": explain, "--hardware": hardware, "--plot": plot, "--users": users})
    if list_names:
        plan_view.print_names(named_shapes(), devices())
        return
    model, names = _split(models or [], compare_with or [], wants_model=params is None)
    shape = load_shape(_needed(model)) if params is None else bare_shape(parsed("--params", params, parse_count))
    shape = shape if dtype is None else shape.stored_as(dtype)
    shape = shape if kv_dtype is None else shape.cached_as(kv_dtype)
    given = Overrides(
        flops=optional("--flops", flops, parse_flops),
        bandwidth=optional("--bandwidth", bandwidth, parse_rate),
        memory=optional("--memory", memory, parse_bytes),
        link=optional("--link", link, parse_rate),
    )
    chosen = [_device(name).override(given) for name in names] or [choose_device(hardware, given)]
    scenario = Scenario(
        shape=shape,
        device=chosen[0],
        tp=tp,
        prompt=parsed("--prompt", prompt, parse_count),
        output=parsed("--output", output, parse_count),
        context=optional("--context", context, parse_count),
        concurrency=concurrency,
        prefix_hit=prefix_hit,
        chunk=512 if chunk is None and chosen[0].kernels else chunk,
        slo_ttft_seconds=optional("--slo-ttft", slo_ttft, parse_seconds),
        slo_itl_seconds=optional("--slo-itl", slo_itl, parse_seconds),
        batching=Batching(memory_fraction=memory_fraction),
    )
    demand = _demand(users, parsed("--think-time", think_time, parse_seconds), price_per_hour)
    if names:
        rows = compare(scenario, chosen)
        plan_view.print_comparison(scenario, rows, paradox(rows), as_json=as_json)
        return
    _answer(Plan(scenario), demand, stages=stages, plot=plot, explain=explain, as_json=as_json)


def _answer(
    answer: Plan, demand: Demand | None, *, stages: bool, plot: Path | None, explain: bool, as_json: bool
) -> None:
    fleet = size_fleet(answer, demand) if demand is not None else None
    if plot is not None:
        write_plot(answer, plot)
        typer.echo(f"wrote {plot}", err=True)
    if as_json:
        typer.echo(json.dumps(plan_view.to_json(answer, fleet), indent=2))
    elif stages:
        plan_view.print_stages(answer, _measured(answer))
    else:
        plan_view.print_plan(answer, fleet, explain=explain)


def fit(
    model: Annotated[str, typer.Argument(help="As for `pellucid serve`.")],
    memory: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Memory to use in all (default: 80 % of what is free).")
    ] = None,
    kv_memory: Annotated[str | None, typer.Option(metavar="BYTES", help="Or: memory for the KV cache alone.")] = None,
    context: Annotated[str | None, typer.Option(metavar="N", help="Longest sequence wanted.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Store the weights as bf16, int8, ...")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """What to pass to `pellucid serve` on this machine, and how many sequences that holds."""
    if memory is not None and kv_memory is not None:
        raise ConfigError("--memory and --kv-memory both say how much to use; pass one of them")
    shape = load_shape(model)
    usable = int(free_memory() * FREE_SHARE) if memory is None else parsed("--memory", memory, parse_bytes)
    advice = fit_serve(
        shape if dtype is None else shape.stored_as(dtype),
        model,
        host_device(usable, os.environ),
        kv_bytes=optional("--kv-memory", kv_memory, parse_bytes),
        context=optional("--context", context, parse_count),
    )
    plan_view.print_advice(advice, as_json=as_json)


def parsed(option: str, text: str, parse: Callable[[str], T]) -> T:
    """The option's value, or an error that names the option."""
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def optional(option: str, text: str | None, parse: Callable[[str], T]) -> T | None:
    """The same for an option that may be absent."""
    return None if text is None else parsed(option, text, parse)


def load_shape(model: str) -> ModelShape:
    """The shape of whatever the user calls MODEL. Raises ModelError."""
    scheme, separator, rest = model.partition(":")
    if separator and scheme == "hf":
        return _shape_from_hub(rest)
    path = Path(model).expanduser()
    if separator and scheme == "pypi":
        path = resolve(model).path
    if path.is_dir() or path.suffix == ".gguf":
        return shape_at(path)
    return shape_by_name(model)


def choose_device(hardware: str | None, given: Overrides) -> Device:
    """The device that the options describe: a named one or this machine, with the given figures in place of its own.
    Without a name the figures stand alone, and without figures this machine is meant."""
    if hardware is not None:
        return _device(hardware).override(given)
    if given.bandwidth is not None or given.flops is not None:
        return CUSTOM.override(given)
    path = default_path(os.environ)
    if not path.exists():
        raise ConfigError("no hardware: pass --hardware NAME (see --list), --bandwidth, or run `pellucid measure`")
    return read_profile(path).device().override(given)


def free_memory() -> int:
    """Bytes that a new process could use without swapping. Raises ConfigError where the system does not say."""
    free = available_bytes()
    if free is None:
        raise ConfigError("this system does not say how much memory is free; pass --memory")
    return free


def _device(name: str) -> Device:
    if name == THIS_MACHINE:
        return read_profile(default_path(os.environ)).device()
    if name.endswith(".toml") or ".toml#" in name:
        file, _, wanted = name.partition("#")
        found = devices_in(Path(file))
        if wanted:
            if wanted not in found:
                raise ConfigError(f"{file} has no device {wanted!r}; it has {', '.join(found)}")
            return found[wanted]
        if len(found) != 1:
            raise ConfigError(f"{file} describes {len(found)} devices; pick one as {file}#NAME")
        return next(iter(found.values()))
    return device_by_name(name)


def _split(words: list[str], compared: list[str], *, wants_model: bool) -> tuple[str | None, list[str]]:
    """MODEL and the devices to compare. An option takes one word, so the devices after the first arrive among the
    arguments: there they are told from MODEL by being devices."""
    names = [name for word in compared for name in word.split(",")]
    model = None
    for word in words:
        if compared and _is_device(word):
            names.append(word)
        elif model is None and wants_model:
            model = word
        elif compared:
            raise ConfigError(f"{word!r} is neither a device to compare nor the only model; --list prints the names")
        else:
            raise ConfigError(f"{word!r} is one model too many; `plan` takes MODEL, or --params N")
    return model, list(dict.fromkeys(names))


def _is_device(word: str) -> bool:
    try:
        return word == THIS_MACHINE or bool(_device(word))
    except ConfigError:
        return False


# A view, and what it has no place for.
_APART = {
    "--list": ("--json",),
    "--compare": ("--hardware", "--stages", "--explain", "--plot", "--users"),
    "--stages": ("--explain", "--users", "--json"),
    "--json": ("--explain",),
}


def _check_views(given: Mapping[str, object]) -> None:
    """Refuse an option that the chosen view would ignore. `given`: option -> its value, None or False where absent."""
    used = {option for option, value in given.items() if value not in (None, False)}
    for view, others in _APART.items():
        for other in others:
            if {view, other} <= used:
                raise ConfigError(f"{view} has no place for {other}; ask for them one after the other")


def _needed(model: str | None) -> str:
    if model is None:
        raise ConfigError("no model: pass MODEL (--list prints the names shipped) or --params N")
    return model


def _demand(users: int | None, think_seconds: float, price_per_hour: float | None) -> Demand | None:
    if users is not None:
        return Demand(users, think_seconds, price_per_hour)
    if price_per_hour is not None or think_seconds:
        raise ConfigError("--price-per-hour and --think-time need --users: they tell what those users ask for")
    return None


def _measured(answer: Plan) -> Plan | None:
    """The same scenario on this machine, where it has been measured and is not the one in question."""
    path = default_path(os.environ)
    if answer.device.name == THIS_MACHINE or not path.exists():
        return None
    here = read_profile(path).device()
    return Plan(replace(answer.scenario, device=here, tp=1))


def _shape_from_hub(name: str) -> ModelShape:
    """config.json alone is fetched, into huggingface_hub's own cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repository, _, revision = name.partition("@")
    try:
        path = hf_hub_download(repository, "config.json", revision=revision or None)
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise ModelError(f"hf:{name}: no config.json ({reason}); check the name and the network") from None
    return shape_in(Path(path), name=repository)
