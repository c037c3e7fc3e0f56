"""A GGUF's tensors as the model asks for them: under Hugging Face names, rows in Hugging Face order.

Files of the llama architecture hold query and key rows with the two halves of each head interleaved. They are put back
in order when they are read, since rotation pairs halves in every family (`kernels.reference.rotate`). Rows are whole in
every storage, so the same order applies to raw bytes and to numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pellucid.models.config import config_from_gguf
from pellucid.models.weights.gguf import GgufFile


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a GGUF under its Hugging Face name; `order` puts its rows where Hugging Face has them."""

    name: str
    stored_name: str
    file: GgufFile
    order: npt.NDArray[np.int64] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.tensors[self.stored_name].shape

    @property
    def storage(self) -> str:
        return self.file.tensors[self.stored_name].storage

    def copy_into(self, out: Tensor) -> None:
        """Fill `out` with the dequantised values, a bounded slab at a time."""
        if len(self.shape) == 1:
            values = self.file.dequantize(self.stored_name)
            out.copy_(torch.from_numpy(np.array(values if self.order is None else values[self.order])))
            return
        for row, slab in self.file.dequantize_slabs(self.stored_name, self.order):
            out[row : row + len(slab)].copy_(torch.from_numpy(np.require(slab, requirements="W")))

    def raw(self) -> npt.NDArray[np.uint8]:
        """The stored bytes as `[rows, bytes per row]`; a view of the map unless rows had to be put in order."""
        stored = self.file.raw(self.stored_name)
        return stored if self.order is None else stored[self.order]


_GGUF_GLOBAL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GgufSource:
    """All tensors of an open GGUF, by Hugging Face name. A tensor that has none keeps its own."""

    def __init__(self, file: GgufFile) -> None:
        self.location = file.path
        self._tensors: dict[str, GgufTensor] = {}
        config = config_from_gguf(file)
        names = {stored: name for name, stored in _GGUF_GLOBAL.items()}
        for i in range(config.num_layers):
            for name, stored in _GGUF_LAYER.items():
                for kind in ("weight", "bias"):
                    names[f"blk.{i}.{stored}.{kind}"] = f"model.layers.{i}.{name}.{kind}"
        for stored in file.tensors:
            if stored == "rope_freqs.weight":  # part of the configuration: ModelConfig.rope_factors
                continue
            name = names.get(stored, stored)
            order = None
            if config.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
                order = interleaved_rows(file.tensors[stored].shape[0], config.head_dim)
            self._tensors[name] = GgufTensor(name, stored, file, order)

    def get(self, name: str) -> GgufTensor | None:
        """The tensor of that Hugging Face name, or None."""
        return self._tensors.get(name)

    def names(self) -> Iterable[str]:
        """All names."""
        return self._tensors.keys()


def interleaved_rows(num_rows: int, head_dim: int) -> npt.NDArray[np.int64]:
    """For rows in half-split order, where each stands among rows stored with the halves of every head interleaved."""
    stored = np.arange(num_rows, dtype=np.int64).reshape(-1, head_dim // 2, 2)
    return stored.swapaxes(1, 2).reshape(-1)
