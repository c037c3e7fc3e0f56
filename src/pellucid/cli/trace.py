"""`pellucid trace ...`: look at a trace, change it, make one. Results to stdout, progress to stderr."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer

from pellucid.cli import trace_view
from pellucid.cli.options import flag, flag_options
from pellucid.cli.progress import loading, progress_bars
from pellucid.cli.tokenizing import HELP as TOKENIZER_HELP
from pellucid.cli.tokenizing import encoder
from pellucid.cli.trace_synth import Synthesis
from pellucid.core.errors import ConfigError
from pellucid.workload import transforms
from pellucid.workload.analyze import Ceilings, Question, analyze
from pellucid.workload.formats import ReadOptions, TraceFile, format_names, open_trace
from pellucid.workload.lint import clock_tick, lint
from pellucid.workload.trace import (
    DEFAULT_BLOCK_SIZE,
    TraceError,
    file_sha256,
    write_trace,
)
from pellucid.workload.transforms import Stage

app = typer.Typer(no_args_is_help=True, help="Read, check, change, analyse and make request traces.")

Input = Annotated[Path, typer.Argument(metavar="FILE", help="A trace of any known format, plain, .gz or .tar.gz.")]
Output = Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Where to write (.gz packs; - is stdout).")]
TokenizerName = Annotated[str | None, typer.Option("--tokenizer", help=TOKENIZER_HELP)]
BlockSize = Annotated[int, typer.Option("--block-size", min=1, help="Tokens per block where ids are made from tokens.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Count bad rows and go on.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document.")]
Seed = Annotated[int, typer.Option("--seed", help="Equal seeds give equal rows.")]


@dataclass(frozen=True, slots=True)
class Reading:
    """How a trace is to be read."""

    format_name: str | None = flag(None, f"Refuse another format: {', '.join(format_names())}.", flag="--format")
    tokenizer: str | None = flag(None, TOKENIZER_HELP)
    block_size: int = flag(DEFAULT_BLOCK_SIZE, "Tokens per block where ids are made from tokens.", min=1)
    skip_bad: bool = flag(False, "Count bad rows and go on.", flag="--skip-bad")

    def open(self, file: Path) -> TraceFile:
        """The trace, with a line on stderr about what a reader must know of it."""
        options = ReadOptions(encode=encoder(self.tokenizer), block_size=self.block_size, skip_bad=self.skip_bad)
        trace = open_trace(file, format_name=self.format_name, options=options)
        if trace.note is not None:
            typer.echo(f"note: {trace.note}", err=True)
        return trace


def print_json(document: Any) -> None:
    """One document, indented, on stdout."""
    typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


@app.command("lint")
@flag_options(Reading)
def lint_command(
    file: Input,
    as_json: AsJson = False,
    *,
    reading: Reading,
) -> None:
    """Say what is wrong with a trace, what it does to results, and what mends it. Exit status 1 if anything is."""
    trace = reading.open(file)
    with progress_bars() as progress:
        report = lint(trace, progress)
    if as_json:
        findings = [finding._asdict() for finding in report.findings]
        print_json({"trace": str(file), "format": trace.format_name, **report._asdict(), "findings": findings})
    else:
        trace_view.print_lint(trace, report)
    raise typer.Exit(1 if report.findings else 0)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of a trace."""

    model: str | None = flag(None, "A model as `pellucid plan` takes it, for the ladder.")
    hardware: str | None = flag(None, "A device as `pellucid plan` takes it.")
    exact: bool = flag(False, "Keep every block use: slower, no error bars.", flag="--exact")
    cache_sizes: str = flag("", "Points of the capacity curve, in tokens.", metavar="N,N,...")
    engine_block: int = flag(16, "Block size of the engine in mind.", min=1)

    def question(self) -> Question:
        sizes = tuple(_tokens(part) for part in self.cache_sizes.split(",")) if self.cache_sizes else ()
        return Question(self.exact, sizes, self.engine_block, _ceilings(self.model, self.hardware))


@app.command("analyze")
@flag_options(Asked, Reading)
def analyze_command(
    file: Input,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with figures.")] = None,
    as_json: AsJson = False,
    *,
    asked: Asked,
    reading: Reading,
) -> None:
    """Lengths, arrivals, sessions, prefix reuse by each definition, the capacity curve, and the ladder of ceilings."""
    trace, question = reading.open(file), asked.question()
    with progress_bars() as progress:
        result = analyze(trace, question, progress)
    document = {**result.document, "model": asked.model, "hardware": asked.hardware}
    if html is not None:
        from pellucid.workload.report import write_analysis

        write_analysis(html, document, result.figures)
        typer.echo(f"wrote {html}", err=True)
    if as_json:
        print_json(document)
    else:
        trace_view.print_analysis(document)


