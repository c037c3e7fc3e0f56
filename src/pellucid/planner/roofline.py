"""What a step costs: FLOPs and bytes of a batch of any mix, the two ceilings they run into, and the time that follows.

    t = max(FLOPs / pi, bytes / beta) + T_comm + o_step + L * o_layer + S * o_seq

pi is the device's dense rate, beta its memory bandwidth. Prefill chunks and decodes of a step stand *inside one max*:
the weights are read once for all of them. Bytes are what must move whatever the kernels do: the touched weights, the KV
entries read and written, and the residual stream in and out of each half layer (everything between stays on chip). So
at data-sheet rates and without overheads the result is a floor, and its reciprocal a ceiling.

A batch is described by `core.cost.StepFeatures`, the same value the engine's scheduler, the simulator and the recorder
use; `prefill` and `decode` build it for the two textbook cases.
"""

from __future__ import annotations

from dataclasses import dataclass

from pellucid.core.cost import Prediction, StepFeatures
from pellucid.core.errors import ConfigError
from pellucid.planner.hardware import Device
from pellucid.planner.shape import ModelShape, attended

ACTIVATION_BYTES = 2  # the residual stream is kept in 16 bits by every engine in question
LOGIT_BYTES = 4


def prefill(num_new: int, num_cached: int = 0, *, samples: bool = True) -> StepFeatures:
    """One sequence's `num_new` tokens after `num_cached` others; with `samples` the last row yields a token."""
    end = num_cached + num_new
    return StepFeatures(num_new, attended(num_new, num_cached), end, 1, int(samples))


def decode(batch: int, context: int) -> StepFeatures:
    """`batch` sequences, one new token each; `context` tokens are attended to, the new one included."""
    return StepFeatures(batch, batch * context, batch * context, batch, batch)


@dataclass(frozen=True, slots=True)
class StepCost:
    """FLOPs, bytes and seconds of one step on one rank. `compute_seconds` or `memory_seconds` is None where the
    device's rate or bandwidth is unknown; the other one then stands alone. `kernel_seconds` is the time the engine's
    measured kernels take for the same work, where they were measured."""

    linear_flops: float
    attention_flops: float
    head_flops: float
    weight_bytes: float
    kv_read_bytes: float
    kv_write_bytes: float
    activation_bytes: float
    compute_seconds: float | None
    memory_seconds: float | None
    communication_seconds: float
    overhead_seconds: float
    kernel_seconds: float | None = None

    @property
    def flops(self) -> float:
        return self.linear_flops + self.attention_flops + self.head_flops

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes + self.activation_bytes

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes

    @property
    def roofline_seconds(self) -> float:
        """The larger of compute and memory time."""
        return max(self.compute_seconds or 0.0, self.memory_seconds or 0.0)

    @property
    def seconds(self) -> float:
        """Roofline (or measured kernels), communication and overheads together."""
        busy = self.roofline_seconds if self.kernel_seconds is None else self.kernel_seconds
        return busy + self.communication_seconds + self.overhead_seconds

    @property
    def binding(self) -> str:
        """What to buy more of: "compute", "memory bandwidth", "communication" or "overhead"."""
        compute, memory = self.compute_seconds or 0.0, self.memory_seconds or 0.0
        parts = {
            "memory bandwidth": memory if memory >= compute else 0.0,
            "compute": compute if compute > memory else 0.0,
            "communication": self.communication_seconds,
            "overhead": self.overhead_seconds,
        }
        return max(parts, key=lambda name: parts[name])


