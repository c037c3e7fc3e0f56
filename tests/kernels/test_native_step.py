"""A whole native step against a float64 decoder of a few lines, over chunks, decodes and many rows at once.

Tolerance: activations and the cache are rounded several times per layer, so logits agree to a share of their largest
that depends on the rounding (`SHARES`); the weights are read back from their packed form and add no error.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F

cpu = pytest.importorskip("pellucid.kernels.cpu")
processors = pytest.importorskip("pellucid.kernels.processors")
gguf = pytest.importorskip("gguf")
if processors.native() is None:
    pytest.skip("the native kernels are not built", allow_module_level=True)

from pellucid.core.errors import ConfigError, InvariantViolation  # noqa: E402
from pellucid.core.plan import Chunk  # noqa: E402
from pellucid.kernels.cpu import AttentionBatch, CpuKernels, GgufRows, PackedWeight, RotaryHeads  # noqa: E402
from pellucid.kernels.cpu_step import CpuDecoder, LayerPieces, StepRows  # noqa: E402
from pellucid.kernels.layout import SAMPLE_ROW  # noqa: E402
from pellucid.kernels.lines import SequenceLines  # noqa: E402
from pellucid.kernels.processors import physical_cores  # noqa: E402
from pellucid.runtime.sampler import uniforms  # noqa: E402

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, BLOCK = 96, 4, 2, 32, 144, 150, 16
LEVELS = ("portable", "avx2", "avx512", "amx")
AVAILABLE = LEVELS[: LEVELS.index(processors.native().best_isa()) + 1]
SHARES = {"bf16": 0.02, "q8": 0.05, "q4": 0.05, "int8": 0.06, "mixed": 0.05}
INT8_CACHE_SHARE = 0.01  # more, where keys and values are int8
MIXTURE = ("Q5_1", "Q4_0", "Q8_0")  # of query, key and value in "mixed", whose other weights are q8
FORMATS = {"mixed": "q8"}
THREADS = min(2, len(physical_cores()))


class TinyModel:
    """Two layers with biases and head norms, packed in `weight_format`, and the same numbers read back as float64."""

    def __init__(
        self, weight_format: str, isa: str = "auto", *, deterministic: bool = False, int8_cache: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.kernels = CpuKernels(isa=isa, threads=THREADS, deterministic=deterministic)

        def matrix(*sizes: int, inputs: int, bias: bool = False, gated: bool = False) -> PackedWeight:
            parts = [torch.randn(size, inputs, generator=generator) * inputs**-0.5 for size in sizes]
            values = torch.randn(sum(sizes), generator=generator) * 0.1 if bias else None
            if weight_format == "mixed" and len(sizes) == 3:  # query, key and value
                kinds = [gguf.GGMLQuantizationType[storage] for storage in MIXTURE]
                rows = [
                    GgufRows(kind.name, gguf.quants.quantize(part.numpy(), kind)) for part, kind in zip(parts, kinds)
                ]
                return PackedWeight.from_gguf_bytes(rows, bias=values)
            return PackedWeight.from_tensor(parts, FORMATS.get(weight_format, weight_format), bias=values, gated=gated)

        def norm(size: int) -> torch.Tensor:
            return torch.rand(size, generator=generator) + 0.5

        angles = torch.arange(512)[:, None] / 100.0 ** (torch.arange(0, DIM, 2) / DIM)
        self.heads = RotaryHeads(HEADS, KV_HEADS, DIM, angles.cos(), angles.sin())
        cache = torch.zeros(2, 2, 80, KV_HEADS, BLOCK, DIM, dtype=torch.bfloat16)
        if int8_cache:
            cache = torch.zeros(2, 2, 80, KV_HEADS, BLOCK, DIM + 4, dtype=torch.int8)
        width, narrow = HEADS * DIM, KV_HEADS * DIM
        self.layers = [
            LayerPieces(
                attention_norm=norm(HIDDEN),
                qkv=matrix(width, narrow, narrow, inputs=HIDDEN, bias=True),
                output=matrix(HIDDEN, inputs=width),
                mlp_norm=norm(HIDDEN),
                gate_up=matrix(INNER, INNER, inputs=HIDDEN, gated=True),
                down=matrix(HIDDEN, inputs=INNER),
                cache=(cache[i, 0], cache[i, 1]),
                query_norm=norm(DIM),
                key_norm=norm(DIM),
            )
            for i in range(2)
        ]
        self.embedding, self.head, self.norm = matrix(VOCAB, inputs=HIDDEN), matrix(VOCAB, inputs=HIDDEN), norm(HIDDEN)
        self.decoder = CpuDecoder(
            self.kernels, self.heads, embedding=self.embedding, head=self.head, norm=self.norm, norm_eps=1e-5,
            layers=self.layers,
        )  # fmt: skip

    def step(self, chunks: list[tuple[np.ndarray, int, int, list[int]]]) -> torch.Tensor:
        """Compute [start, end) of each (tokens, start, end, blocks); logits of every row."""
        tokens, positions, slots, rows = [], [], [], []
        table = np.zeros((len(chunks), max(len(blocks) for *_, blocks in chunks)), np.int32)
        for i, (ids, start, end, blocks) in enumerate(chunks):
            table[i, : len(blocks)] = blocks
            rows.append((len(tokens), end - start, end))
            tokens.extend(ids[start:end])
            positions.extend(range(start, end))
            slots.extend(blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(start, end))
        step = StepRows(
            np.array(tokens, np.int32), np.array(positions, np.int32), np.array(slots, np.int64),
            np.arange(len(tokens), dtype=np.int32),
        )  # fmt: skip
        return self.decoder.step(step, AttentionBatch(np.array(rows), table)).clone()  # the next step overwrites it

    def stored(self, weight: PackedWeight) -> torch.Tensor:
        sections = [PackedWeight((section,)) for section in weight.sections]
        values = torch.cat([self.kernels.embedding(torch.arange(s.num_outputs), s) for s in sections]).double()
        if weight.gated:  # undo the interleaving of blocks of 16
            values = values.view(-1, 2, 16, values.shape[1]).transpose(0, 1).reshape(values.shape)
        return values

    def expected(self, ids: np.ndarray) -> torch.Tensor:
        """Logits of every position, without cache or packing."""

        def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

        def turn(x: torch.Tensor) -> torch.Tensor:
            cos, sin = (t[: len(ids)].double()[:, None] for t in (self.heads.cos, self.heads.sin))
            a, b = x.chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

        x = self.stored(self.embedding)[ids]
        for layer in self.layers:
            qkv = rms(x, layer.attention_norm) @ self.stored(layer.qkv).T + layer.qkv.bias.double()
            q, k, v = qkv.view(len(ids), -1, DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            q, k = turn(rms(q, layer.query_norm)), turn(rms(k, layer.key_norm))
            attended = F.scaled_dot_product_attention(
                q.transpose(0, 1), k.transpose(0, 1).repeat_interleave(2, 0), v.transpose(0, 1).repeat_interleave(2, 0),
                is_causal=True,
            )  # fmt: skip
            x = x + attended.transpose(0, 1).reshape(len(ids), -1) @ self.stored(layer.output).T
            gate, up = (rms(x, layer.mlp_norm) @ self.stored(layer.gate_up).T).chunk(2, dim=1)
            x = x + (F.silu(gate) * up) @ self.stored(layer.down).T
        return rms(x, self.norm) @ self.stored(self.head).T


def tokens(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, count)


def assert_close(logits: torch.Tensor, expected: torch.Tensor, weight_format: str, *, int8_cache: bool = False) -> None:
    worst = (logits.double() - expected).abs().max() / expected.abs().max()
    assert worst <= SHARES[weight_format] + (INT8_CACHE_SHARE if int8_cache else 0)


@pytest.mark.parametrize("isa", AVAILABLE)
@pytest.mark.parametrize("int8_cache", [False, True])
@pytest.mark.parametrize("weight_format", ["bf16", "q8", "q4", "mixed"])
def test_chunks_and_decodes_of_one_step(isa, weight_format, int8_cache) -> None:
    model = TinyModel(weight_format, isa, int8_cache=int8_cache)
    first, second = tokens(50, 1), tokens(23, 2)
    blocks = [list(range(4)), list(range(10, 14))]
    model.step([(first, 0, 49, blocks[0])])
    model.step([(second, 0, 5, blocks[1])])
    logits = model.step([(first, 49, 50, blocks[0]), (second, 5, 23, blocks[1])])
    assert_close(logits[:1], model.expected(first)[49:], weight_format, int8_cache=int8_cache)
    assert_close(logits[1:], model.expected(second)[5:], weight_format, int8_cache=int8_cache)


@pytest.mark.parametrize(
    ("weight_format", "int8_cache"), [("bf16", False), ("bf16", True), ("int8", False), ("q4", False), ("mixed", False)]
)
def test_many_rows_which_each_thread_owns(weight_format, int8_cache) -> None:
    """Twice, because rows that overlap in shared memory would show only if the threads happen to run apart."""
    model = TinyModel(weight_format, int8_cache=int8_cache)
    ids = tokens(410, 3)
    expected = model.expected(ids)
    for _ in range(2):
        logits = model.step([(ids, 0, 410, list(range(30)))])
        assert_close(logits, expected, weight_format, int8_cache=int8_cache)


@pytest.mark.parametrize("isa", AVAILABLE)
@pytest.mark.parametrize(("weight_format", "int8_cache"), [("bf16", False), ("q4", False), ("q4", True)])
def test_deterministic_logits_depend_on_the_sequence_alone(isa, weight_format, int8_cache) -> None:
    ids, other = tokens(60, 4), tokens(300, 5)
    options = {"deterministic": True, "int8_cache": int8_cache}
    whole = TinyModel(weight_format, isa, **options).step([(ids, 0, 60, list(range(4)))])
    model = TinyModel(weight_format, isa, **options)
    blocks, parts = [7, 3, 5, 1], []
    for start, end in ((0, 1), (1, 18), (18, 59), (59, 60)):
        logits = model.step([(other, 0, 300, list(range(20, 40))), (ids, start, end, blocks)])
        parts.append(logits[300:])
    assert torch.equal(torch.cat(parts), whole)


def test_phases_add_up_and_unfit_rows_are_refused() -> None:
    model = TinyModel("bf16")
    model.step([(tokens(4, 6), 0, 4, [0])])
    assert all(seconds >= 0 for seconds in model.decoder.phase_seconds().values())
    assert sum(model.decoder.phase_seconds().values()) > 0
    with pytest.raises(InvariantViolation, match=r"token_ids .* \[0, 150\)"):
        model.step([(np.array([VOCAB]), 0, 1, [0])])
    with pytest.raises(InvariantViolation, match="slots"):
        model.step([(tokens(1, 7), 0, 1, [80])])
    with pytest.raises(ConfigError, match="positions is int64"):
        StepRows(np.zeros(1, np.int32), np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int32))


def test_time_that_others_take_from_a_step_is_seen() -> None:
    """A process on each core that never rests gets its share of them, and the step's threads miss it."""
    model = TinyModel("bf16")
    hog = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    stolen, deadline = 0.0, time.monotonic() + 20.0
    with contextlib.ExitStack() as stack:
        for core in os.sched_getaffinity(0):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", hog, str(core)]))
            stack.callback(process.kill)
        while stolen < 1e-3 and time.monotonic() < deadline:
            began = time.perf_counter()
            model.step([(tokens(200, 7), 0, 200, list(range(14)))])
            assert 0 <= model.decoder.stolen_seconds() <= time.perf_counter() - began
            stolen = max(stolen, model.decoder.stolen_seconds())
    assert stolen >= 1e-3