def _tokens(text: str) -> int:
    units = {"k": 1_000, "M": 1_000_000, "G": 1_000_000_000}
    digits = text.strip().rstrip("kMG")
    try:
        value = int(float(digits) * units.get(text.strip()[len(digits) :], 1))
    except ValueError:
        value = 0
    if value < 1:
        raise ConfigError(f"--cache-sizes {text!r}: expected a number of tokens such as 200k or 3M")
    return value


def _ceilings(model: str | None, hardware: str | None) -> Ceilings | None:
    if model is None and hardware is None:
        return None
    if model is None:
        raise ConfigError("--hardware needs --model: the ladder is the time of a model on a device")
    from pellucid.cli.ceilings import PlannerCeilings
    from pellucid.cli.plan import choose_device, load_shape
    from pellucid.planner.hardware import Overrides

    return PlannerCeilings(load_shape(model), choose_device(hardware, Overrides()))


def _write(target: str, stage: Stage) -> None:
    """Write a stage; a summary line goes to stderr."""
    where = sys.stdout.buffer if target == "-" else target
    with loading("writing"):
        num_rows = write_trace(where, stage.header, stage.rows)
    typer.echo(f"wrote {num_rows:,} requests to {'stdout' if target == '-' else target}", err=True)


def _transform(file: Path, target: str, reading: Reading, change: Callable[[Stage, str], Stage]) -> None:
    """Read, change, write; never onto the file that is being read."""
    if target != "-" and Path(target).exists() and Path(target).samefile(file):
        raise TraceError(f"{target} is the file that is read; write to another one")
    trace = reading.open(file)
    _write(target, change(Stage(trace.header, trace), file_sha256(file)))
    if trace.num_skipped:
        typer.echo(f"skipped {trace.num_skipped:,} bad rows", err=True)


@app.command()
@flag_options(Reading)
def convert(
    file: Input,
    output: Output,
    sort: Annotated[bool, typer.Option("--sort", help="Put rows in time order.")] = False,
    from_zero: Annotated[bool, typer.Option("--from-zero", help="Let the first row arrive at 0.")] = False,
    chain_hashes: Annotated[
        bool, typer.Option("--chain-hashes", help="Ids name one block: make them name prefixes.")
    ] = False,
    drop_token_ids: Annotated[
        bool, typer.Option("--drop-token-ids", help="Keep only the hashes made from them.")
    ] = False,
    *,
    reading: Reading,
) -> None:
    """Write any trace in our format, with repairs where asked for."""
    wanted = [
        (sort, transforms.sort_rows),
        (from_zero, transforms.from_zero),
        (chain_hashes, transforms.chain),
        (drop_token_ids, transforms.without_tokens),
    ]

    def change(stage: Stage, source: str) -> Stage:
        stage = stage.then("convert", stage.rows, source, file=file.name)
        for asked, step in wanted:
            stage = step(stage, "") if asked else stage
        return stage

    _transform(file, output, reading, change)


@app.command("slice")
@flag_options(Reading)
def slice_command(
    file: Input,
    output: Output,
    start: Annotated[float | None, typer.Option(help="Seconds; becomes the new 0.")] = None,
    end: Annotated[float | None, typer.Option(help="Seconds, exclusive.")] = None,
    first: Annotated[int | None, typer.Option(min=0, help="Number of the first request.")] = None,
    last: Annotated[int | None, typer.Option(min=1, help="Number of the last request, exclusive.")] = None,
    *,
    reading: Reading,
) -> None:
    """Cut out a time span or a range of requests."""
    if (start, end, first, last) == (None, None, None, None):
        raise ConfigError("slice needs --start, --end, --first or --last")
    _transform(
        file,
        output,
        reading,
        lambda stage, source: transforms.slice_rows(stage, source, start=start, end=end, first=first, last=last),
    )


