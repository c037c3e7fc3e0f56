"""What a whole trace must cost: its FLOPs and bytes summed, and the device-seconds that no scheduler can beat.

Requests are (input tokens, output tokens, cached input tokens). The last is what a prefix cache would spare: those
tokens' FLOPs and KV writes vanish, but the tail still attends to them. Compute and bandwidth are two ceilings of
similar height on long-context traces, so both are kept and the larger one decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pellucid.core.errors import ConfigError
from pellucid.planner.roofline import Roofline


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """Sums over a trace. `linear_flops` is the 2*P part of prefill; heads are counted apart, one row per output token.
    `kv_read_bytes` are the decode steps' reads, `kv_write_bytes` every token computed and cached."""

    num_requests: int
    num_decode_tokens: int
    linear_flops: float
    prefill_flops: float
    decode_flops: float
    head_flops: float
    kv_read_bytes: float
    kv_write_bytes: float

    @property
    def attention_share(self) -> float:
        """Attention's share of the prefill FLOPs."""
        return 1.0 - self.linear_flops / self.prefill_flops if self.prefill_flops else 0.0

    @property
    def flops(self) -> float:
        return self.prefill_flops + self.decode_flops + self.head_flops


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder: a name, the device-seconds it demands, and what it takes into account."""

    name: str
    device_seconds: float
    meaning: str


class TraceCeilings:
    """Ceilings of traces for one model on one device (or `tp` of them, counted as one)."""

    def __init__(self, roofline: Roofline) -> None:
        self._roofline = roofline
        self._shape = roofline.shape

    def load(self, requests: Iterable[tuple[int, int, int]]) -> TraceLoad:
        """The FLOPs and bytes of all requests, each (input, output, cached). Raises ConfigError for more cached tokens
        than input, or nothing to compute."""
        shape = self._shape
        per_token = shape.kv_bytes_per_token()
        count = steps = outputs = 0
        computed = 0
        prefill = decode = reads = 0.0
        for num_input, num_output, num_cached in requests:
            if not 0 <= num_cached <= num_input or num_output < 1:
                raise ConfigError(f"request of {num_input} in, {num_output} out cannot have {num_cached} tokens cached")
            count += 1
            outputs += num_output
            steps += num_output - 1
            computed += num_input - num_cached
            prefill += shape.attention_flops(num_input - num_cached, num_cached)
            decode += shape.decode_flops(num_input, num_output)
            reads += shape.decode_kv_read_bytes(num_input, num_output)
        linear = shape.linear_flops(computed)
        writes = (computed + steps) * per_token
        return TraceLoad(
            num_requests=count,
            num_decode_tokens=steps,
            linear_flops=linear,
            prefill_flops=linear + prefill,
            decode_flops=decode,
            head_flops=shape.head_flops(outputs),
            kv_read_bytes=reads,
            kv_write_bytes=writes,
        )

    def compute_seconds(self, load: TraceLoad) -> float:
        """Device-seconds of arithmetic at the dense peak, head included."""
        return load.flops / self._roofline.device.peak(self._roofline.compute_format)

    def memory_seconds(self, load: TraceLoad, batch: float | None = None) -> float:
        """Device-seconds of memory traffic: KV reads and writes, and the weights once for every `batch` decoded tokens
        (None: a batch so large that the weights cost nothing)."""
        weights = self._shape.touched_weight_bytes(batch, batch) * load.num_decode_tokens / batch if batch else 0.0
        return (load.kv_read_bytes + load.kv_write_bytes + weights) / self._roofline.device.need_bandwidth()

    def ladder(self, load: TraceLoad, *, batch: float) -> tuple[Rung, ...]:
        """From the calculator's estimate to what a perfect scheduler could reach. `batch` is the largest number of
        sequences of this trace that fit in memory at once."""
        peak = self._roofline.device.peak(self._roofline.compute_format)
        tokens = load.linear_flops + self._shape.linear_flops(load.num_decode_tokens)
        compute = self.compute_seconds(load)
        return (
            Rung("parameters", tokens / peak, "2 FLOPs per parameter and token"),
            Rung("attention", compute, "and attention over every context, and the head for each sampled token"),
            Rung("bandwidth", max(compute, self.memory_seconds(load)), "and every KV byte read and written"),
            Rung(
                "capacity",
                max(compute, self.memory_seconds(load, batch)),
                f"and the weights once a step, for no more than {batch:.4g} sequences at a time",
            ),
        )
