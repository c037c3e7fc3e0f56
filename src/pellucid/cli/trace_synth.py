"""What `pellucid trace synth` is told, and the rows that come of it: from a description, or from ServeGen's clients.

Invariant: a flag that the chosen source has no use for is refused, not ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path

from pellucid.cli.options import flag
from pellucid.core.errors import ConfigError
from pellucid.workload import synthetic
from pellucid.workload.formats import open_trace, servegen
from pellucid.workload.formats.source import members
from pellucid.workload.trace import DEFAULT_BLOCK_SIZE, TraceHeader, TraceRequest, Transform, file_sha256
from pellucid.workload.transforms import Stage

_LENGTHS = ("input_len", "output_len")
_SERVEGEN = ("servegen", "start", "requests", "duration", "seed")


@dataclass(frozen=True, slots=True)
class Synthesis:
    """The rows that are wanted."""

    rate: float = flag(1.0, "Requests a second.")
    requests: int | None = flag(None, "Stop after so many.", min=1)
    duration: float | None = flag(None, "Stop after so many seconds.")
    arrivals: str = flag(
        "poisson", "poisson, constant, gamma:CV, weibull:SHAPE, onoff:BUSY:QUIET, diurnal:PERIOD:SWING."
    )
    input_len: str = flag("lognormal:512:1:8192", "N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA[:MAX].")
    output_len: str = flag("lognormal:128:0.7:2048", "The same.")
    lengths_from: Path | None = flag(None, "Draw both lengths from a trace's rows.", metavar="FILE")
    pattern: str = flag(
        "independent",
        "What prompts share: independent, system:COUNT:TOKENS, few-shot:COUNT:TOKENS, "
        "rag:DOCUMENTS:TOKENS:PER_REQUEST, chat:TURNS:SYSTEM_TOKENS:PAUSE, agent:TURNS:SYSTEM_TOKENS.",
    )
    tenants: str = flag("", "Names with weights: a=2,b=1.")
    servegen: Path | None = flag(None, "Generate from ServeGen client files instead.", metavar="ARCHIVE")
    start: float = flag(0.0, "With --servegen: second of the profile to start at.")
    block_size: int = flag(DEFAULT_BLOCK_SIZE, "Tokens per block where ids are made from tokens.", min=1)
    seed: int = flag(0, "Equal seeds give equal rows.")

    def stage(self) -> Stage:
        """Header and rows, made as they are read. Raises ConfigError for what cannot be or has no meaning."""
        if self.servegen is not None:
            self._refuse(set(self._given()) - set(_SERVEGEN), "with --servegen, whose clients say it")
            return self._from_servegen(self.servegen)
        self._refuse({"start"} & set(self._given()), "without --servegen")
        if self.lengths_from is not None:
            self._refuse(set(_LENGTHS) & set(self._given()), "with --lengths-from")
        return self._from_description()

    def _given(self) -> list[str]:
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default]

    def _refuse(self, names: set[str], why: str) -> None:
        if names:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(names))
            raise ConfigError(f"{flags} has no meaning {why}")

    def _from_description(self) -> Stage:
        spec = synthetic.SynthSpec(
            arrivals=synthetic.Arrivals.parse(self.arrivals, self.rate),
            lengths=self._lengths(),
            pattern=synthetic.Pattern.parse(self.pattern),
            tenants=synthetic.parse_tenants(self.tenants),
            block_size=self.block_size,
            seed=self.seed,
            num_requests=self.requests,
            duration=self.duration,
        )
        names = ("rate", "requests", "duration", "arrivals", "pattern", "tenants", "seed")
        arguments = {name: getattr(self, name) for name in names}
        arguments["tenants"] = self.tenants or None
        if self.lengths_from is not None:
            arguments |= {"lengths_from": self.lengths_from.name, "lengths_sha256": file_sha256(self.lengths_from)}
        else:
            arguments |= {name: getattr(self, name) for name in _LENGTHS}
        given = {name: value for name, value in arguments.items() if value is not None}
        return Stage(TraceHeader(self.block_size, "synthetic", (Transform("synth", given),)), synthetic.generate(spec))

    def _lengths(self) -> synthetic.Lengths:
        if self.lengths_from is not None:
            rows = open_trace(self.lengths_from)
            return synthetic.lengths_of_rows(
                [(r.input_len, r.output_len) for r in rows if r.input_len and r.output_len]
            )
        return synthetic.independent_lengths(
            synthetic.LengthDistribution.parse(self.input_len, "--input-len"),
            synthetic.LengthDistribution.parse(self.output_len, "--output-len"),
        )

    def _from_servegen(self, archive: Path) -> Stage:
        def rows() -> Iterator[TraceRequest]:
            with members(archive) as files:
                clients = servegen.load_clients(files)
                made = servegen.generate(clients, seed=self.seed, start=self.start, duration=self.duration)
                yield from islice(made, self.requests)

        arguments = {"seed": self.seed, "start": self.start, "duration": self.duration, "requests": self.requests}
        given = {name: value for name, value in arguments.items() if value is not None}
        transform = Transform("synth-servegen", given, file_sha256(archive))
        return Stage(TraceHeader(0, f"{archive.name} (servegen)", (transform,)), rows())