def lines_of(sequences: dict[int, tuple[np.ndarray, list[int]]]) -> tuple[SequenceLines, dict[int, int]]:
    """Lines with these tokens and blocks, every other one empty."""
    lines, line_of = SequenceLines(BLOCK), {}
    lines.add(2 * len(sequences))
    for i, (seq_id, (ids, blocks)) in enumerate(sequences.items()):
        line = line_of[seq_id] = 2 * i + 1
        lines.write_tokens(line, tuple(ids.tolist()))
        lines.write_blocks(line, 0, tuple(blocks))
    return lines, line_of


@pytest.mark.parametrize("isa", AVAILABLE)
def test_drawing_is_a_step_and_then_a_sample(isa) -> None:
    """From lines of tokens and blocks: the tokens that the logits of the same rows give, behind their chunks."""
    model, twin = TinyModel("q8", isa), TinyModel("q8", isa)
    ids = {4: tokens(50, 8), 9: tokens(23, 9), 2: tokens(30, 10)}
    blocks = {4: list(range(4)), 9: [12, 10, 11], 2: [20, 22]}
    lines, line_of = lines_of({seq_id: (ids[seq_id], blocks[seq_id]) for seq_id in ids})
    lines.rules[line_of[9]] = (0.8, 0.9, 0.01, 40, 1234)
    chunks = (Chunk(9, 0, 23, True), Chunk(2, 0, 29, False), Chunk(4, 0, 50, True))
    rows = np.zeros(2, SAMPLE_ROW)
    for _ in range(12):
        drawn = model.decoder.draw(chunks, lines, line_of)
        logits = twin.step([(ids[c.seq_id], c.start, c.end, blocks[c.seq_id]) for c in chunks])
        last = [sum(c.num_tokens for c in chunks[: i + 1]) - 1 for i, c in enumerate(chunks) if c.samples]
        rows[0] = (0.8, 0.9, 0.01, 40, uniforms(np.array([1234], np.uint64), np.array([chunks[0].end]))[0])
        expected = model.kernels.sample(logits[last], rows).tolist()
        assert drawn == ((expected[0],), (), (expected[1],))
        for seq_id, token in ((9, expected[0]), (4, expected[1])):
            ids[seq_id] = np.append(ids[seq_id], token)
            line = line_of[seq_id]
            assert lines.tokens[line, : lines.known[line]].tolist() == ids[seq_id].tolist()
        chunks = tuple(
            Chunk(seq_id, len(ids[seq_id]) - 1, len(ids[seq_id]), samples)
            for seq_id, samples in ((9, True), (2, False), (4, True))
        )
    assert model.decoder.sample_seconds > 0


