"""Paged attention, rotation and the cache write against a naive float64 oracle that loops over tokens.

Tolerance of attention: probabilities and values are bfloat16 (2^-9 each) and the exponential is good to 1e-4, so a
result is within 0.01 of the largest value attended. Rotation is float32, rounded once to bfloat16. With an int8 cache
the oracle attends what the cache holds, rounded to bfloat16 once more where tiles attend a chunk; what it should hold,
the reference says.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

cpu = pytest.importorskip("pellucid.kernels.cpu")
processors = pytest.importorskip("pellucid.kernels.processors")
if processors.native() is None:
    pytest.skip("the native kernels are not built", allow_module_level=True)

from pellucid.core.errors import ConfigError  # noqa: E402
from pellucid.kernels import reference  # noqa: E402
from pellucid.kernels.cpu import AttentionBatch, CpuKernels, RotaryHeads  # noqa: E402
from pellucid.kernels.processors import physical_cores  # noqa: E402

LEVELS = ("portable", "avx2", "avx512", "amx")
BEST = processors.native().best_isa()
AVAILABLE = LEVELS[: LEVELS.index(BEST) + 1]
THREADS = min(2, len(physical_cores()))
CACHES = (torch.bfloat16, torch.int8)
TOLERANCE = 0.01


@pytest.fixture(params=CACHES, ids=str)
def cached(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(scope="module", params=AVAILABLE)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(isa=request.param, threads=THREADS)


class Scene:
    """Sequences with random queries, keys and values, their cache written through the kernels under test.

    `chunks` holds (context, rows) per sequence: the last `rows` of `context` tokens are computed.
    """

    def __init__(
        self, chunks, *, heads, kv_heads, head_dim, block_size=16, seed=0, spread=1.0, cached=torch.bfloat16
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.chunks, self.heads, self.kv_heads, self.head_dim = chunks, heads, kv_heads, head_dim
        # What a bfloat16 cache keeps as it is. Such numbers are often halfway between two of int8, where levels differ.
        exact = torch.bfloat16 if cached == torch.bfloat16 else torch.float32
        counts = [-(-context // block_size) for context, _ in chunks]
        ids = torch.randperm(sum(counts) + 3, generator=generator).to(torch.int32).split([*counts, 3])
        self.tables = np.zeros((len(chunks), max(counts)), np.int32)
        for i, blocks in enumerate(ids[:-1]):
            self.tables[i, : len(blocks)] = blocks.numpy()
        self.keys, self.values = (
            [torch.randn(context, kv_heads, head_dim, generator=generator).to(exact) * spread for context, _ in chunks]
            for _ in range(2)
        )
        rows = sum(rows for _, rows in chunks)
        self.queries = (torch.randn(rows, heads, head_dim, generator=generator) * spread).bfloat16()
        shape = (sum(counts) + 3, kv_heads, block_size, head_dim + (4 if cached == torch.int8 else 0))
        self.cache = (torch.zeros(shape, dtype=cached), torch.zeros(shape, dtype=cached))
        self.block_size = block_size

    def fill(self, kernels: CpuKernels) -> None:
        """Write all keys and values through `rotate_and_write`, at an angle of zero."""
        self.isa = kernels.isa
        for i, (context, _) in enumerate(self.chunks):
            queries = torch.zeros(context, self.heads, self.head_dim)
            qkv = torch.cat((queries, self.keys[i].float(), self.values[i].float()), dim=1).view(context, -1)
            still = (torch.ones(context, self.head_dim // 2), torch.zeros(context, self.head_dim // 2))
            heads = RotaryHeads(self.heads, self.kv_heads, self.head_dim, *still)
            positions = np.arange(context)
            slots = self.tables[i, positions // self.block_size].astype(np.int64) * self.block_size
            slots += positions % self.block_size
            kernels.rotate_and_write(qkv, heads, torch.arange(context), torch.from_numpy(slots), self.cache)

    def batch(self) -> AttentionBatch:
        starts = np.cumsum([0, *(rows for _, rows in self.chunks)])[:-1]
        rows = [(start, rows, context) for start, (context, rows) in zip(starts, self.chunks)]
        return AttentionBatch(np.array(rows, np.int64), self.tables)

    def int8_at(self, half: int, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (half 0) or values of sequence i as an int8 cache holds them (csrc/kernels.h says how): numbers
        `[context, G, D]` and their scales `[context, G, 1]`."""
        blocks, kv_heads, size, width = self.cache[half].shape
        pieces = self.cache[half].view(blocks, kv_heads, size // 16, 16 * width)
        bytes_ = pieces[..., : 16 * self.head_dim].view(torch.uint8).int() - 128
        if half == 0:
            numbers = bytes_.view(blocks, kv_heads, size // 16, self.head_dim // 4, 16, 4).transpose(3, 4)
        else:
            numbers = bytes_.view(blocks, kv_heads, size // 16, self.head_dim // 16, 4, 16, 4)
            numbers = numbers.permute(0, 1, 2, 4, 6, 3, 5)
        numbers = numbers.reshape(blocks, kv_heads, size, self.head_dim)
        scales = pieces[..., 16 * self.head_dim :].contiguous().view(torch.float32).view(blocks, kv_heads, size, 1)
        at = torch.arange(self.chunks[i][0])
        block = torch.from_numpy(self.tables[i]).long()[at // size]
        return numbers[block, :, at % size], scales[block, :, at % size]

    def kept(self, half: int, i: int) -> torch.Tensor:
        """What sequence i's queries see of its keys or values; up to 16 queries of a KV head are a decode."""
        if self.cache[0].dtype == torch.bfloat16:
            return (self.keys, self.values)[half][i].double()
        numbers, scales = self.int8_at(half, i)
        on_tiles = self.isa == "amx" and self.chunks[i][1] * self.heads // self.kv_heads > 16
        return (numbers * scales).bfloat16().double() if on_tiles else numbers * scales.double()

    def check(self, out: torch.Tensor) -> None:
        largest = max(v.abs().max().item() for v in self.values)
        assert (out - self.expected()).abs().max() <= TOLERANCE * largest

    def expected(self) -> torch.Tensor:
        out, row = [], 0
        group = self.heads // self.kv_heads
        for i, (context, rows) in enumerate(self.chunks):
            all_keys, all_values = (self.kept(half, i).repeat_interleave(group, dim=1) for half in (0, 1))
            for j in range(rows):
                seen = context - rows + j + 1
                keys, values = all_keys[:seen], all_values[:seen]
                scores = torch.einsum("hd,thd->ht", self.queries[row].double(), keys) * self.head_dim**-0.5
                out.append(torch.einsum("ht,thd->hd", scores.softmax(dim=1), values).flatten())
                row += 1
        return torch.stack(out)


@settings(max_examples=15, deadline=None)
@given(
    chunks=st.lists(st.tuples(st.integers(1, 80), st.integers(1, 40)), min_size=1, max_size=4),
    shape=st.sampled_from([(1, 1, 32), (3, 1, 64), (4, 4, 32), (9, 3, 64), (8, 2, 128), (20, 1, 32)]),
    block_size=st.sampled_from([16, 32]),
    spread=st.sampled_from([0.01, 1.0, 4.0]),
    cached=st.sampled_from(CACHES),
    seed=st.integers(0, 1000),
)
def test_attention_matches_the_oracle(kernels, chunks, shape, block_size, spread, cached, seed) -> None:
    heads, kv_heads, head_dim = shape
    chunks = [(max(context, rows), rows) for context, rows in chunks]
    scene = Scene(
        chunks, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, seed=seed, spread=spread,
        cached=cached,
    )  # fmt: skip
    scene.fill(kernels)
    scene.check(kernels.attention(scene.queries, scene.cache, scene.batch()))


@pytest.mark.parametrize("shape", [(2, 2, 32), (6, 2, 64), (4, 2, 96), (8, 2, 128), (4, 1, 256)])
@pytest.mark.parametrize("chunks", [[(1300, 1)], [(1300, 3)], [(1100, 40)], [(513, 1), (512, 1), (1025, 2), (600, 34)]])
def test_contexts_of_several_splits(kernels, cached, chunks, shape) -> None:
    heads, kv_heads, head_dim = shape
    scene = Scene(chunks, heads=heads, kv_heads=kv_heads, head_dim=head_dim, spread=3.0, cached=cached)
    scene.fill(kernels)
    scene.check(kernels.attention(scene.queries, scene.cache, scene.batch()))


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_scores_that_grow_along_the_context(kernels, cached, head_dim) -> None:
    """The maximum of a row's first tokens says nothing of the later ones, which are thousands of times likelier."""
    scene = Scene([(700, 50)], heads=4, kv_heads=2, head_dim=head_dim, cached=cached)
    growth = torch.linspace(0.01, 12.0, 700)[:, None, None]
    scene.keys[0] = (scene.keys[0].float() * growth).to(scene.keys[0].dtype)
    scene.fill(kernels)
    scene.check(kernels.attention(scene.queries, scene.cache, scene.batch()))


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(
    "chunks", [[(2100, 60)], [(577, 30)], [(513, 64)], [(1500, 140)], [(1700, 24), (600, 130), (40, 20), (1600, 1)]]
)
def test_chunks_that_several_items_share(kernels, cached, chunks, kv_heads) -> None:
    """Few rows are cut along their context, many by rows; parts are merged, and the threads must not decide how."""
    scene = Scene(chunks, heads=3 * kv_heads, kv_heads=kv_heads, head_dim=64, spread=2.0, cached=cached)
    scene.fill(kernels)
    out = kernels.attention(scene.queries, scene.cache, scene.batch())
    scene.check(out)
    alone = CpuKernels(isa=kernels.isa, threads=1)
    assert torch.equal(alone.attention(scene.queries, scene.cache, scene.batch()), out)


def test_stale_numbers_beyond_the_context_do_not_leak(kernels, cached) -> None:
    scene = Scene([(5, 1), (37, 20)], heads=3, kv_heads=1, head_dim=64, cached=cached)
    for half in scene.cache:
        half.fill_(1e30 if cached == torch.bfloat16 else 0x71)  # four times which is 1.2e30 as a scale
    scene.fill(kernels)
    scene.check(kernels.attention(scene.queries, scene.cache, scene.batch()))


@pytest.mark.parametrize("chunks", [[(40, 1)], [(600, 1)], [(600, 40)]])
@pytest.mark.parametrize(("keys", "values"), [(1.0, 1e-34), (1.0, 1e30), (1e-34, 1.0), (1e-6, 1e-6), (0.0, 0.0)])
def test_huge_and_tiny_numbers_in_int8(kernels, chunks, keys, values) -> None:
    """Below 1e-30 they count as zeros; a query of zeros attends all tokens alike."""
    scene = Scene(chunks, heads=3, kv_heads=1, head_dim=64, cached=torch.int8)
    scene.queries[0] = 0
    scene.keys = [(k.double() * keys).float() for k in scene.keys]
    scene.values = [(v.double() * values).float() for v in scene.values]
    scene.fill(kernels)
    scene.check(kernels.attention(scene.queries, scene.cache, scene.batch()))


def test_the_int8_cache_holds_what_the_reference_would_write(kernels) -> None:
    scene = Scene([(37, 1), (64, 1)], heads=4, kv_heads=2, head_dim=96, block_size=32, cached=torch.int8)
    scene.fill(kernels)
    for i in range(len(scene.chunks)):
        for half, written in enumerate((scene.keys[i], scene.values[i])):
            numbers, scale_bytes = reference.quantised(written).split([96, 4], dim=-1)
            found, scales = scene.int8_at(half, i)
            assert torch.equal(scales, scale_bytes.contiguous().view(torch.float32))
            steps = (found - numbers.int()).abs()
            assert steps.max() <= 1, "halfway between two, rounding may go either way"
            assert steps.float().mean() < 1e-4


@pytest.mark.parametrize("isa", AVAILABLE)
def test_a_deterministic_row_depends_neither_on_its_batch_nor_on_the_threads(isa, cached) -> None:
    whole = Scene([(1200, 60)], heads=6, kv_heads=2, head_dim=64, cached=cached)
    one, two = (CpuKernels(isa=isa, threads=threads, deterministic=True) for threads in (1, THREADS))
    whole.fill(one)
    together = one.attention(whole.queries, whole.cache, whole.batch())
    assert torch.equal(two.attention(whole.queries, whole.cache, whole.batch()), together)
    for row, count in ((0, 1), (7, 4), (20, 40)):
        batch = AttentionBatch(np.array([[0, count, 1140 + row + count]]), whole.tables)
        part = two.attention(whole.queries[row : row + count], whole.cache, batch)
        assert torch.equal(part, together[row : row + count]), (row, count)


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 20), shape=st.sampled_from([(2, 1, 32), (3, 3, 64), (4, 2, 96)]), normed=st.booleans(),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_rotation_and_norm_of_queries(kernels, rows, shape, normed, seed) -> None:
    num_heads, num_kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(rows, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator)
    angles = torch.rand(64, head_dim // 2, generator=generator) * 6
    norms = [torch.rand(head_dim, generator=generator) if normed else None for _ in range(2)]
    heads = RotaryHeads(num_heads, num_kv_heads, head_dim, angles.cos(), angles.sin(), *norms, 1e-5)
    positions = torch.randint(0, 64, (rows,), generator=generator)
    cache = tuple(torch.zeros(4, num_kv_heads, 16, head_dim, dtype=torch.bfloat16) for _ in range(2))
    queries = kernels.rotate_and_write(qkv, heads, positions, torch.randperm(64, generator=generator)[:rows], cache)
    x = qkv[:, : num_heads * head_dim].view(rows, num_heads, head_dim).double()
    if norms[0] is not None:
        x = x / (x.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * norms[0]
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos()[positions][:, None], angles.sin()[positions][:, None]
    expected = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    assert torch.allclose(queries.double(), expected, rtol=2**-8, atol=1e-5)


def test_caches_without_a_native_layout_are_refused() -> None:
    kernels = CpuKernels(threads=1)
    for head_dim, block_size in ((48, 16), (64, 8), (288, 16)):
        cache = tuple(torch.zeros(2, 1, block_size, head_dim, dtype=torch.bfloat16) for _ in range(2))
        with pytest.raises(ConfigError, match="no native layout"):
            kernels.attention(
                torch.zeros(1, 1, head_dim, dtype=torch.bfloat16),
                cache,
                AttentionBatch(np.ones((1, 3)), np.ones((1, 1))),
            )
