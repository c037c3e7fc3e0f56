"""Weights out of safetensors and GGUF files: every storage, in the right place, and clear words for damaged files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import load_file, save_file
from tests.runtime.driver import Driver
from tests.runtime.tiny_models import build, reference_tokens

from pellucid.core.errors import ModelError
from pellucid.kernels import select
from pellucid.models.decoder import load_decoder
from pellucid.models.weights.gguf import GgufFile
from pellucid.models.weights.gguf_source import GgufTensor, interleaved_rows
from pellucid.runtime.config import RuntimeConfig
from pellucid.runtime.executor import load_executor

CPU = torch.device("cpu")
# Not in quants.quantize, or integer types that hold no weights.
NOT_WEIGHTS = {"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K", "Q1_0"}
STORAGES = sorted(t.name for t in GGMLQuantizationType if t.name not in NOT_WEIGHTS)


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_decoder(path, select("cpu", isa="reference"), dtype, CPU, num_positions=64)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded")
    build("qwen2", path, max_shard_size="40KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def test_sharded_equals_whole(sharded: Path, tmp_path: Path) -> None:
    build("qwen2", tmp_path)
    ours, whole = load(sharded).weights, load(tmp_path).weights
    assert torch.equal(ours.embedding, whole.embedding)
    assert torch.equal(ours.layers[1].attention.qkv.matrix, whole.layers[1].attention.qkv.matrix)
    assert torch.equal(ours.layers[1].attention.qkv.bias, whole.layers[1].attention.qkv.bias)
    assert ours.head.matrix.data_ptr() == ours.embedding.data_ptr()  # tied: one tensor


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files(tmp_path: Path, dtype: torch.dtype) -> None:
    build("llama2", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    save_file(tensors, path)
    gate_up = load(tmp_path).weights.layers[0].feed_forward.gate_up.matrix
    wanted = torch.cat([tensors[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert gate_up.dtype == torch.float32
    assert torch.equal(gate_up, wanted.float())


def edit(path: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replace, add or (None) remove a tensor of a directory's one file."""
    tensors = load_file(path / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors if tensor is None else {**tensors, name: tensor}, path / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", None, r"tensor model.norm.weight of shape \(48,\) is missing"),
        ("model.norm.weight", torch.ones(47), r"has shape \(47,\), expected \(48,\)"),
        ("lm_head.weight", None, "tensor lm_head.weight"),
        ("model.layers.0.mlp.extra.weight", torch.ones(3), "mlp.extra.weight belongs to no part"),
        ("model.norm.weight", torch.ones(48, dtype=torch.int8), "stored as I8; supported are F32, F16, BF16"),
    ],
)
def test_wrong_tensors(tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str) -> None:
    build("llama2", tmp_path)
    edit(tmp_path, name, tensor)
    with pytest.raises(ModelError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_damaged_safetensors(sharded: Path, tmp_path: Path) -> None:
    build("llama2", tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read: .*fetch it again"):
        load(tmp_path)
    file.unlink()
    with pytest.raises(ModelError, match=r"holds no \*.safetensors file"):
        load(tmp_path)
    index = sharded / "model.safetensors.index.json"
    row = json.loads(index.read_text())
    (tmp_path / "config.json").write_text((sharded / "config.json").read_text())
    (tmp_path / index.name).write_text(json.dumps(row))
    with pytest.raises(ModelError, match=r"lacks model-00001-of-.*.safetensors"):
        load(tmp_path)
    (tmp_path / index.name).write_text("{}")
    with pytest.raises(ModelError, match="is not a safetensors index"):
        load(tmp_path)


def interleave(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Query or key rows as files of the llama architecture store them: the halves of each head alternating."""
    return rows.reshape(-1, 2, head_dim // 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, model: Any, storage: str) -> None:
    """Write a transformers Llama as a GGUF, matrices quantised to `storage`, and put what that leaves of them back
    into the model, so that it stays the oracle."""
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for i in range(config.num_hidden_layers):
        names |= {f"model.layers.{i}.{part}": f"blk.{i}.{stored}" for part, stored in parts.items()}
    kind = GGMLQuantizationType[storage]
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        stored = names[name.removesuffix(".weight")] + ".weight"
        if values.ndim == 1:
            writer.add_tensor(stored, values)
            continue
        rows = quants.quantize(values, kind)
        parameter.data.copy_(torch.from_numpy(np.array(quants.dequantize(rows, kind))))
        writer.add_tensor(
            stored, interleave(rows, head_dim) if "_q." in stored or "_k." in stored else rows, raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_llama() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("storage", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_gguf_speaks_like_its_own_numbers(tmp_path: Path, storage: str) -> None:
    """Greedy tokens from a quantised file equal those of transformers over the same dequantised weights."""
    model, path = tiny_llama(), tmp_path / "tiny.gguf"
    write_gguf(path, model, storage)
    prompt = [random.Random(1).randrange(160) for _ in range(40)]
    driver = Driver(load_executor(path, RuntimeConfig(dtype="float32", threads=1), num_blocks=8), 8, 16)
    driver.add(0, prompt)
    assert driver.generate(0, 12) == reference_tokens(model, prompt, 12)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.filterwarnings("ignore:overflow")
def test_every_storage_is_dequantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str, ordered: bool
) -> None:
    """All types that the gguf package decodes, over several slabs, equal its own answer bit for bit."""
    monkeypatch.setattr("pellucid.models.weights.gguf._SLAB_ELEMENTS", 512 * 16)
    kind = GGMLQuantizationType[storage]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    rows, columns = 40, 512
    raw = np.random.default_rng(0).integers(0, 256, (rows, columns // block * block_bytes), dtype=np.uint8)
    raw[:, 1::2] &= 0x3B  # keep the half-precision scales away from infinity
    writer = GGUFWriter(tmp_path / "t.gguf", "llama")
    stored = raw.view({"F32": np.float32, "F16": np.float16}.get(storage, np.uint8))
    writer.add_tensor("t", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(tmp_path / "t.gguf") as file:
        order = interleaved_rows(rows, 8) if ordered else None
        tensor = GgufTensor("t", "t", file, order)
        assert (tensor.shape, tensor.storage) == ((rows, columns), storage)
        wanted = quants.dequantize(raw if order is None else raw[order], kind)
        assert np.array_equal(tensor.raw(), raw if order is None else raw[order])
        out = torch.empty(rows, columns)
        tensor.copy_into(out)
        np.testing.assert_array_equal(out.numpy(), wanted)


def test_interleaved_rows_undo_the_interleaving() -> None:
    rows = np.arange(24)[:, None]
    assert np.array_equal(interleave(rows, 6)[interleaved_rows(24, 6)], rows)


def test_damaged_gguf(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_llama(), "Q8_0")
    whole = path.read_bytes()
    for length in (0, 3, 20, 400, len(whole) - 100):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError) as caught:
            load(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="No such file"):
        load(tmp_path / "absent.gguf")