class Roofline:
    """A model on a device, over `tp` ranks. Raises ConfigError for a split that cannot be, or a device too unknown."""

    def __init__(self, shape: ModelShape, device: Device, *, tp: int = 1) -> None:
        shape.check_tp(tp)
        if not device.flops and device.bandwidth is None:
            raise ConfigError(f"{device.name}: neither rate nor bandwidth is known; pass --hardware, or --bandwidth")
        if tp > 1 and device.link is None:
            raise ConfigError(f"{device.name} has no known link to its peers, which --tp {tp} needs; pass --link")
        self.shape = shape
        self.device = device
        self.tp = tp
        self.compute_format = shape.weight_format.compute
        self.peak = device.peak(self.compute_format) if device.flops else None
        # Scores and values are multiplied in 16 bits (32 for a 32-bit model) whatever format the weights have.
        attention_format = "fp32" if self.compute_format == "fp32" else "bf16"
        self._attention_peak = device.peak(attention_format) if device.flops else None

    def cost(self, features: StepFeatures) -> StepCost:
        """FLOPs, bytes and seconds of one step, per rank. Layers with a sliding window take the step's sequences as
        equally long, which is exact for one chunk and for an even batch of decodes."""
        shape, tokens = self.shape, features.num_tokens
        linear = shape.linear_flops(tokens) / self.tp
        attention = self._attention_flops(features) / self.tp
        head = shape.head_flops(features.num_samples) / self.tp
        weights = shape.touched_weight_bytes(tokens, features.num_samples, self.tp)
        kv_write = tokens * shape.kv_bytes_per_token(self.tp) if shape.has_layers else 0.0
        kv_read = self._kv_read_bytes(features)
        activations = 4.0 * shape.num_layers * shape.hidden * tokens * ACTIVATION_BYTES
        activations += features.num_samples * shape.vocab * LOGIT_BYTES / self.tp
        return StepCost(
            linear_flops=linear,
            attention_flops=attention,
            head_flops=head,
            weight_bytes=weights,
            kv_read_bytes=kv_read,
            kv_write_bytes=kv_write,
            activation_bytes=activations,
            compute_seconds=self._compute_seconds(linear + head, attention),
            memory_seconds=self._memory_seconds(weights + kv_read + kv_write + activations),
            communication_seconds=self.communication_seconds(tokens, features.num_samples),
            overhead_seconds=self._overhead_seconds(features),
            kernel_seconds=self._kernel_seconds(features, attention, kv_read + kv_write),
        )

    def floor_seconds(self, features: StepFeatures) -> float:
        """The least a step can take: the roofline alone, without communication and overheads."""
        return self.cost(features).roofline_seconds

    def prefill_seconds(self, num_new: int, num_cached: int = 0, *, chunk: int | None = None) -> float:
        """Time to the first token on an idle device: the prompt in one step, or in chunks of `chunk` tokens."""
        size = chunk or num_new
        return sum(self.cost(step).seconds for step in chunks(num_new, num_cached, size))

    def communication_seconds(self, num_tokens: float, num_samples: float) -> float:
        """Two ring all-reduces a layer and a gather of the logits:
        2*L * (alpha + 2*(n-1)/n * T*h*b / B_link) + alpha + (n-1)/n * samples*V*b / B_link."""
        if self.tp == 1 or self.device.link is None:
            return 0.0
        share = (self.tp - 1) / self.tp
        alpha = self.device.all_reduce_seconds or 0.0
        row = self.shape.hidden * ACTIVATION_BYTES
        reduce = alpha + 2 * share * num_tokens * row / self.device.link
        gather = alpha + share * num_samples * self.shape.vocab * ACTIVATION_BYTES / self.device.link
        return 2 * self.shape.num_layers * reduce + gather

    def _attention_flops(self, features: StepFeatures) -> float:
        if not features.num_tokens:
            return 0.0
        count = features.num_sequences
        before = features.num_context - features.num_tokens  # tokens cached when the step begins
        total = 0.0
        for group in self.shape.groups:
            window, pairs = group.attention.window, float(features.num_attended)
            if window is not None:
                pairs = count * attended(round(features.num_tokens / count), round(before / count), window)
            total += group.num_layers * group.attention.flops(pairs, before)
        return total

    def _kv_read_bytes(self, features: StepFeatures) -> float:
        if not features.num_sequences:
            return 0.0
        longest = features.num_context / features.num_sequences
        return features.num_sequences * sum(
            g.num_layers * self.shape.layer_cache_bytes(g, self.tp) * min(longest, g.attention.window or longest)
            for g in self.shape.groups
        )

    def _compute_seconds(self, matrix_flops: float, attention_flops: float) -> float | None:
        if self.peak is None or self._attention_peak is None:
            return None
        return matrix_flops / self.peak + attention_flops / self._attention_peak

    def _memory_seconds(self, num_bytes: float) -> float | None:
        return None if self.device.bandwidth is None else num_bytes / self.device.bandwidth

    @property
    def measured(self) -> bool:
        """Whether predictions come from the engine's measured kernels instead of the device's ceilings."""
        kernels, shape = self.device.kernels, self.shape
        names = (shape.weight_format.name, shape.head_format.name, shape.cache_format.name)
        return kernels is not None and self.tp == 1 and shape.has_layers and kernels.covers(*names)

    def _kernel_seconds(self, features: StepFeatures, attention_flops: float, kv_bytes: float) -> float | None:
        kernels, shape = self.device.kernels, self.shape
        if kernels is None or not self.measured:
            return None
        rows, samples = features.num_tokens, features.num_samples
        seconds = kernels.linear_seconds("layers", shape.weight_format.name, rows, shape.num_matrix_params)
        seconds += kernels.attention_seconds(shape.cache_format.name, attention_flops, kv_bytes)
        if samples:
            head = shape.hidden * shape.vocab
            seconds += kernels.linear_seconds("head", shape.head_format.name, samples, head)
        return seconds

    def _overhead_seconds(self, features: StepFeatures) -> float:
        overheads = self.device.overheads
        layers = self.shape.num_layers * overheads.layer_seconds
        return overheads.step_seconds + layers + features.num_sequences * overheads.sequence_seconds


def chunks(num_new: int, num_cached: int, size: int) -> list[StepFeatures]:
    """The steps that compute `num_new` tokens after `num_cached`, `size` at a time; only the last one samples."""
    steps = []
    for start in range(0, num_new, size):
        end = min(start + size, num_new)
        steps.append(prefill(end - start, num_cached + start, samples=end == num_new))
    return steps


class RooflineCostModel:
    """`core.cost.CostModel` from a roofline: what an engine can expect before it has measured a single step.

    `spread` is the relative uncertainty (one standard deviation) to state with each prediction. Without one it is that
    of the measured kernels, and 0 where there are none: a roofline knows no noise.
    """

    def __init__(self, roofline: Roofline, *, spread: float | None = None) -> None:
        self._roofline = roofline
        self._spread = spread

    def predict(self, features: StepFeatures) -> Prediction:
        """Seconds of a step: its cost, and its copies over the host link (in plain memory: a read and a write)."""
        seconds = self._roofline.cost(features).seconds
        if features.copied_bytes:
            seconds += self.copy_seconds(features.copied_bytes)
        return Prediction(seconds, seconds * self._relative_spread(features))

    def _relative_spread(self, features: StepFeatures) -> float:
        if self._spread is not None:
            return self._spread
        kernels = self._roofline.device.kernels
        if kernels is None or not self._roofline.measured:
            return 0.0
        return kernels.spread(self._roofline.shape.weight_format.name, features.num_tokens)

    def copy_seconds(self, num_bytes: float) -> float:
        """One way between device and host memory."""
        device = self._roofline.device
        if device.host_link is not None:
            return num_bytes / device.host_link
        return 2 * num_bytes / device.need_bandwidth()
