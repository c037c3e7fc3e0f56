"""`pellucid doctor`: what was found on this machine, what the engine makes of it, and what to change.

It asks what the engine asks (the same settings, the same choice of kernels, the same probe) and decides nothing itself.
The report goes to stdout; exit status 0 where serving is possible as asked, 2 where it is not.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from pellucid import __version__
from pellucid.cli.diagnosis import Facts, Finding, findings
from pellucid.cli.fetch import MODEL_HELP
from pellucid.cli.measure import machine_rates
from pellucid.cli.options import settings_options
from pellucid.cli.plan import load_shape
from pellucid.cli.progress import loading
from pellucid.core.errors import ConfigError, PellucidError
from pellucid.models.config import ModelConfig, load_model_config
from pellucid.models.sources import default_cache_dir, resolve
from pellucid.planner.profile import MachineProfile, default_path, profile_from, read_profile
from pellucid.planner.quantity import format_bytes, format_seconds
from pellucid.runtime.config import RuntimeConfig, processor_flags
from pellucid.runtime.machine import Machine, look, missing_for_native
from pellucid.settings import EngineSettings

_SECONDS_EACH = 0.3
# Where no model is named: one whose sizes suit every kernel.
_ANY_MODEL = ModelConfig("llama", 32_000, 2048, 5632, 22, 32, 4, 64, 2048, 1e-5, 1e4)


@dataclass(frozen=True, slots=True)
class Choice:
    """What the engine would compute with: the kernels' name, or why nothing does (`refusal`), and why the native
    kernels stay out, if they do (`obstacle`)."""

    kernels: str | None
    obstacle: str | None = None
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """All that is printed. `rates` is None where nothing could be measured."""

    machine: Machine
    choice: Choice
    model: str | None
    isa: str
    dtype: str
    cache_dtype: str
    threads: int
    kv_bytes: int
    weight_bytes: float
    rates: MachineProfile | None
    paths: Mapping[str, Path]
    findings: tuple[Finding, ...]

    @property
    def can_serve(self) -> bool:
        return all(finding.severity != "error" for finding in self.findings)


@settings_options(EngineSettings)
def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help=f"Also check this model. {MODEL_HELP}", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    *,
    settings: EngineSettings,
) -> None:
    """What was found on this machine, which kernels serve and why, how fast it is, and what to change."""
    with loading("looking at this machine") as progress:
        report = examine(settings, model, os.environ, say=progress)
    if as_json:
        print(json.dumps(to_json(report), indent=2))
    else:
        print_report(report)
    if not report.can_serve:
        raise typer.Exit(2)


def examine(settings: EngineSettings, model: str | None, environment: Mapping[str, str], *, say: Any) -> Report:
    """Look, choose, measure and judge. `say` is told what is going on."""
    machine, runtime = look(), settings.runtime()
    config, weight_bytes, refusals = _ANY_MODEL, 0.0, []
    if model is not None:
        say(f"reading {model}")
        try:
            config = load_model_config(resolve(model).path)
            weight_bytes = load_shape(model).weights.total
        except PellucidError as error:
            refusals.append(str(error))
    say("loading PyTorch")
    choice = _choose(runtime, config)
    refusals += [choice.refusal] if choice.refusal else []
    say("measuring")
    rates = _measure(settings.isa)
    paths = {"models": default_cache_dir(environment), "profile": default_path(environment)}
    facts = Facts(
        machine=machine,
        isa=settings.isa,
        threads=settings.threads,
        kv_bytes=settings.kv_memory,
        weight_bytes=weight_bytes,
        missing=missing_for_native(),
        obstacle=choice.obstacle,
        refusals=tuple(refusals),
        bandwidth=rates.bandwidth.rate if rates else None,
        profile_bandwidth=_profile_bandwidth(paths["profile"]),
        unwritable=tuple(str(path) for path in paths.values() if not _writable(path)),
        flags=processor_flags(),
        environment=environment,
    )
    return Report(
        machine=machine,
        choice=choice,
        model=model,
        isa=settings.isa,
        dtype=runtime.dtype,
        cache_dtype=runtime.cache_dtype,
        threads=runtime.threads,
        kv_bytes=settings.kv_memory,
        weight_bytes=weight_bytes,
        rates=rates,
        paths=paths,
        findings=tuple(findings(facts)),
    )


def print_report(report: Report) -> None:
    """The report for people."""
    console = Console(highlight=False, soft_wrap=True)
    lines = list(_lines(report))
    width = max(len(label) for label, _ in lines)
    for label, text in lines:
        console.print(Text.assemble((label.ljust(width), "dim"), "  ", text))
    for finding in report.findings:
        style = "bold red" if finding.severity == "error" else "yellow"
        console.print(Text.assemble((finding.severity, style), ": ", finding.text))
    if not report.findings:
        console.print(Text("nothing to change", style="green"))


def to_json(report: Report) -> dict[str, Any]:
    """The report under stable names; bytes, seconds and rates unscaled."""
    rates = asdict(report.rates) if report.rates else {}
    return {
        "version": __version__,
        "python": platform.python_version(),
        "torch": _torch_version(),
        "machine": asdict(report.machine),
        "kernels": asdict(report.choice),
        "model": report.model,
        "isa": report.isa,
        "dtype": report.dtype,
        "cache_dtype": report.cache_dtype,
        "num_threads": report.threads,
        "kv_bytes": report.kv_bytes,
        "weight_bytes": report.weight_bytes,
        "measured": {
            name: rates.get(name) for name in ("read_bandwidth", "matrix_peak", "host_copy", "barrier_seconds")
        },
        "paths": {name: str(path) for name, path in report.paths.items()},
        "findings": [finding._asdict() for finding in report.findings],
        "can_serve": report.can_serve,
    }


def _lines(report: Report) -> Iterator[tuple[str, str]]:
    machine, choice = report.machine, report.choice
    yield "pellucid", f"{__version__}, Python {platform.python_version()}, PyTorch {_torch_version() or 'missing'}"
    busy = "" if machine.busy_processors is None else f", {machine.busy_processors:.1f} busy with other work"
    yield "processor", f"{machine.processor}: {machine.num_cores} cores, {machine.num_processors} threads{busy}"
    free = "unknown" if machine.available_bytes is None else format_bytes(machine.available_bytes)
    yield "memory", f"{format_bytes(machine.memory_bytes)}, {free} free"
    yield "native levels", ", ".join(machine.levels) or "none: the native kernels are not installed"
    yield "kernels used", f"{choice.kernels or 'none'} ({_why(report)})"
    yield "precision", report.dtype
    yield "compute threads", str(report.threads)
    pool = format_bytes(report.kv_bytes) if report.kv_bytes else "what is free beside the model"
    yield "KV pool", f"{pool}, in {report.cache_dtype}"
    if report.model is not None:
        weights = format_bytes(report.weight_bytes) if report.weight_bytes else "cannot be read"
        yield "model", f"{report.model}: weights {weights}"
    if report.rates is not None:
        for label, rate, spread in machine_rates(report.rates):
            yield label, f"{rate} ± {spread:.0%}"
        if report.rates.barrier_seconds is not None:
            yield "barrier", format_seconds(report.rates.barrier_seconds)
    for name, path in report.paths.items():
        yield name, f"{path}" + ("" if path.exists() else " (not there yet)")


def _why(report: Report) -> str:
    choice = report.choice
    if choice.refusal is not None:
        return choice.refusal
    if choice.obstacle is not None:
        return f"not the native ones: {choice.obstacle}"
    return "the best that fits" if report.isa == "auto" else f"asked for by isa {report.isa}"


def _choose(runtime: RuntimeConfig, model: ModelConfig) -> Choice:
    """As the engine chooses on start."""
    try:
        from pellucid.runtime.executor import choose_kernels, native_needs
    except ImportError as error:
        return Choice(None, refusal=f"PyTorch cannot be loaded ({error}); reinstall Pellucid")
    obstacle = None if runtime.isa == "reference" else native_needs(runtime, model).obstacle(runtime.device)
    try:
        name = choose_kernels(runtime, model).name
    except ConfigError as error:
        return Choice(None, obstacle, str(error))
    return Choice(name, obstacle)


def _measure(isa: str) -> MachineProfile | None:
    """Memory and arithmetic in a few seconds; None where the level asked for cannot be had."""
    from pellucid.runtime.measure import measure_machine

    try:
        row = measure_machine(seconds_each=_SECONDS_EACH, isa=isa, whole=False)
    except ConfigError:
        return None
    return profile_from({**row, "measured_at": "now", "versions": {}})


def _profile_bandwidth(path: Path) -> float | None:
    try:
        return read_profile(path).bandwidth.rate
    except ConfigError:
        return None


def _writable(path: Path) -> bool:
    """Whether the path, or the nearest folder above it that exists, can be written."""
    nearest = next(p for p in (path, *path.parents) if p.exists())
    return os.access(nearest, os.W_OK)


def _torch_version() -> str | None:
    try:
        return version("torch")
    except PackageNotFoundError:
        return None
