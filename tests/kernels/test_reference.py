"""Every reference operation against an oracle that works row by row, over odd sizes (hypothesis)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels import oracle
from torch.utils._python_dispatch import TorchDispatchMode

from pellucid.core.errors import ConfigError
from pellucid.kernels import Kernels, sampling, select
from pellucid.kernels.reference import DenseWeight, dequantised, quantised, rope_table

CPU = torch.device("cpu")
KINDS: dict[str, Callable[[], Kernels]] = {
    "reference": lambda: select("cpu", isa="reference"),
    "deterministic": lambda: select("cpu", deterministic=True),
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
MODEST = settings(max_examples=25, deadline=None)


@pytest.fixture(params=sorted(KINDS), scope="module")
def ops(request: pytest.FixtureRequest) -> Kernels:
    return KINDS[request.param]()


@dataclass(frozen=True)
class Case:
    """A step over a paged cache: chunks with their block tables, heads, sizes."""

    chunks: list[tuple[int, int]]
    tables: list[list[int]]
    block_size: int
    num_kv_heads: int
    shared: int
    head_dim: int
    num_blocks: int
    dtype: torch.dtype
    int8_cache: bool
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_size = draw(st.sampled_from([1, 3, 4, 16]))
    chunks, counts = [], []
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, 40))
        length = draw(st.sampled_from([1, 1, 1, 2, 5, 17, 33]))
        chunks.append((start, start + length))
        counts.append(-(-(start + length) // block_size))
    seed = draw(st.integers(0, 2**31))
    num_blocks = sum(counts) + 2
    order = np.random.default_rng(seed).permutation(num_blocks).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    return Case(
        chunks,
        tables,
        block_size,
        num_kv_heads=draw(st.integers(1, 3)),
        shared=draw(st.integers(1, 3)),
        head_dim=2 * draw(st.integers(1, 12)),
        num_blocks=num_blocks,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        int8_cache=draw(st.booleans()),
        seed=seed,
    )


@MODEST
@given(case=cases())
def test_attention_and_writes(ops: Kernels, case: Case) -> None:
    """New keys and values land in their slots and nowhere else, and every row attends to exactly its own past."""
    generator = torch.Generator().manual_seed(case.seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    layout = oracle.layout_of(case.chunks, case.tables, case.block_size)
    rows = ops.padded_rows(layout.num_rows, case.dtype)

    def stored(x: torch.Tensor) -> torch.Tensor:
        return quantised(x) if case.int8_cache else x

    cache = [stored(random(case.num_blocks, case.num_kv_heads, case.block_size, case.head_dim)) for _ in range(2)]
    new = [random(rows, case.num_kv_heads, case.head_dim) for _ in range(2)]
    queries = random(rows, case.num_kv_heads * case.shared, case.head_dim)
    expected = [memory.clone() for memory in cache]
    for memory, rows_of in zip(expected, new):
        for row, slot in enumerate(layout.slots):
            memory[slot // case.block_size, :, slot % case.block_size] = stored(rows_of[row])

    plan = ops.plan_attention(layout, case.num_kv_heads, case.dtype, CPU)
    ops.write_kv(*new, *cache, plan)
    attended = ops.attention(queries, *cache, plan).view(queries.shape)

    assert all(torch.equal(memory, wanted) for memory, wanted in zip(cache, expected))
    seen = [dequantised(memory, case.dtype) if case.int8_cache else memory for memory in cache]
    for i, (start, _) in enumerate(case.chunks):
        own = slice(int(layout.row_starts[i]), int(layout.row_starts[i + 1]))
        wanted = oracle.attention(queries[own], *seen, case.tables[i], case.block_size, start)
        torch.testing.assert_close(attended[own].double(), wanted, rtol=0, atol=TOLERANCE[case.dtype])


@given(
    rows=st.integers(1, 5),
    half=st.integers(1, 40),
    spread=st.sampled_from([0.0, 1e-33, 1e-20, 1.0, 1e30]),
    seed=st.integers(0, 1000),
)
@MODEST
def test_quantised_numbers_are_within_half_a_step(rows: int, half: int, spread: float, seed: int) -> None:
    x = torch.randn(rows, 2 * half, generator=torch.Generator().manual_seed(seed)) * spread
    packed = quantised(x)
    assert packed.shape == (rows, 2 * half + 4)
    step = x.abs().amax(dim=1, keepdim=True).double() / 127
    error = (dequantised(packed, torch.float32).double() - x.double()).abs()
    if spread < 1e-30:
        assert (error <= x.abs()).all(), "too small to be kept"
    else:
        assert (error <= 0.5001 * step).all()
        assert packed[:, :-4].abs().amax() == 127


def test_attention_in_pieces(ops: Kernels) -> None:
    """A chunk longer than one mask, behind a cached prefix, beside decodes of very different lengths."""
    torch.manual_seed(0)
    chunks = [(37, 37 + 2100), (999, 1000), (2, 3), (300, 301)]
    counts = [-(-end // 16) for _, end in chunks]
    order = np.random.default_rng(0).permutation(sum(counts)).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    layout = oracle.layout_of(chunks, tables, 16)
    keys, values = torch.randn(2, sum(counts), 1, 16, 8).unbind()
    queries = torch.randn(ops.padded_rows(layout.num_rows, torch.float32), 2, 8)
    attended = ops.attention(queries, keys, values, ops.plan_attention(layout, 1, torch.float32, CPU))
    for i, (start, end) in enumerate(chunks):
        for position in {start, (start + end) // 2, end - 1}:
            row = int(layout.row_starts[i]) + position - start
            wanted = oracle.attention(queries[row : row + 1], keys, values, tables[i], 16, position)
            torch.testing.assert_close(attended[row].view(2, 8).double(), wanted[0], rtol=0, atol=2e-5)


@MODEST
@given(
    half=st.integers(1, 20),
    heads=st.integers(1, 4),
    positions=st.lists(st.integers(0, 500), min_size=1, max_size=6),
    theta=st.sampled_from([500.0, 1e4, 1e6]),
)
def test_rotate(ops: Kernels, half: int, heads: int, positions: list[int], theta: float) -> None:
    x = torch.randn(len(positions), heads, 2 * half, generator=torch.Generator().manual_seed(half))
    table = rope_table(501, 2 * half, theta, None, CPU)
    turned = ops.rotate(x, *(part[positions] for part in table))
    for row, position in enumerate(positions):
        for head in range(heads):
            wanted = oracle.rotate(x[row, head], position, theta)
            torch.testing.assert_close(turned[row, head].double(), wanted, rtol=0, atol=5e-4)


def test_rope_factors_divide_frequencies() -> None:
    plain, _ = rope_table(10, 4, 100.0, None, CPU)
    scaled, _ = rope_table(10, 4, 100.0, (1.0, 2.0), CPU)
    torch.testing.assert_close(scaled[8, 0, 1], plain[4, 0, 1])
    torch.testing.assert_close(scaled[8, 0, 0], plain[8, 0, 0])


@MODEST
@given(
    rows=st.integers(1, 70),
    width=st.integers(1, 50),
    out=st.integers(1, 40),
    bias=st.booleans(),
    seed=st.integers(0, 9),
)
def test_rowwise_operations(ops: Kernels, rows: int, width: int, out: int, bias: bool, seed: int) -> None:
    """Linear maps, norm, activation against float64, across the edges of row tiles."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    weight = DenseWeight(
        torch.randn(out, width, generator=generator), torch.randn(out, generator=generator) if bias else None
    )
    product = F.linear(x.double(), weight.matrix.double(), None if weight.bias is None else weight.bias.double())
    torch.testing.assert_close(ops.linear(x, weight).double(), product, rtol=1e-4, atol=1e-4)
    residual = torch.randn(rows, out, generator=generator)
    if not bias:
        added = residual.double() + product
        torch.testing.assert_close(ops.linear_add_(residual, x, weight).double(), added, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(residual.double(), added, rtol=1e-4, atol=1e-4)
    scale = torch.rand(width, generator=generator)
    normed = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * scale.double()
    torch.testing.assert_close(ops.rms_norm(x, scale, 1e-5, torch.float32).double(), normed, rtol=1e-4, atol=1e-5)
    pair = torch.randn(rows, 2 * width, generator=generator)
    gate, up = pair.double().chunk(2, -1)
    torch.testing.assert_close(ops.silu_mul(pair).double(), gate / (1 + (-gate).exp()) * up, rtol=1e-4, atol=1e-5)


def test_logits_are_float32_however_narrow_the_weights(ops: Kernels) -> None:
    """In bfloat16 a logit of 16 would come out within 0.06; the two-pass product must stay under a hundredth of it."""
    torch.manual_seed(0)
    x, matrix = torch.randn(5, 256).bfloat16(), torch.randn(333, 256).bfloat16()
    got = ops.logits(x, DenseWeight(matrix))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, x.float() @ matrix.float().t(), rtol=0, atol=2e-3)


