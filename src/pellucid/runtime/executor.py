"""The real executor: a plan becomes tensors, a forward pass, tokens. Implements `engine/executor.py`'s Protocol.

    launch   keeps the plan                            collect   mirror -> batch -> forward -> sample -> result

Where the native kernels compute whole steps, batch, forward and sample are one call of theirs. A CPU has nothing to
overlap, so all work is done in `collect`, in launch order. Invariants: no gradient is ever recorded; the only value
that comes back from the device is the row of sampled tokens; PyTorch uses as many threads as the configuration says.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch

from pellucid.core.errors import ConfigError, InvariantViolation
from pellucid.core.plan import StepPlan, StepResult
from pellucid.kernels import Kernels, select
from pellucid.kernels.cpu import PackedWeight
from pellucid.kernels.deterministic import check_row_independence
from pellucid.kernels.native import NativeNeeds
from pellucid.models.config import ModelConfig, load_model_config
from pellucid.models.decoder import Decoder, DecoderInput, load_decoder
from pellucid.models.fused import FusedStep
from pellucid.models.layers import DecoderWeights, Progress
from pellucid.runtime.batch import SequenceMirror, StepBatch, padded
from pellucid.runtime.config import RuntimeConfig, resolve
from pellucid.runtime.kv_store import KVStore
from pellucid.runtime.memory import MemoryReport, resident_bytes, return_freed_memory
from pellucid.runtime.sampler import Sampler


class TorchExecutor:
    """Carries out plans on one device. `config` is resolved (no "auto" left). `note` is for `describe`."""

    def __init__(
        self,
        decoder: Decoder,
        config: RuntimeConfig,
        *,
        num_blocks: int,
        num_host_blocks: int = 0,
        seed: int,
        note: str = "",
    ) -> None:
        self._note = note
        self.config = config
        self._decoder = decoder
        self._device = torch.device(config.device)
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        spec, cached = decoder.config.cache_spec(config.cache_dtype), getattr(torch, config.cache_dtype)
        shape = {"block_size": config.block_size, "dtype": cached, "team": decoder.kernels.team}
        self._store = KVStore(spec, num_blocks=num_blocks, device=self._device, **shape)
        self._host = KVStore(spec, num_blocks=num_host_blocks, device=torch.device("cpu"), **shape)
        for store in (self._store, self._host):
            store.populate()
        self._mirror = SequenceMirror(config.block_size, seed)
        self._sampler = Sampler(decoder.kernels, seed)
        self._launched: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> int:
        """Queue the step; its id is the ticket."""
        self._launched.append(plan)
        return plan.step_id

    def collect(self, ticket: int) -> StepResult:
        """Carry out the oldest launched step, which must be the ticket's, and return its tokens."""
        if not self._launched or self._launched[0].step_id != ticket:
            raise InvariantViolation(f"step {ticket} is collected out of order or was never launched")
        plan = self._launched.popleft()
        began = perf_counter()
        for store in (self._store, self._host):
            store.begin_step()
        self._mirror.apply(plan)
        if plan.copies or plan.transfers:
            self._move_blocks(plan)
        moved = tuple([transfer.id for transfer in plan.transfers])
        if not plan.chunks:
            return StepResult(plan.step_id, (), perf_counter() - began, transfers_done=moved)
        if self._decoder.fused is not None:
            return self._fused_step(self._decoder.fused, plan, began, moved)
        with torch.inference_mode():
            batch = self._mirror.build(plan.chunks, self._padded_rows)
            inputs = self._to_device(batch)
            prepared = perf_counter()
            logits = self._decoder.forward(inputs, self._store.layers)[: len(batch.sample_rows)]
            computed = perf_counter()
            tokens = self._sample(logits, batch)
        ended = perf_counter()
        phases = (("prepare", prepared - began), ("forward", computed - prepared), ("sample", ended - computed))
        return StepResult(plan.step_id, _per_chunk(plan, tokens), ended - began, phases, moved)

    def _fused_step(self, fused: FusedStep, plan: StepPlan, began: float, moved: tuple[int, ...]) -> StepResult:
        """One native call from the plan's chunks to their tokens."""
        prepared = perf_counter()
        tokens = fused.draw(plan.chunks, self._mirror.lines, self._mirror.line_of, self._store.layers)
        ended = perf_counter()
        sampling = fused.sample_seconds
        phases = (("prepare", prepared - began), ("forward", ended - prepared - sampling), ("sample", sampling))
        return StepResult(plan.step_id, tokens, ended - began, phases, moved, fused.stolen_seconds())

    @torch.inference_mode()
    def _move_blocks(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            self._store.copy_block(copy.source, copy.target)
        for transfer in plan.transfers:
            source, target = (self._store, self._host) if transfer.kind == "out" else (self._host, self._store)
            target.exchange(source, transfer.pairs)

    def memory(self) -> MemoryReport:
        """What the executor holds now."""
        spec = self._decoder.config.cache_spec(self.config.cache_dtype)
        return MemoryReport(
            weight_bytes=_weight_bytes(self._decoder.weights),
            kv_bytes=self._store.num_bytes,
            block_bytes=spec.bytes_per_token * self.config.block_size,
            resident_bytes=resident_bytes(),
        )

    def describe(self) -> str:
        """One line for the log: which kernels, which precision, how many threads."""
        name, config = self._decoder.kernels.name, self.config
        precision = f"{config.dtype}, KV cache in {config.cache_dtype}"
        return f"{name}, {precision}, {config.threads} threads on {self._device}{self._note}"

    def _to_device(self, batch: StepBatch) -> DecoderInput:
        kernels, config = self._decoder.kernels, self._decoder.config
        plan = kernels.plan_attention(batch.layout, config.num_kv_heads, self._dtype, self._device)
        sample_rows = padded(batch.sample_rows, self._padded_rows(len(batch.sample_rows)))
        token_ids, positions, rows = (
            torch.from_numpy(array) for array in (batch.token_ids, batch.positions, sample_rows)
        )
        if self._device.type != "cpu":
            token_ids, positions, rows = (x.to(self._device) for x in (token_ids, positions, rows))
        return DecoderInput(token_ids, positions, rows, plan)

    def _padded_rows(self, num_rows: int) -> int:
        return self._decoder.kernels.padded_rows(num_rows, self._dtype)

    def _sample(self, logits: torch.Tensor, batch: StepBatch) -> npt.NDArray[np.int64]:
        """Sample and remember the tokens, `[R]` on the host."""
        if len(batch.sample_rows) == 0:
            return np.empty(0, dtype=np.int64)
        requests = [self._mirror.sampling(line) for line in batch.sample_lines]
        tokens = self._sampler.sample(logits, requests, batch.sample_positions).cpu().numpy()
        self._mirror.append(batch, tokens)
        return tokens


def load_executor(
    model_path: str | Path,
    config: RuntimeConfig,
    *,
    num_blocks: int,
    num_host_blocks: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> TorchExecutor:
    """Load the model at `model_path` (a directory or a `.gguf`) and reserve `num_blocks` blocks of KV cache.

    Sets PyTorch's thread count for this process. `progress(done, total)` counts layers. Raises ModelError for the model
    and ConfigError for a configuration that this machine cannot carry out.
    """
    config = resolve(config)
    model = load_model_config(model_path)
    kernels = choose_kernels(config, model)
    # Native threads and PyTorch's would fight for the cores; what PyTorch still does then (sampling) is small.
    torch.set_num_threads(config.threads if kernels.team is None else 1)
    device = _device(config.device)
    with torch.inference_mode():
        decoder = load_decoder(
            model_path,
            kernels,
            getattr(torch, config.dtype),
            device,
            num_positions=min(model.max_context, num_blocks * config.block_size),
            progress=progress,
        )
        if config.deterministic and kernels.team is None:
            _check_determinism(decoder.weights)
        return_freed_memory()
        note = _note(kernels, config, model)
        return TorchExecutor(
            decoder, config, num_blocks=num_blocks, num_host_blocks=num_host_blocks, seed=seed, note=note
        )


def _note(kernels: Kernels, config: RuntimeConfig, model: ModelConfig) -> str:
    """Why the native kernels are not used, where nobody asked for that."""
    if kernels.team is not None or config.isa == "reference":
        return ""
    return f" (no native kernels: {native_needs(config, model).obstacle(config.device)})"


def choose_kernels(config: RuntimeConfig, model: ModelConfig) -> Kernels:
    """The kernels that a resolved configuration gets. Raises ConfigError where it asks for what cannot be."""
    needs = native_needs(config, model)
    return select(config.device, isa=config.isa, deterministic=config.deterministic, needs=needs)


def native_needs(config: RuntimeConfig, model: ModelConfig) -> NativeNeeds:
    """What decides whether the native kernels fit; its `obstacle` says why they do not."""
    return NativeNeeds(
        dtype=config.dtype,
        head_dim=model.head_dim,
        inner_size=model.intermediate_size,
        block_size=config.block_size,
        threads=config.threads,
        weights=config.weights,
    )


def _device(name: str) -> torch.device:
    """The device of that name, known to work."""
    try:
        return torch.empty(0, device=torch.device(name)).device
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r} cannot be used: {first_line}; --device cpu always works") from None


def _check_determinism(weights: DecoderWeights) -> None:
    """Check each distinct shape once: all layers are alike."""
    layer = weights.layers[0]
    for weight in (
        layer.attention.qkv,
        layer.attention.output,
        layer.feed_forward.gate_up,
        layer.feed_forward.down,
        weights.head,
    ):
        check_row_independence(weight)


def _per_chunk(plan: StepPlan, tokens: npt.NDArray[np.int64]) -> tuple[tuple[int, ...], ...]:
    """The sampled tokens beside the plan's chunks: none where a chunk does not sample."""
    drawn = iter(tokens.tolist())
    return tuple((next(drawn),) if chunk.samples else () for chunk in plan.chunks)


def _weight_bytes(weights: DecoderWeights) -> int:
    """Bytes of every distinct tensor or packed weight reachable from the weights (a tied head counts once)."""
    seen: dict[int, int] = {}
    pending: list[object] = [weights]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            seen[item.data_ptr()] = item.numel() * item.element_size()
        elif isinstance(item, PackedWeight):
            seen[id(item)] = item.num_bytes
        elif isinstance(item, tuple):
            pending.extend(item)
        elif hasattr(item, "__dataclass_fields__"):
            pending.extend(getattr(item, name) for name in item.__dataclass_fields__)
    return sum(seen.values())
