"""`pellucid bench` and `pellucid report`: load on any OpenAI-compatible server, and runs side by side.

Results go to stdout, progress to stderr. Ctrl-C ends a run early and still reports what was measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pellucid.cli import bench_view
from pellucid.cli.bench_load import Described, Load, named_load, synthetic_load, trace_load
from pellucid.cli.options import flag, flag_options
from pellucid.cli.tokenizing import HELP as TOKENIZER_HELP
from pellucid.cli.tokenizing import encoder
from pellucid.cli.trace import print_json
from pellucid.core.errors import ConfigError
from pellucid.workload.capacity import CapacitySearch, sweep_rates
from pellucid.workload.client import BenchError, LoadClient, Target, Tokenize, server_tokenizer, single_token_words
from pellucid.workload.compare import compare_all, load_run
from pellucid.workload.metrics import SLO, RequestRecord, parse_seconds
from pellucid.workload.prompts import WORDS
from pellucid.workload.run import RunOptions, RunResult, run_workload
from pellucid.workload.workloads import NAMED, Pacing

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadFlags:
    """What is sent, and when."""

    workload: str = flag("", f"Named loads, separated by commas: {', '.join(NAMED)}.", flag="--workload -w")
    trace: Path | None = flag(None, "Replay a trace of any known format.", metavar="FILE")
    rate: float | None = flag(None, "Requests a second (a trace is sped up or slowed down to it).")
    speed: float = flag(1.0, "Divide a trace's times by this.")
    requests: int | None = flag(None, "At most so many requests.", min=1)
    duration: float = flag(30.0, "Seconds measured, of a synthetic load.")
    ramp: float = flag(0.0, "Seconds at the start that load the server but are not measured.")
    arrivals: str = flag("poisson", "Of a synthetic load; see `pellucid trace synth --help`.")
    input_len: str = flag("256", "N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA[:MAX].")
    output_len: str = flag("64", "The same.")
    pattern: str = flag("independent", "What prompts share; see `pellucid trace synth --help`.")
    tenants: str = flag("", "Names with weights: a=2,b=1.")
    concurrency: int | None = flag(None, "Closed loop: so many users who wait for answers.", min=1)
    think_time: str = flag("0s", "Closed loop: pause between the turns of a session.")
    seed: int = flag(0, "Of a synthetic load's schedule.")

    @property
    def names(self) -> list[str]:
        """The named loads."""
        return [name for name in self.workload.split(",") if name]

    @property
    def kind(self) -> str:
        """What decides which of the flags mean something."""
        return "named workload" if self.names else "trace" if self.trace is not None else "synthetic load"

    def loads(self, tokenizer: str | None) -> list[Load]:
        """The loads that the flags describe."""
        think = parse_seconds(self.think_time)
        pacing = Pacing(speed=self.speed, ramp=self.ramp, concurrency=self.concurrency, think_seconds=think)
        if self.names:
            return [named_load(name) for name in self.names]
        if self.trace is not None:
            return [trace_load(self.trace, encoder(tokenizer), pacing, self.rate, self.requests)]
        described = Described(self.arrivals, self.input_len, self.output_len, self.pattern, self.tenants, self.seed)
        return [synthetic_load(described, pacing, self.rate, self.duration, self.requests)]


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """How the server is spoken to."""

    model: str = flag("", "Model name to ask for (default: the first one listed).")
    endpoint: str = flag("completions", "completions or chat.")
    prompts: str = flag("text", "text, or ids (exact lengths; needs the target's tokenizer).")
    tokenizer: str | None = flag(None, TOKENIZER_HELP)
    api_key: str = flag("", "Bearer token.", envvar="PELLUCID_BENCH_API_KEY")
    body: str = flag("{}", "Fields added to every request's body.", metavar="JSON")
    timeout: str = flag("600s", "Longest time for one request.")

    def target(self, url: str) -> Target:
        """The server at `url`. Raises ConfigError."""
        if self.endpoint not in ("completions", "chat"):
            raise ConfigError(f"--endpoint {self.endpoint!r}: expected completions or chat")
        return Target(
            url=url,
            model=self.model,
            endpoint=cast(Any, self.endpoint),
            api_key=self.api_key,
            timeout=parse_seconds(self.timeout),
            extra=_extra(self.body),
        )


@dataclass(frozen=True, slots=True)
class RunFlags:
    """How often it is sent, and how it is judged."""

    slo: str | None = flag(None, "What a good request keeps: ttft=2s,itl=100ms,stall=1s,e2e=30s.")
    find_capacity: bool = flag(False, "Search the highest rate that keeps the SLO.", flag="--find-capacity")
    attain: float = flag(0.99, "Share of offered requests that must be good.")
    repeats: int = flag(3, "Runs at each rate of a search or sweep.", min=1)
    sweep: str | None = flag(None, "Measure several rates: rate=1:20, rate=1:20:8, rate=1,2,5.")
    salt: str = flag("", "Of the prompts' words; a fresh one is drawn otherwise.")
    warmup: bool = flag(True, "Send a few other requests first.", flag="--warmup/--no-warmup")
    compat: bool = flag(False, "Add what other tools would print from the same bytes.", flag="--compat")

    def options(self) -> RunOptions:
        """For the runs. Raises ConfigError."""
        objective = SLO.parse(self.slo) if self.slo else None
        if self.find_capacity and objective is None:
            raise ConfigError("--find-capacity needs --slo: without one every rate is good")
        return RunOptions(slo=objective, salt=self.salt, warmup=self.warmup, compat=self.compat)


@flag_options(LoadFlags, ServerFlags, RunFlags)
def bench(
    context: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="The server, such as http://127.0.0.1:8000.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="STEM", help="Write STEM.json and STEM.requests.jsonl.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with figures.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    *,
    load: LoadFlags,
    server: ServerFlags,
    measured: RunFlags,
) -> None:
    """Measure a server: time to first token, between tokens, throughput, goodput. See docs/benchmarking.md."""
    target = server.target(url)
    _refuse_idle_options(context, load.kind)
    settings = measured.options()
    loads = load.loads(server.tokenizer)
    session = _Session(target, settings, server.prompts, server.tokenizer)
    if measured.find_capacity:
        lowest = loads[0].lowest_rate
        search = CapacitySearch(attain=measured.attain, repeats=measured.repeats, first=max(1.0, lowest), lowest=lowest)
        _finish_many(_run(session.find_capacity(loads[0], search)), output, as_json, bench_view.print_capacity)
    elif measured.sweep:
        points = _run(session.sweep(loads[0], sweep_rates(measured.sweep), measured.repeats))
        _finish_many(points, output, as_json, bench_view.print_sweep)
    else:
        _finish_runs(_run(session.measure(loads)), output, html, as_json)


_ONLY_FOR = {
    "rate": ("trace", "synthetic load"),
    "speed": ("trace",),
    "requests": ("trace", "synthetic load"),
    "ramp": ("trace", "synthetic load"),
    "concurrency": ("trace", "synthetic load"),
    **dict.fromkeys(
        ("duration", "arrivals", "input_len", "output_len", "pattern", "tenants", "seed"), ("synthetic load",)
    ),
}


def _refuse_idle_options(context: typer.Context, kind: str) -> None:
    """No option is taken and then ignored: each one given must mean something for what is run."""
    given = {name for name in context.params if str(context.get_parameter_source(name)).rpartition(".")[2] != "DEFAULT"}

    def refuse(name: str, why: str) -> None:
        if name in given:
            raise ConfigError(f"--{name.replace('_', '-')} {why}")

    for name, kinds in _ONLY_FOR.items():
        if kind not in kinds:
            refuse(name, f"has no meaning for a {kind}")
    searching, sweeping, closed = (name in given for name in ("find_capacity", "sweep", "concurrency"))
    many = searching or sweeping
    if {"rate", "speed"} <= given:
        raise ConfigError("--rate and --speed both set how fast a trace is sent; give one")
    if searching and sweeping:
        raise ConfigError("--find-capacity and --sweep exclude each other")
    if many and kind == "named workload":
        raise ConfigError("a named --workload has its own schedule; --find-capacity and --sweep vary a rate")
    if many and closed:
        raise ConfigError("--concurrency is closed loop; --find-capacity and --sweep vary the rate of an open one")
    if many:
        refuse("html", "is for single runs")
        refuse("rate", "is varied by --find-capacity and --sweep; leave it out")
        refuse("speed", "is varied by --find-capacity and --sweep; leave it out")
    else:
        refuse("repeats", "needs --find-capacity or --sweep")
    if not searching:
        refuse("attain", "needs --find-capacity")
    if closed:
        for name in ("ramp", "rate", "speed", "duration"):
            refuse(name, "is for open loop; --concurrency is closed loop")
        if kind == "synthetic load" and "requests" not in given:
            raise ConfigError("a synthetic load in closed loop needs --requests: users never stop by themselves")
    else:
        refuse("think_time", "needs --concurrency")


def report(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="RUN.json...", help="Two or more summaries; the first of each load is its base."),
    ],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one page with tables and figures.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Compare runs: ratios to the first with 95 % intervals, paired by request where both sent the same load."""
    if len(files) < 2:
        raise ConfigError("report compares two or more runs; give it two .json files written by `pellucid bench -o`")
    runs = [load_run(file) for file in files]
    document = {"comparisons": compare_all(runs)}
    if html is not None:
        from pellucid.workload.report import write_comparison

        write_comparison(html, runs, document["comparisons"])
        typer.echo(f"wrote {html}", err=True)
    if as_json:
        print_json(document)
    else:
        bench_view.print_comparison(document)