@MODEST
@given(
    width=st.integers(1, 700),
    zeros=st.integers(0, 600),
    chance=st.floats(0, 1, exclude_max=True),
    seed=st.integers(0, 99),
)
def test_pick_inverts_the_cumulative_sum(width: int, zeros: int, chance: float, seed: int) -> None:
    """The chosen column holds the target inside its share of the sum, and never has weight zero."""
    weights = np.random.default_rng(seed).random(width + zeros).astype(np.float32) + np.float32(1e-3)
    weights[np.random.default_rng(seed + 1).permutation(width + zeros)[:zeros]] = 0
    column = int(sampling.pick(torch.from_numpy(weights)[None], torch.tensor([chance], dtype=torch.float64))[0])
    ends = weights.astype(np.float64).cumsum()
    assert weights[column] > 0
    assert ends[column] - weights[column] <= chance * ends[-1] * (1 + 1e-12) + 1e-12
    assert chance * ends[-1] <= ends[column] * (1 + 1e-12)


def test_pick_follows_the_weights() -> None:
    """An even grid of chances hits each column in proportion to its weight."""
    weights = torch.tensor([0.1, 0.0, 0.4, 0.2, 0.3])
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    counts = torch.bincount(sampling.pick(weights.expand(1000, -1), grid), minlength=5)
    torch.testing.assert_close(counts.float() / 1000, weights, rtol=0, atol=0.0011)