@app.command()
@flag_options(Reading)
def scale(
    file: Input,
    output: Output,
    speed: Annotated[float | None, typer.Option(help="Divide all times by this.")] = None,
    rate: Annotated[float | None, typer.Option(help="Choose the speed that gives so many requests a second.")] = None,
    *,
    reading: Reading,
) -> None:
    """Make a trace faster or slower and keep the shape of its bursts."""
    if (speed is None) == (rate is None):
        raise ConfigError("scale needs exactly one of --speed and --rate")
    if speed is None:
        assert rate is not None
        times = _times(reading.open(file))
        if len(times) < 2 or not times.max() > times.min():
            raise TraceError(f"{file}: all requests arrive at once, so no speed gives a rate; use `trace synth`")
        speed = float(rate * (times.max() - times.min()) / (len(times) - 1))
    factor = speed
    _transform(file, output, reading, lambda stage, source: transforms.scale(stage, source, speed=factor))


@app.command()
@flag_options(Reading)
def dequantize(
    file: Input,
    output: Output,
    tick: Annotated[float | None, typer.Option(help="Seconds between ticks (default: found in the trace).")] = None,
    seed: Seed = 0,
    *,
    reading: Reading,
) -> None:
    """Spread requests that a coarse clock put on one instant over the clock's tick."""
    found = tick if tick is not None else clock_tick(_times(reading.open(file)))
    if found is None:
        raise TraceError(f"{file}: the clock does not tick; pass --tick if it does all the same")
    width = found
    _transform(file, output, reading, lambda stage, source: transforms.dequantize(stage, source, tick=width, seed=seed))


def _times(trace: TraceFile) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.fromiter((row.arrival_time for row in trace), np.float64)


@app.command()
@flag_options(Reading)
def sample(
    file: Input,
    output: Output,
    share: Annotated[float, typer.Option(help="Share of sessions to keep.")] = 1.0,
    drop_empty: Annotated[bool, typer.Option("--drop-empty", help="Leave out rows without input or output.")] = False,
    drop_duplicates: Annotated[bool, typer.Option("--drop-duplicates", help="Leave out repeated rows.")] = False,
    seed: Seed = 0,
    *,
    reading: Reading,
) -> None:
    """Keep a random share of whole sessions, and drop rows that cannot be served."""
    _transform(
        file,
        output,
        reading,
        lambda stage, source: transforms.sample(
            stage, source, share=share, seed=seed, drop_empty=drop_empty, drop_duplicates=drop_duplicates
        ),
    )


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Two or more traces in time order.")],
    output: Output,
    tenants: Annotated[str, typer.Option(help="A tenant name for each file: a,b,...")] = "",
    offsets: Annotated[str, typer.Option(help="Seconds to move each file by: 0,30,...")] = "",
    tokenizer: TokenizerName = None,
    block_size: BlockSize = DEFAULT_BLOCK_SIZE,
    skip_bad: SkipBad = False,
) -> None:
    """Put several traces into one, in time order."""
    if len(files) < 2:
        raise ConfigError("merge needs two or more traces")
    names = [name for name in tenants.split(",") if name]
    if names and len(names) != len(files):
        raise ConfigError(f"--tenants names {len(names)}, but there are {len(files)} files")
    try:
        moves = [float(part) for part in offsets.split(",")] if offsets else [0.0] * len(files)
    except ValueError:
        raise ConfigError(f"--offsets {offsets!r}: expected seconds separated by commas") from None
    if len(moves) != len(files):
        raise ConfigError(f"--offsets has {len(moves)} numbers, but there are {len(files)} files")
    traces = [Reading(None, tokenizer, block_size, skip_bad).open(file) for file in files]
    stages = [Stage(trace.header, trace) for trace in traces]
    _write(output, transforms.merge(stages, [file_sha256(file) for file in files], tenants=names, offsets=moves))


@app.command()
@flag_options(Reading)
def anonymize(
    file: Input,
    output: Output,
    key: Annotated[
        str | None, typer.Option(help="Secret that keeps ids comparable between files (default: drawn).")
    ] = None,
    *,
    reading: Reading,
) -> None:
    """Take out token ids, outcomes and unknown fields, and replace ids and names by keyed digests."""
    secret = key.encode() if key is not None else secrets.token_bytes(32)
    _transform(
        file,
        output,
        reading,
        lambda stage, source: transforms.anonymize(stage, source, key=secret),
    )


@app.command()
@flag_options(Synthesis)
def synth(output: Output, *, wanted: Synthesis) -> None:
    """Make a trace from a description, or from ServeGen client profiles."""
    _write(output, wanted.stage())
