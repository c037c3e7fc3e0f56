"""Files that mix 4, 5, 6 and 8 bits, as those that people download do: what they hold, say and weigh in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.perplexity import WINDOW, Reader, Way
from benchmarks.requantize import MIXES, quantize, requantize
from gguf import GGMLQuantizationType, quants
from tests.models.test_weights import write_gguf

from pellucid import sizing
from pellucid.kernels.processors import native
from pellucid.models.weights.gguf import GgufFile
from pellucid.runtime.config import RuntimeConfig
from pellucid.runtime.executor import load_executor

transformers = pytest.importorskip("transformers")
# Largest error of a value, as a share of the span of its group.
STEPS = {"Q4_K": 1 / 15, "Q5_K": 1 / 31, "Q6_K": 1 / 62}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small llama, in float32, whose widths divide into blocks of the K types."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=160, hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=WINDOW, initializer_range=0.04,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("mixed") / "plain.gguf"
    write_gguf(path, transformers.LlamaForCausalLM(config).eval(), "F32")
    return path


@pytest.mark.parametrize("storage", STEPS)
def test_k_types_are_written_as_they_are_read(storage: str) -> None:
    values = np.random.default_rng(1).standard_normal((6, 512)).astype(np.float32)
    read = quants.dequantize(quantize(values, storage), GGMLQuantizationType[storage])
    groups = values.reshape(6, -1, 16 if storage == "Q6_K" else 32)
    span = groups.max(axis=2) - groups.min(axis=2) if storage != "Q6_K" else 2 * np.abs(groups).max(axis=2)
    error = np.abs(read - values).reshape(groups.shape).max(axis=2)
    assert (error <= 1.2 * STEPS[storage] * span).all()  # half a step, and what 6 bits of scales lose


@pytest.mark.skipif(native() is None, reason="the native kernels are not built")
@pytest.mark.parametrize("mix", MIXES)
def test_a_mixed_file_reads_like_its_own_numbers(plain: Path, tmp_path: Path, mix: str) -> None:
    """What each token costs, by the native kernels and by plain PyTorch in float32 over the same file."""
    path = tmp_path / "mixed.gguf"
    requantize(plain, path, mix)
    with GgufFile(path) as file:
        storages = {info.storage for info in file.tensors.values()}
    assert storages == {"F32", "Q6_K", MIXES[mix]}
    window = np.random.default_rng(2).integers(0, 160, (1, WINDOW))
    exact = Reader(path, Way("reference", RuntimeConfig("float32", threads=1, isa="reference"), WINDOW)).read(window)
    for rows in (WINDOW, 1):
        native_ = Reader(path, Way("auto", RuntimeConfig(dtype="bfloat16", threads=1), rows)).read(window)
        assert abs(native_.perplexity / exact.perplexity - 1) < 0.01
        assert np.abs(native_.losses - exact.losses).mean() < 0.03


@pytest.mark.skipif(native() is None, reason="the native kernels are not built")
@pytest.mark.parametrize("mix", MIXES)
def test_the_memory_that_is_counted_is_what_weights_take(plain: Path, tmp_path: Path, mix: str) -> None:
    path = tmp_path / "mixed.gguf"
    requantize(plain, path, mix)
    executor = load_executor(path, RuntimeConfig(dtype="bfloat16", threads=1), num_blocks=8)
    assert executor.memory().weight_bytes == sizing.served_shape(path, executor.config).weights.total
