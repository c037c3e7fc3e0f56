"""The one dispatch point: every operation that the model and the sampler need, as a value that is chosen once.

`select` returns a `Kernels`: a record of callables, today all from `reference.py` (plain PyTorch, any device). A native
set replaces fields of that record one by one; nobody above this package knows which one it calls. There is no global
state and nothing is read from the environment: what the user chose comes in as arguments.

Names of sizes used in all shapes here: T rows (tokens of a step), S sequences, R sampled rows, H query heads, G KV
heads, D head dimension, V vocabulary, C the hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pellucid.core.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import Tensor

    from pellucid.kernels.cpu import CpuKernels
    from pellucid.kernels.layout import BatchLayout
    from pellucid.kernels.native import NativeNeeds


class StoredTensor(Protocol):
    """A tensor of a model file, not yet in memory. `storage` names how it is stored: "BF16", "Q4_1", ..."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def storage(self) -> str: ...

    def copy_into(self, out: Tensor) -> None:
        """Fill `out` (of this shape, any float dtype and device) with the dequantised values."""
        ...

    def raw(self) -> npt.NDArray[np.uint8]:
        """The stored bytes, `[rows, bytes per row]`, for kernels that compute on them as they are."""
        ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """One callable per operation; `reference.py` documents each with its shapes.

    `plan_attention`, `write_kv` and `attention` belong together (the plan is theirs alone), as do `pack`, `pack_table`
    and the three that take what those return (`linear`, `linear_add_`, `logits`). A batch of some number of rows is
    padded to `padded_rows` of it, and so are the rows that sample. `pack_gated` is `pack` for a gate and an up matrix,
    `table` reads a matrix that is looked up and `pack_table` makes it a linear map. Where `team` is not None, a whole
    step is one call of its native threads (`models/fused.py`), and the single operations raise.
    """

    name: str
    padded_rows: Callable[[int, torch.dtype], int]
    pack: Callable[[Sequence[StoredTensor], Sequence[StoredTensor], torch.dtype, torch.device], Any]
    pack_gated: Callable[[Sequence[StoredTensor], torch.dtype, torch.device], Any]
    table: Callable[[StoredTensor, torch.dtype, torch.device], Any]
    pack_table: Callable[[Any], Any]
    embedding: Callable[[Tensor, Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float, torch.dtype], Tensor]
    linear: Callable[[Tensor, Any], Tensor]
    linear_add_: Callable[[Tensor, Tensor, Any], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    plan_attention: Callable[[BatchLayout, int, torch.dtype, torch.device], Any]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Any], None]
    attention: Callable[[Tensor, Tensor, Tensor, Any], Tensor]
    logits: Callable[[Tensor, Any], Tensor]
    sample: Callable[[Tensor, npt.NDArray[np.void]], Tensor]
    team: CpuKernels | None = None


def select(device: str, *, isa: str = "auto", deterministic: bool = False, needs: NativeNeeds | None = None) -> Kernels:
    """The kernels for a device. `isa` "reference" asks for plain PyTorch, "auto" for the best there is, and a level
    (portable, avx2, avx512, amx) for the native kernels at that level. Without `needs` these are not considered.

    Raises ConfigError for a level that this machine cannot run or the model does not fit, and for packed weights where
    plain PyTorch serves.

    With `deterministic`, every row's result is independent of what else is in the batch (`reference.py`, last section).
    """
    from pellucid.kernels import deterministic as fixed_order
    from pellucid.kernels import reference

    if needs is not None and isa != "reference":
        from pellucid.kernels import native
        from pellucid.kernels.processors import LEVELS

        if isa not in ("auto", *LEVELS):
            raise ConfigError(f"isa is {isa!r}; use auto, reference, or one of {', '.join(LEVELS)}")
        obstacle = needs.obstacle(device)
        if obstacle is None:
            return native.kernels(needs, isa=isa, deterministic=deterministic)
        if isa != "auto" or needs.weights != "auto":
            raise ConfigError(f"isa {isa}, weights {needs.weights} need the native kernels: {obstacle}")
    elif isa not in ("auto", "reference"):
        raise ConfigError(f"isa {isa!r} is not available on {device}; use auto or reference")
    elif needs is not None and needs.weights != "auto":
        raise ConfigError(f"weights {needs.weights} need the native kernels, and isa reference keeps them out")
    return fixed_order.kernels() if deterministic else reference.kernels()
