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

import numpy as np
import numpy.typing as npt

from pellucid.core.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pellucid.kernels.layout import BatchLayout


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
    and the three that take what those return (`linear`, `linear_add_`, `logits`). A batch of some number of
    rows is padded to `padded_rows` of it, and so are the rows that sample.
    """

    name: str
    padded_rows: Callable[[int, torch.dtype], int]
    pack: Callable[[Sequence[StoredTensor], Sequence[StoredTensor], torch.dtype, torch.device], Any]
    pack_table: Callable[[Tensor], Any]
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
    greedy: Callable[[Tensor], Tensor]
    scaled_softmax: Callable[[Tensor, Tensor], Tensor]
    top_candidates: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    pick: Callable[[Tensor, Tensor], Tensor]


def select(device: str, *, isa: str = "auto", deterministic: bool = False) -> Kernels:
    """The kernels for a device. `isa` "reference" asks for plain PyTorch; "auto" for the best there is.

    With `deterministic`, every row's result is independent of what else is in the batch (`reference.py`, last section).
    """
    from pellucid.kernels import deterministic as fixed_order
    from pellucid.kernels import reference

    if isa not in ("auto", "reference"):
        raise ConfigError(f"isa {isa!r} is not available on {device}; use auto or reference")
    return fixed_order.kernels() if deterministic else reference.kernels()
