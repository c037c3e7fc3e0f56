"""The native kernels as a `Kernels` record: what `select` returns where they fit the model and the machine.

Weights keep the precision of their file unless told otherwise: GGUF matrices of 4, 5, 6 and 8 bits keep them, floating
ones become bfloat16. A whole step is then one native call (`cpu_step.py`), so of the record the models use only what
packs, plans and samples; the reference's single operations are not in it, because they cannot read packed weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from pellucid.core.errors import ConfigError
from pellucid.kernels import Kernels, StoredTensor, cpu, reference
from pellucid.kernels.cpu import AttentionBatch, CpuKernels, GgufRows, PackedWeight, WeightFormat
from pellucid.kernels.gguf_types import FLOATING, GGUF_TYPES
from pellucid.kernels.layout import BatchLayout
from pellucid.kernels.processors import native

Weights = Literal["auto", "bf16", "int8", "int4"]
_FORMATS: dict[str, WeightFormat] = {"bf16": "bf16", "int8": "q8", "int4": "q4"}


@dataclass(frozen=True, slots=True)
class NativeNeeds:
    """What decides whether the native kernels fit, and how they are set up. `weights`: auto keeps the file's precision;
    int8 and int4 have one scale per 32 inputs."""

    dtype: str
    head_dim: int
    inner_size: int
    block_size: int
    threads: int
    weights: Weights = "auto"

    def obstacle(self, device: str) -> str | None:
        """Why the native kernels cannot serve this, in one phrase; None if they can."""
        if device != "cpu":
            return f"they run on the cpu, not on {device}"
        if native() is None:
            return "they were not built on installation (a C++20 compiler or the Python headers were missing)"
        if self.dtype != "bfloat16":
            return f"they compute in bfloat16, not in {self.dtype}"
        if not cpu.supports(self.head_dim, self.block_size) or self.inner_size % cpu.BLOCK_COLUMNS:
            return (
                f"a head dimension of {self.head_dim}, a feed-forward width of {self.inner_size} and blocks of "
                f"{self.block_size} are not multiples of 32, 16 and 16"
            )
        return None


@dataclass(frozen=True, slots=True)
class NativePlan:
    """A step's attention, and the cache slots of its rows `[T]`."""

    batch: AttentionBatch
    slots: npt.NDArray[np.int64]


def kernels(needs: NativeNeeds, *, isa: str, deterministic: bool) -> Kernels:
    """The record. Raises ConfigError for a level that this machine cannot run."""
    team = CpuKernels(isa=isa, threads=needs.threads, deterministic=deterministic)

    def pack(
        parts: Sequence[StoredTensor], biases: Sequence[StoredTensor], dtype: torch.dtype, device: torch.device
    ) -> PackedWeight:
        return pack_stored(parts, biases, needs.weights, gated=False)

    def pack_gated(parts: Sequence[StoredTensor], dtype: torch.dtype, device: torch.device) -> PackedWeight:
        return pack_stored(parts, (), needs.weights, gated=True)

    def table(stored: StoredTensor, dtype: torch.dtype, device: torch.device) -> PackedWeight:
        return pack_stored([stored], (), needs.weights, gated=False)

    single = ("embedding", "rms_norm", "linear", "linear_add_", "rotate", "silu_mul", "write_kv", "attention", "logits")
    refusals: dict[str, Any] = dict.fromkeys(single, _fused)
    return replace(
        reference.kernels(),
        name=f"native kernels ({team.isa}, weights {needs.weights})",
        padded_rows=lambda num_rows, dtype: num_rows,
        pack=pack,
        pack_gated=pack_gated,
        table=table,
        pack_table=lambda packed: packed,
        plan_attention=plan_attention,
        sample=team.sample,
        team=team,
        **refusals,
    )


def plan_attention(layout: BatchLayout, num_kv_heads: int, dtype: torch.dtype, device: torch.device) -> NativePlan:
    """The layout as the native step reads it."""
    rows = np.empty((layout.num_sequences, 3), dtype=np.int64)
    rows[:, 0], rows[:, 1], rows[:, 2] = layout.row_starts[:-1], layout.lengths, layout.ends
    return NativePlan(AttentionBatch(rows, layout.block_tables.astype(np.int32)), np.ascontiguousarray(layout.slots))


def pack_stored(
    parts: Sequence[StoredTensor], biases: Sequence[StoredTensor], weights: Weights, *, gated: bool
) -> PackedWeight:
    """Stack stored matrices to one packed weight.

    With `auto`, types that the kernels read keep their bits, floating types become bf16, and what remains (other
    quantisations, or a gate and an up matrix that are packed differently) is dequantised matrix by matrix and stored as
    q8.
    """
    bias = reference.stack(biases, torch.float32, torch.device("cpu")) if biases else None
    storages = {part.storage for part in parts}
    keeps_bits = weights == "auto" and storages <= GGUF_TYPES.keys()
    if keeps_bits and not (gated and len({GGUF_TYPES[storage].packed_as for storage in storages}) > 1):
        rows = [GgufRows(part.storage, part.raw()) for part in parts]
        return PackedWeight.from_gguf_bytes(rows, bias=bias, gated=gated)
    stored_as: WeightFormat = "bf16" if storages <= FLOATING.keys() else "q8"
    if weights != "auto":
        stored_as = _FORMATS[weights]
    tensors = [reference.stack([part], torch.float32, torch.device("cpu")) for part in parts]
    return PackedWeight.from_tensor(tensors, stored_as, bias=bias, gated=gated)


def _fused(*_: Any) -> NoReturn:
    raise ConfigError("the native kernels compute whole steps; single operations are the reference's")