def _extra(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--body is not a JSON object ({error})") from None


class _Session:
    """The runs of one command against one server."""

    def __init__(self, target: Target, options: RunOptions, prompts: str, tokenizer: str | None) -> None:
        if prompts not in ("text", "ids"):
            raise ConfigError(f"--prompts {prompts!r}: expected text or ids")
        self.target = target
        self.options = options
        self._ids = prompts == "ids"
        self._num_runs = 0
        self._encode = encoder(tokenizer)

    async def _prepared(self) -> LoadClient:
        """The target with its model's name known, and the pool of token ids where prompts are ids."""
        async with LoadClient(self.target) as client:
            if not self.target.model:
                self.target = msgspec.structs.replace(self.target, model=await client.served_model())
                client.target = self.target
            if self._ids and self.options.token_ids is None:
                pool = tuple(await single_token_words(WORDS, self._tokenizer(client)))
                self.options = msgspec.structs.replace(self.options, token_ids=pool)
        return LoadClient(self.target)

    def _tokenizer(self, client: LoadClient) -> Tokenize:
        encode = self._encode
        if encode is None:
            return server_tokenizer(client)

        async def tokenize(text: str) -> Sequence[int]:
            return encode(text)

        return tokenize

    async def measure(self, loads: list[Load]) -> list[RunResult]:
        results = []
        async with await self._prepared() as client:
            for load in loads:
                results.append(await self._once(client, load, None))
                if results[-1].document["interrupted"]:
                    break
        return results

    async def _once(self, client: LoadClient, load: Load, rate: float | None, label: str = "") -> RunResult:
        workload = load.make(rate)
        self._num_runs += 1
        salt = f"{self.options.salt}/{self._num_runs}" if self.options.salt else ""
        options = msgspec.structs.replace(self.options, about=load.about, salt=salt)
        with _progress(label or workload.name, workload.num_requests) as on_record:
            return await run_workload(client, workload, options, on_record)

    async def find_capacity(self, load: Load, search: CapacitySearch) -> dict[str, Any]:
        async with await self._prepared() as client:

            async def attainment(rate: float) -> tuple[float, bool]:
                result = await self._once(client, load, rate, f"rate {rate:.3g}/s")
                return float(result.document["attainment"] or 0.0), bool(result.document["valid"])

            found = await search.run(attainment)
        slo = self.options.slo
        return {
            **found,
            "slo": {k: v for k, v in (slo._asdict() if slo else {}).items() if v is not None},
            **load.about,
        }

    async def sweep(self, load: Load, rates: list[float], repeats: int) -> dict[str, Any]:
        points = []
        async with await self._prepared() as client:
            for rate in rates:
                runs = [await self._once(client, load, rate, f"rate {rate:.3g}/s") for _ in range(repeats)]
                points.append({"rate": rate, "runs": [run.document for run in runs]})
                if runs[-1].document["interrupted"]:
                    break
        return {"sweep": points}


@contextmanager
def _progress(label: str, total: int | None) -> Iterator[Callable[[RequestRecord], None]]:
    """A live line on stderr: done, failed, time left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    failed = 0
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as progress:
        task = progress.add_task(label, total=total, note="")

        def on_record(record: RequestRecord) -> None:
            nonlocal failed
            failed += not record.ok
            progress.update(task, advance=1, note=f"{failed} failed" if failed else "")

        yield on_record


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop; the first Ctrl-C cancels the run, which then still returns what it has."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def _finish_runs(results: list[RunResult], output: Path | None, html: Path | None, as_json: bool) -> None:
    documents = {result.document["workload"]: result.document for result in results}
    whole: dict[str, Any] = results[0].document if len(results) == 1 else {"workloads": documents}
    for result in results:
        stem = _stem(output, result.document["workload"], len(results))
        if stem is not None:
            _write_run(stem, result)
        if html is not None:
            from pellucid.workload.report import write_run

            page = (
                html if len(results) == 1 else html.with_name(f"{html.stem}-{result.document['workload']}{html.suffix}")
            )
            write_run(page, result.document, result.records)
            typer.echo(f"wrote {page}", err=True)
    if as_json:
        print_json(whole)
    else:
        for document in documents.values():
            bench_view.print_run(document)


def _stem(output: Path | None, name: str, num_runs: int) -> Path | None:
    if output is None or num_runs == 1:
        return output
    return output.with_name(f"{output.name}-{name}")


def _write_run(stem: Path, result: RunResult) -> None:
    """STEM.json and STEM.requests.jsonl beside it."""
    try:
        with open(f"{stem}.requests.jsonl", "wb") as file:
            for record in result.records:
                file.write(msgspec.json.encode(record) + b"\n")
        Path(f"{stem}.json").write_bytes(msgspec.json.format(msgspec.json.encode(result.document), indent=2) + b"\n")
    except OSError as error:
        raise BenchError(f"--output {stem}: cannot write ({error.strerror})") from None
    typer.echo(f"wrote {stem}.json and {stem}.requests.jsonl", err=True)


def _finish_many(
    document: dict[str, Any], output: Path | None, as_json: bool, show: Callable[[dict[str, Any]], None]
) -> None:
    if output is not None:
        Path(f"{output}.json").write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
        typer.echo(f"wrote {output}.json", err=True)
    if as_json:
        print_json(document)
    else:
        show(document)