def test_chunks_that_cannot_be_computed_are_named() -> None:
    model = TinyModel("q8")
    lines, line_of = lines_of({7: (tokens(20, 11), [0, 1]), 8: (np.array([VOCAB]), [2]), 9: (tokens(5, 12), [80])})
    fits = Chunk(7, 0, 20, True)
    for chunk, words in (
        (Chunk(7, 20, 21, True), "20 tokens are known and 2 blocks of 16"),
        (Chunk(7, 5, 5, True), "cannot be computed"),
        (Chunk(7, -1, 5, True), "cannot be computed"),
        (Chunk(8, 0, 1, True), "does not exist"),
        (Chunk(9, 0, 5, True), "does not exist"),
        (Chunk(3, 0, 1, True), "sequence 3, which the executor was never told of"),
    ):
        before = lines.tokens.copy()
        for chunks in ((chunk,), (fits, chunk)):
            with pytest.raises(InvariantViolation, match=words):
                model.decoder.draw(chunks, lines, line_of)
        assert np.array_equal(lines.tokens, before)
    lines.num_blocks[line_of[7]] = 1
    with pytest.raises(InvariantViolation, match="20 tokens are known and 1 blocks of 16"):
        model.decoder.draw((fits,), lines, line_of)


def test_random_numbers_are_those_of_the_sampler() -> None:
    generator = np.random.default_rng(13)
    seeds, positions = generator.integers(0, 2**64, 50, np.uint64), generator.integers(0, 2**31, 50)
    native_ = [processors.native().uniform_at(int(s), int(p)) for s, p in zip(seeds, positions)]
    assert native_ == uniforms(seeds, positions).tolist()
