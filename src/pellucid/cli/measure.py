"""`pellucid measure`: this machine's rates, and this engine's on it, into the profile that everything else reads.

Progress goes to stderr, the summary to stdout. Mounted with `app.command()`.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pellucid import __version__
from pellucid.assembly import build_engine
from pellucid.build import load_model, plan_engine
from pellucid.cli.plan import load_shape
from pellucid.models.sources import DEFAULT_MODEL
from pellucid.planner.hardware import Overheads
from pellucid.planner.kernel_rates import TimedStep, rates_from
from pellucid.planner.profile import MachineProfile, default_path, profile_from, write_profile
from pellucid.planner.quantity import format_bytes, format_flops, format_rate, format_seconds
from pellucid.planner.shape import ModelShape
from pellucid.runtime.loading import let_openmp_sleep
from pellucid.runtime.step_timing import StepTiming, standard_batches, time_steps
from pellucid.settings import EngineSettings

_ENGINE_SECONDS = 60.0
_BLOCK_SIZE = 16
NO_MODEL = "none"


def measure(
    model: Annotated[
        str, typer.Argument(help="The model whose steps are timed, as for `serve`; `none` measures the machine alone.")
    ] = DEFAULT_MODEL,
    device: Annotated[
        str, typer.Option(help="What to measure: cpu, or a GPU by PyTorch's name (cuda, cuda:1).")
    ] = "cpu",
    output: Annotated[Path | None, typer.Option(help="Where the profile goes (default: the state directory).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as one JSON document.")] = False,
) -> None:
    """Measure this machine in under two minutes and store the profile; `this-machine` then means it."""
    path = output or default_path(os.environ)
    let_openmp_sleep()  # the machine's part may load PyTorch, before the engine's does
    console = Console(stderr=True)
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console) as bar:
        profile = _machine(bar, device)
        write_profile(profile, path)  # stands even where the engine cannot be timed
        if model != NO_MODEL:
            profile = _with_engine(profile, model, bar)
            write_profile(profile, path)
    typer.echo(f"wrote {path}", err=True)
    if as_json:
        typer.echo(json.dumps(asdict(profile), indent=2))
    else:
        print_profile(profile)


def print_profile(profile: MachineProfile) -> None:
    """The profile for people."""
    console = Console(highlight=False)
    console.print(f"[bold]{profile.machine}[/bold], measured {profile.measured_at}")
    table = Table(box=None, show_header=False, padding=(0, 2))
    for label, rate, spread in machine_rates(profile):
        table.add_row(label, rate, f"± {spread:.0%}")
    for linear in profile.linear:
        label = f"engine, {linear.part} in {linear.weights}, {linear.num_rows} row(s)"
        table.add_row(label, f"{format_seconds(linear.seconds_per_param * 1e6)} per million", f"± {linear.spread:.0%}")
    for attention in profile.attention:
        rates = f"{format_flops(attention.flops, 'FLOP/s')}, {format_rate(attention.read_bytes)}"
        label = f"engine, attention over {format_bytes(attention.at_bytes)} in {attention.cache}"
        table.add_row(label, rates, f"± {attention.spread:.0%}")
    console.print(table)


def machine_rates(profile: MachineProfile) -> Iterator[tuple[str, str, float]]:
    """The rates of the machine itself: what was measured, how fast it is, and the relative spread."""
    for read in profile.read_bandwidth:
        threads = "1 thread" if read.threads == 1 else f"{read.threads} threads"
        yield f"read, {threads}, {read.size_bytes >> 20} MiB", format_rate(read.rate), read.spread
    for peak in profile.matrix_peak:
        yield f"{peak.format} products, {peak.implementation}", format_flops(peak.rate, "FLOP/s"), peak.spread
    for label, rate in (("memory copy", profile.host_copy), ("disk read", profile.disk_read)):
        if rate is not None:
            yield label, format_rate(rate.rate), rate.spread


def _machine(bar: Progress, device: str) -> MachineProfile:
    task = bar.add_task("machine", total=1.0)

    def progress(share: float) -> None:
        bar.update(task, completed=share)

    if device == "cpu":
        from pellucid.runtime.measure import measure_machine

        row = measure_machine(progress=progress)
    else:
        from pellucid.runtime.measure_gpu import Cuda, measure_accelerator

        row = measure_accelerator(Cuda(device), progress=progress)
    stamp = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": _versions(),
    }
    return profile_from({**row, **stamp})


def _with_engine(profile: MachineProfile, model: str, bar: Progress) -> MachineProfile:
    """The profile with the engine's own kernels, timed on `model`."""
    shape, loaded = load_shape(model), load_model(model, progress=False)
    batches = standard_batches(loaded.config.max_context)
    num_tokens = _BLOCK_SIZE * max(b.num_blocks(_BLOCK_SIZE) for b in batches)
    settings = EngineSettings(block_size=_BLOCK_SIZE, device=profile.accelerator or "cpu")
    token_bytes = loaded.config.cache_spec(settings.runtime().cache_dtype).bytes_per_token
    settings = replace(settings, kv_memory=num_tokens * token_bytes)
    loading = bar.add_task(f"load {shape.name}")
    engine = build_engine(settings, loaded.files.path, plan_engine(settings, loaded), lambda text: None)
    bar.update(loading, total=1, completed=1)
    timing = bar.add_task("engine")
    timings = time_steps(
        engine.executor,
        batches,
        block_size=_BLOCK_SIZE,
        limit_seconds=_ENGINE_SECONDS,
        progress=lambda done, total: bar.update(timing, completed=done, total=total),
    )
    return with_timings(profile, shape, timings)


def with_timings(profile: MachineProfile, shape: ModelShape, timings: Sequence[StepTiming]) -> MachineProfile:
    """The profile with kernel rates and overheads from timed steps of the model `shape`."""
    rates = rates_from(shape, [TimedStep(t.features, t.seconds - t.prepare_seconds, t.spread) for t in timings])
    prepare = {t.features.num_sequences: t.prepare_seconds for t in timings if t.batch.num_new == 1}
    most = max(prepare)
    per_sequence = max(0.0, (prepare[most] - prepare[1]) / (most - 1))
    overheads = Overheads(step_seconds=prepare[1], sequence_seconds=per_sequence)
    return replace(profile, overheads=overheads, linear=rates.linear, attention=rates.attention)


def _versions() -> dict[str, str]:
    found = {"pellucid": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