class EveryTensorOn(TorchDispatchMode):
    """Fails as soon as an operation makes a tensor anywhere but on `device`, or asks a tensor for its values."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.count = device, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert "_local_scalar_dense" not in str(func), f"{func} waits for the device"
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                assert tensor.device.type == self.device, f"{func} made a tensor on {tensor.device}"
                self.count += 1
        return out


def test_model_operations_stay_on_their_device() -> None:
    """On the "meta" device a read of a value or a tensor made elsewhere cannot go unnoticed."""
    ops, meta = select("meta", isa="reference"), torch.device("meta")
    layout = oracle.layout_of([(0, 5), (8, 9), (7, 12)], [[0, 1], [2, 3, 4], [5, 6, 7]], 4)
    plan = ops.plan_attention(layout, 2, torch.float32, meta)
    table = rope_table(16, 8, 1e4, None, meta)
    x, cache = torch.empty(layout.num_rows, 24, device=meta), torch.empty(2, 8, 2, 4, 8, device=meta)
    square = DenseWeight(torch.empty(24, 24, device=meta))
    with EveryTensorOn("meta") as watch:
        hidden = ops.rms_norm(
            ops.embedding(torch.zeros(11, dtype=torch.long, device=meta), x), x[0], 1e-5, torch.float32
        )
        heads = ops.rotate(ops.linear(hidden, square).view(11, 3, 8), *(part[:11] for part in table))
        ops.write_kv(heads[:, :2], heads[:, :2], *cache, plan)
        attended = ops.attention(torch.empty(11, 4, 8, device=meta), *cache, plan)
        ops.linear_add_(x, attended[:, :24], square)
        scores = ops.logits(ops.silu_mul(x).repeat(1, 2), square)
        sampling.greedy(scores)
        kept, _ = sampling.top_candidates(sampling.scaled_softmax(scores, torch.ones(11, device=meta)), 3)
        sampling.pick(kept, torch.zeros(11, dtype=torch.float64, device=meta))
    assert watch.count > 40


def test_padded_rows_are_few_sizes(ops: Kernels) -> None:
    """In bfloat16: never fewer rows than asked, at most a quarter or a tile more, and few distinct sizes."""
    sizes = {n: ops.padded_rows(n, torch.bfloat16) for n in range(1025)}
    assert sizes[0] == 0
    assert all(n <= size <= max(n * 1.25, n + 31) for n, size in sizes.items())
    assert len(set(sizes.values())) <= 34


def test_unknown_isa_is_refused() -> None:
    with pytest.raises(ConfigError, match="isa 'avx9' is not available"):
        select("cpu", isa="avx9")
