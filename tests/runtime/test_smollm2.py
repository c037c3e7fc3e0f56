"""The default model against transformers over the same file: tokens in float32, log-probabilities in bfloat16."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.default_model import REASON, default_model_path
from tests.kernels.oracle import layout_of
from tests.runtime.driver import Driver
from tests.runtime.record_smollm2 import COUNT, RECORDING, record

from pellucid.kernels import select
from pellucid.models.decoder import DecoderInput, load_decoder
from pellucid.runtime.config import RuntimeConfig
from pellucid.runtime.executor import load_executor
from pellucid.runtime.kv_store import KVStore


@pytest.fixture(scope="module")
def model_path() -> Path:
    path = default_model_path()
    if path is None or not path.exists():
        pytest.skip(REASON)
    return path


@pytest.fixture(scope="module")
def recorded() -> list[dict[str, Any]]:
    return json.loads(RECORDING.read_text())


def test_greedy_tokens_in_float32(model_path: Path, recorded: list[dict[str, Any]]) -> None:
    """Ten prompts in one batch, 64 tokens each."""
    driver = Driver(load_executor(model_path, RuntimeConfig(dtype="float32", threads=1), num_blocks=100), 100, 16)
    for i, row in enumerate(recorded):
        driver.add(i, row["prompt"])
    for i, row in enumerate(recorded):
        assert driver.generate(i, COUNT) == row["tokens"]


def logprob_errors(model_path: Path, rows: list[dict[str, Any]], dtype: torch.dtype, deterministic: bool) -> Any:
    """|log-probability - the reference's| of the reference's top token, over all positions of all rows."""
    kernels, cpu = select("cpu", isa="reference", deterministic=deterministic), torch.device("cpu")
    decoder = load_decoder(model_path, kernels, dtype, cpu, num_positions=128)
    spec = decoder.config.cache_spec(str(dtype).removeprefix("torch."))
    store = KVStore(spec, num_blocks=8 * len(rows), block_size=16, dtype=dtype, device=cpu)
    tokens = [row["prompt"] + row["tokens"][:-1] for row in rows]
    tables = [list(range(8 * i, 8 * i + 8)) for i in range(len(rows))]
    layout = layout_of([(0, len(row)) for row in tokens], tables, 16)
    padding = (0, kernels.padded_rows(layout.num_rows, dtype) - layout.num_rows)
    wanted = [
        int(layout.row_starts[i]) + len(row["prompt"]) - 1 + k for i, row in enumerate(rows) for k in range(COUNT)
    ]
    with torch.inference_mode():
        batch = DecoderInput(
            torch.from_numpy(np.pad(np.concatenate(tokens), padding)),
            torch.from_numpy(np.pad(np.concatenate([np.arange(len(row)) for row in tokens]), padding)),
            torch.tensor(wanted),
            kernels.plan_attention(layout, decoder.config.num_kv_heads, dtype, cpu),
        )
        scores = decoder.forward(batch, store.layers).log_softmax(-1)
    top = torch.tensor([token for row in rows for token in row["tokens"]])
    reference = torch.tensor([logprob for row in rows for logprob in row["logprobs"]])
    return (scores.gather(1, top[:, None])[:, 0] - reference).abs()


@pytest.mark.parametrize("deterministic", [False, True])
def test_logprobs_in_bfloat16(model_path: Path, recorded: list[dict[str, Any]], deterministic: bool) -> None:
    """Weights, activations and cache in bfloat16, logits in float32: at most 0.02 on average, 0.1 at p99."""
    errors = logprob_errors(model_path, recorded, torch.bfloat16, deterministic)
    assert float(errors.mean()) <= 0.02
    assert float(errors.quantile(0.99)) <= 0.1


@pytest.mark.long
def test_the_recording_is_what_transformers_says(model_path: Path, recorded: list[dict[str, Any]]) -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("transformers loads a GGUF only with the package accelerate")
    again = record(model_path)
    assert [(row["prompt"], row["tokens"]) for row in again] == [(row["prompt"], row["tokens"]) for row in recorded]
    for new, old in zip(again, recorded):
        np.testing.assert_allclose(new["logprobs"], old["logprobs"], atol=1e-4)
