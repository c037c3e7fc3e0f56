"""Writes a GGUF file anew with its matrices mixed as in the files that people download: to measure those formats.

    python benchmarks/requantize.py MODEL.gguf OUT.gguf --mix {q4_k_m,q5_k_m,q6_k}

The mixtures are those of the files so named: most matrices in the type of the name, embedding and head in Q6_K, and
with `m` half of the value and down projections too. A width that is no multiple of 256 gets the plain type beside it
(Q5_0, Q5_1, Q8_0). The K types are rounded to the nearest, group by group, without a search for better scales.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

from pellucid.models.weights.gguf import GgufFile

BLOCK = 256  # weights of a block of the K types
MIXES = {"q4_k_m": "Q4_K", "q5_k_m": "Q5_K", "q6_k": "Q6_K"}
NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mix", choices=MIXES, default="q4_k_m")
    asked = parser.parse_args()
    requantize(asked.model, asked.out, asked.mix)
    print(f"wrote {asked.out}, {asked.out.stat().st_size / 1e6:,.0f} MB")


def requantize(model: Path, out: Path, mix: str) -> None:
    """Write `model` to `out`, its matrices in the types of `mix`."""
    like = GGUFReader(model)
    writer = GGUFWriter(out, like.fields["general.architecture"].contents())
    for key, field in like.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        if field.types[0] is GGUFValueType.ARRAY:
            writer.add_array(key, field.contents())
        else:
            writer.add_key_value(key, field.contents(), field.types[0])
    with GgufFile(model) as file:
        num_layers = next(value for key, value in file.metadata.items() if key.endswith(".block_count"))
        for name, info in file.tensors.items():
            values = file.dequantize(name)
            if len(info.shape) == 1:
                writer.add_tensor(name, values)
                continue
            storage = storage_of(name, info.shape[-1], MIXES[mix], num_layers)
            writer.add_tensor(name, quantize(values, storage), raw_dtype=GGMLQuantizationType[storage])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def storage_of(name: str, width: int, usual: str, num_layers: int) -> str:
    """The type of a matrix in a file that is `usual` for most."""
    finer = name in ("token_embd.weight", "output.weight")
    if name.endswith(("attn_v.weight", "ffn_down.weight")):
        layer, eighth = int(name.split(".")[1]), num_layers // 8
        finer = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
    storage = "Q6_K" if finer else usual
    return NARROW[storage] if width % BLOCK else storage


def quantize(values: Floats, storage: str) -> Bytes:
    """Rows of the type's bytes for a matrix: `[rows, bytes]`."""
    own = {"Q4_K": _with_minima, "Q5_K": _with_minima, "Q6_K": _q6_k}
    if storage not in own:
        return np.asarray(quants.quantize(values, GGMLQuantizationType[storage]), dtype=np.uint8)
    blocks = np.ascontiguousarray(values, dtype=np.float32).reshape(-1, BLOCK)
    return own[storage](blocks, storage).reshape(len(values), -1)


def _float16(values: Floats) -> tuple[Bytes, Floats]:
    """Numbers `[n, 1]` as two bytes each, and what those say."""
    halves = values.astype(np.float16)
    return halves.view(np.uint8).reshape(len(values), 2), halves.astype(np.float32)


def _steps(values: Floats, size: Floats, low: int, high: int) -> Bytes:
    """Values in steps of `size`, rounded, between two bounds, counted from the lower one."""
    counted = np.divide(values, size, out=np.zeros_like(values), where=size != 0)
    return (np.clip(np.rint(counted), low, high) - low).astype(np.uint8)


def _with_minima(blocks: Floats, storage: str) -> Bytes:
    """Q4_K and Q5_K: eight groups of 32 with a 6-bit scale and minimum each, and a float16 for either kind."""
    top = 31 if storage == "Q5_K" else 15
    groups = blocks.reshape(-1, 8, 32)
    minima = -np.minimum(groups.min(axis=2), 0)
    scales = (groups.max(axis=2) + minima) / top
    scale_bytes, scale_unit = _float16(scales.max(axis=1, keepdims=True) / 63)
    minimum_bytes, minimum_unit = _float16(minima.max(axis=1, keepdims=True) / 63)
    scale, minimum = _steps(scales, scale_unit, 0, 63), _steps(minima, minimum_unit, 0, 63)
    lifted = groups + (minimum * minimum_unit)[:, :, None]
    bits = _steps(lifted, (scale * scale_unit)[:, :, None], 0, top)
    constants = np.empty((len(blocks), 12), np.uint8)
    constants[:, :4] = scale[:, :4] | scale[:, 4:] >> 4 << 6
    constants[:, 4:8] = minimum[:, :4] | minimum[:, 4:] >> 4 << 6
    constants[:, 8:] = scale[:, 4:] & 15 | (minimum[:, 4:] & 15) << 4
    nibbles = (bits[:, ::2] & 15 | (bits[:, 1::2] & 15) << 4).reshape(-1, 128)
    parts = [scale_bytes, minimum_bytes, constants, nibbles]
    if storage == "Q5_K":
        order = np.arange(8, dtype=np.uint8)[:, None]
        parts.insert(3, np.bitwise_or.reduce(bits >> 4 << order, axis=1))
    return np.concatenate(parts, axis=1)


def _q6_k(blocks: Floats, storage: str) -> Bytes:
    """Q6_K: sixteen groups of 16 with an 8-bit scale each, and a float16 for all."""
    groups = blocks.reshape(-1, 16, 16)
    scales = np.abs(groups).max(axis=2) / 31
    unit_bytes, unit = _float16(scales.max(axis=1, keepdims=True) / 127)
    scale = _steps(scales, unit, 0, 127)
    bits = _steps(groups, (scale * unit)[:, :, None], -32, 31).reshape(-1, 2, 4, 32)  # halves of four quarters
    nibbles = (bits[:, :, :2] & 15 | (bits[:, :, 2:] & 15) << 4).reshape(-1, 128)
    upper = np.bitwise_or.reduce(bits >> 4 << np.arange(0, 8, 2, dtype=np.uint8)[:, None], axis=2).reshape(-1, 64)
    return np.concatenate([nibbles, upper, scale, unit_bytes], axis=1)


if __name__ == "__main__":
    main()
