"""Packed products against float64 products of the same stored values, on every instruction level of this machine.

The tolerance of a product is stated per format as a share of the norms of its operands: |error| <= share * |x| * |w|,
the natural scale of a rounding error that is spread over the inputs.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

cpu = pytest.importorskip("pellucid.kernels.cpu")
processors = pytest.importorskip("pellucid.kernels.processors")
gguf = pytest.importorskip("gguf")
if processors.native() is None:
    pytest.skip("the native kernels are not built", allow_module_level=True)

from pellucid.core.errors import ConfigError, ModelError  # noqa: E402
from pellucid.kernels.cpu import CpuKernels, GgufRows, PackedWeight  # noqa: E402
from pellucid.kernels.gguf_types import GGUF_TYPES, packed_bytes  # noqa: E402
from pellucid.kernels.processors import physical_cores  # noqa: E402

LEVELS = ("portable", "avx2", "avx512", "amx")
BEST = processors.native().best_isa()
AVAILABLE = LEVELS[: LEVELS.index(BEST) + 1]
# Share of |x| |w|: bf16 rounds x (2^-9); the others quantise x to 8 bits per 32 inputs or (int8) per
# row.
SHARES = {"bf16": 0.004, "int8": 0.02, "q8": 0.02, "q4": 0.02}


@pytest.fixture(scope="module", params=AVAILABLE)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(isa=request.param, threads=min(2, len(physical_cores())))


def stored_values(weight: PackedWeight, kernels: CpuKernels) -> torch.Tensor:
    """What the packed weight holds, read back row by row."""
    return kernels.embedding(torch.arange(weight.num_outputs), weight).double()


def assert_product(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, share: float, *, lost: float = 0.0) -> None:
    """`lost`: what may become of any weight, in parts of the largest."""
    expected = x.double() @ w.T
    bound = x.double().norm(dim=1, keepdim=True) * (share * w.norm(dim=1) + lost * w.abs().max()) + 1e-30
    worst = ((y.double() - expected).abs() / bound).max().item() if y.numel() else 0.0
    assert worst <= 1.0, f"error is {worst:.2f} of the bound"


@settings(max_examples=12, deadline=None)
@given(
    rows=st.sampled_from([0, 1, 2, 3, 5, 8, 9, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65, 80, 97, 192, 250]),
    outputs=st.integers(1, 100),
    inputs=st.integers(1, 800),
    weight_format=st.sampled_from(sorted(SHARES)),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
    bf16=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_linear_matches_its_stored_values(kernels, rows, outputs, inputs, weight_format, scale, bf16, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(outputs, inputs, generator=generator)
    x = torch.randn(rows, inputs, generator=generator) * scale
    x = x.to(torch.bfloat16 if bf16 else torch.float32)
    weight = PackedWeight.from_tensor([w], weight_format)
    y = kernels.linear(x, weight, dtype=torch.float32)
    # Below 2^-14 units, of which the largest weight may be an eighth, tiles lose a weight's last bits (csrc/tiles.h).
    lost = 2.0**-12 if kernels.isa == "amx" and weight_format in ("q8", "q4") else 0.0
    assert_product(y, x, stored_values(weight, kernels), SHARES[weight_format], lost=lost)
    bias = torch.randn(outputs, generator=generator) * scale
    biased = kernels.linear(x, PackedWeight.from_tensor([w], weight_format, bias=bias), dtype=torch.float32)
    assert torch.equal(biased, y + bias)


@pytest.mark.parametrize("rows", [1, 20, 90])
@pytest.mark.parametrize("weight_format", ["bf16", "int8", "q8", "q4"])
def test_the_largest_weight_may_lie_just_below_a_power_of_two(kernels, weight_format, rows) -> None:
    """Tiles reckon weights in a number format that ends there."""
    for below in (2.0**-6, 2.0**-8, 2.0**-9, 2.0**-10, 2.0**-12, 0.0):
        largest = torch.tensor([[2 - below], [below - 2]])
        for exponent in (-5, -4, -3, -2, -1, 0, 1):
            weight = PackedWeight.from_tensor([largest * 2.0**exponent], weight_format)
            y = kernels.linear(torch.ones(rows, 1), weight, dtype=torch.float32)
            assert_product(y, torch.ones(rows, 1), stored_values(weight, kernels), SHARES[weight_format])


@pytest.mark.parametrize("weight_format", ["bf16", "int8", "q8", "q4"])
def test_stored_values_are_close_to_the_original(kernels, weight_format) -> None:
    w = torch.randn(48, 128, generator=torch.Generator().manual_seed(1))
    stored = stored_values(PackedWeight.from_tensor([w], weight_format), kernels)
    step = {"bf16": 2.0**-8, "int8": 2 / 127, "q8": 2 / 127, "q4": 1 / 7}[weight_format]
    assert (stored - w).abs().max() <= step * w.abs().max()


def dequantized(raw: np.ndarray, storage: str) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[storage])).double()


@pytest.mark.parametrize("storage", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("rows", [1, 8, 40, 70])
def test_gguf_rows_keep_their_values_exactly(kernels, storage, rows) -> None:
    w = np.random.default_rng(2).standard_normal((80, 96)).astype(np.float32)
    raw = gguf.quants.quantize(w, gguf.GGMLQuantizationType[storage])
    exact = dequantized(raw, storage)
    weight = PackedWeight.from_gguf_bytes([GgufRows(storage, raw[:48]), GgufRows(storage, raw[48:])])
    assert torch.allclose(stored_values(weight, kernels), exact, rtol=1e-6, atol=1e-7)
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(3))
    assert_product(kernels.linear(x, weight), x, exact, 0.02)


HALVES = {"Q4_K": slice(0, 4), "Q5_K": slice(0, 4), "Q6_K": slice(208, 210)}


def k_rows(storage: str, rows: int, blocks: int) -> np.ndarray:
    """Random blocks of a K type: any bytes are valid but for the float16 scales of each."""
    generator, size = np.random.default_rng(4), GGUF_TYPES[storage].block_bytes
    raw = generator.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    count = (HALVES[storage].stop - HALVES[storage].start) // 2
    scales = generator.uniform(1e-3, 1e-2, (rows, blocks, count)).astype(np.float16)
    raw[:, :, HALVES[storage]] = scales.view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("storage", HALVES)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 40, 70])
def test_k_types_keep_their_values_to_float16(kernels, storage, rows) -> None:
    raw = k_rows(storage, 48, 2)
    exact = dequantized(raw, storage)
    weight = PackedWeight.from_gguf_bytes([GgufRows(storage, raw)])
    assert torch.allclose(stored_values(weight, kernels), exact, rtol=0, atol=2.0**-10 * exact.abs().max().item())
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(5))
    assert_product(kernels.linear(x, weight), x, exact, 0.02)


@pytest.mark.parametrize("storage", GGUF_TYPES)
def test_a_weight_takes_the_bytes_that_are_counted_for_it(storage) -> None:
    """64 columns of 512 inputs, which need no padding; allocation is in whole lines."""
    kind = GGUF_TYPES[storage]
    raw = np.zeros((64, 512 // kind.block_values * kind.block_bytes), np.uint8)
    weight = PackedWeight.from_gguf_bytes([GgufRows(storage, raw)])
    assert weight.num_bytes == packed_bytes(kind.number) * 64 * 512


@pytest.mark.parametrize("storage", ["Q5_K", "Q6_K"])
def test_gated_and_deterministic_products_of_bits_above_nibbles(storage) -> None:
    raw = k_rows(storage, 64, 1)
    x = torch.randn(70, 256, generator=torch.Generator().manual_seed(8)) / 100
    exact = x.double() @ dequantized(raw, storage).T
    expected = torch.nn.functional.silu(exact[:, :32]) * exact[:, 32:]
    for isa in AVAILABLE:
        kernels = CpuKernels(isa=isa, threads=1, deterministic=True)
        gated = PackedWeight.from_gguf_bytes([GgufRows(storage, raw[:32]), GgufRows(storage, raw[32:])], gated=True)
        together = kernels.linear(x, gated)
        assert torch.allclose(together.double(), expected, rtol=0.05, atol=0.05 * expected.abs().max().item())
        for start, end in ((0, 1), (3, 11), (16, 33), (5, 69)):
            assert torch.equal(kernels.linear(x[start:end], gated), together[start:end]), (isa, start, end)


@pytest.mark.parametrize("weight_format", ["bf16", "int8", "q8", "q4"])
@pytest.mark.parametrize("rows", [1, 20, 90])
def test_gated_product_is_silu_of_gate_times_up(kernels, weight_format, rows) -> None:
    generator = torch.Generator().manual_seed(6)
    gate, up = (torch.randn(48, 64, generator=generator) / 8 for _ in range(2))
    x = torch.randn(rows, 64, generator=generator)
    weight = PackedWeight.from_tensor([gate, up], weight_format, gated=True)
    separate = [kernels.linear(x, PackedWeight.from_tensor([part], weight_format)) for part in (gate, up)]
    expected = torch.nn.functional.silu(separate[0]) * separate[1]
    assert torch.allclose(kernels.linear(x, weight), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weight_format", ["bf16", "int8", "q8", "q4"])
def test_deterministic_rows_do_not_depend_on_the_batch(weight_format) -> None:
    generator = torch.Generator().manual_seed(7)
    weight = PackedWeight.from_tensor([torch.randn(80, 192, generator=generator)], weight_format)
    x = torch.randn(70, 192, generator=generator)
    for isa in AVAILABLE:
        kernels = CpuKernels(isa=isa, threads=1, deterministic=True)
        together = kernels.linear(x, weight)
        for start, end in ((0, 1), (3, 11), (16, 33), (0, 48), (5, 69), (69, 70)):
            assert torch.equal(kernels.linear(x[start:end], weight), together[start:end]), (isa, start, end)


def test_unfit_arguments_are_refused_in_one_line() -> None:
    kernels = CpuKernels(threads=1)
    weight = PackedWeight.from_tensor([torch.ones(16, 32)], "q8")
    with pytest.raises(ConfigError, match="width 32"):
        kernels.linear(torch.ones(1, 31), weight)
    plain, bytes_ = (GgufRows("Q4_0", np.zeros((32, 18), np.uint8)), GgufRows("Q8_0", np.zeros((32, 34), np.uint8)))
    with pytest.raises(ModelError, match="packed alike"):
        PackedWeight.from_gguf_bytes([plain, bytes_], gated=True)
    with pytest.raises(ModelError, match="within 32 columns"):
        PackedWeight.from_gguf_bytes([GgufRows("Q4_0", plain.rows[:16]), bytes_])
    with pytest.raises(ConfigError, match="2 formats can only be multiplied within a step"):
        kernels.linear(torch.ones(1, 32), PackedWeight.from_gguf_bytes([plain, bytes_]))
    with pytest.raises(ModelError, match="Q3_K"):
        PackedWeight.from_gguf_bytes([GgufRows("Q3_K", np.zeros((16, 110), np.uint8))])
    with pytest.raises(ConfigError, match=r"cannot run|unknown"):
        CpuKernels(isa="avx1024", threads=1)
    with pytest.raises(ConfigError, match="cores"):
        CpuKernels(threads=10_000)
