"""`pellucid bench` and `pellucid report`: load on any OpenAI-compatible server, and runs side by side.

Results go to stdout, progress to stderr. Ctrl-C ends a run early and still reports what was measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pellucid.cli import bench_view
from pellucid.cli.bench_load import Described, Load, named_load, synthetic_load, trace_load
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


def bench(
    context: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="The server, such as http://127.0.0.1:8000.")],
    workload: Annotated[
        str, typer.Option("--workload", "-w", help=f"Named loads, separated by commas: {', '.join(NAMED)}.")
    ] = "",
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Replay a trace of any known format.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second (a trace is sped up or slowed down to it).")
    ] = None,
    speed: Annotated[float, typer.Option(help="Divide a trace's times by this.")] = 1.0,
    requests: Annotated[int | None, typer.Option(min=1, help="At most so many requests.")] = None,
    duration: Annotated[float, typer.Option(help="Seconds measured, of a synthetic load.")] = 30.0,
    ramp: Annotated[float, typer.Option(help="Seconds at the start that load the server but are not measured.")] = 0.0,
    arrivals: Annotated[str, typer.Option(help="Of a synthetic load; see `pellucid trace synth --help`.")] = "poisson",
    input_len: Annotated[str, typer.Option(help="N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA[:MAX].")] = "256",
    output_len: Annotated[str, typer.Option(help="The same.")] = "64",
    pattern: Annotated[
        str, typer.Option(help="What prompts share; see `pellucid trace synth --help`.")
    ] = "independent",
    tenants: Annotated[str, typer.Option(help="Names with weights: a=2,b=1.")] = "",
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: so many users who wait for answers.")
    ] = None,
    think_time: Annotated[str, typer.Option(help="Closed loop: pause between the turns of a session.")] = "0s",
    slo: Annotated[
        str | None, typer.Option(help="What a good request keeps: ttft=2s,itl=100ms,stall=1s,e2e=30s.")
    ] = None,
    find_capacity: Annotated[
        bool, typer.Option("--find-capacity", help="Search the highest rate that keeps the SLO.")
    ] = False,
    attain: Annotated[float, typer.Option(help="Share of offered requests that must be good.")] = 0.99,
    repeats: Annotated[int, typer.Option(min=1, help="Runs at each rate of a search or sweep.")] = 3,
    sweep: Annotated[
        str | None, typer.Option(help="Measure several rates: rate=1:20, rate=1:20:8, rate=1,2,5.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model name to ask for (default: the first one listed).")] = "",
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    prompts: Annotated[str, typer.Option(help="text, or ids (exact lengths; needs the target's tokenizer).")] = "text",
    tokenizer: Annotated[str | None, typer.Option(help=TOKENIZER_HELP)] = None,
    api_key: Annotated[str, typer.Option(envvar="PELLUCID_BENCH_API_KEY", help="Bearer token.")] = "",
    body: Annotated[str, typer.Option(metavar="JSON", help="Fields added to every request's body.")] = "{}",
    timeout: Annotated[str, typer.Option(help="Longest time for one request.")] = "600s",
    seed: Annotated[int, typer.Option(help="Of a synthetic load's schedule.")] = 0,
    salt: Annotated[str, typer.Option(help="Of the prompts' words; a fresh one is drawn otherwise.")] = "",
    warmup: Annotated[bool, typer.Option("--warmup/--no-warmup", help="Send a few other requests first.")] = True,
    compat: Annotated[
        bool, typer.Option("--compat", help="Add what other tools would print from the same bytes.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="STEM", help="Write STEM.json and STEM.requests.jsonl.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with figures.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Measure a server: time to first token, between tokens, throughput, goodput. See docs/benchmarking.md."""
    target = Target(
        url=url,
        model=model,
        endpoint=_endpoint(endpoint),
        api_key=api_key,
        timeout=parse_seconds(timeout),
        extra=_extra(body),
    )
    objective = SLO.parse(slo) if slo else None
    names = [name for name in workload.split(",") if name]
    _refuse_idle_options(context, "named workload" if names else "trace" if trace is not None else "synthetic load")
    if find_capacity and objective is None:
        raise ConfigError("--find-capacity needs --slo: without one every rate is good")
    pacing = Pacing(speed=speed, ramp=ramp, concurrency=concurrency, think_seconds=parse_seconds(think_time))
    if names:
        loads = [named_load(name) for name in names]
    elif trace is not None:
        loads = [trace_load(trace, encoder(tokenizer), pacing, rate, requests)]
    else:
        described = Described(arrivals, input_len, output_len, pattern, tenants, seed)
        loads = [synthetic_load(described, pacing, rate, duration, requests)]
    settings = RunOptions(slo=objective, salt=salt, warmup=warmup, compat=compat)
    session = _Session(target, settings, prompts, tokenizer)
    if find_capacity:
        lowest = loads[0].lowest_rate
        search = CapacitySearch(attain=attain, repeats=repeats, first=max(1.0, lowest), lowest=lowest)
        _finish_many(_run(session.find_capacity(loads[0], search)), output, as_json, bench_view.print_capacity)
    elif sweep:
        _finish_many(
            _run(session.sweep(loads[0], sweep_rates(sweep), repeats)), output, as_json, bench_view.print_sweep
        )
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


def _endpoint(name: str) -> Any:
    if name not in ("completions", "chat"):
        raise ConfigError(f"--endpoint {name!r}: expected completions or chat")
    return name


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
