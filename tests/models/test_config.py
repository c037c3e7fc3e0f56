"""Configurations from config.json and GGUF headers: what is read, and what is refused in one clear line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFWriter
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pellucid.core.errors import ModelError
from pellucid.models.config import ModelConfig, config_from_dict, load_model_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_defaults_of_an_old_llama() -> None:
    config = config_from_dict(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (32, 128, 10000.0)
    assert (config.qkv_bias, config.qk_norm, config.tied_embeddings, config.rope_factors) == (False, False, False, None)
    assert config.cache_spec("bfloat16").bytes_per_token == 524_288  # Llama-2-7B in bfloat16: 512 KiB per token


@pytest.mark.parametrize(
    ("differs", "expected"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, {"qkv_bias": True, "architecture": "qwen2"}),
        ({"architectures": ["Qwen3ForCausalLM"], "head_dim": 64}, {"qk_norm": True, "head_dim": 64}),
        ({"num_key_value_heads": 8}, {"num_kv_heads": 8}),
        ({"rope_theta": 5e5}, {"rope_theta": 5e5}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_theta": 7.0, "rope_factors": None}),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, {"rope_factors": (4.0,) * 64}),
        ({"eos_token_id": [5, 6]}, {"eos_token_ids": (5, 6)}),
        ({"sliding_window": 1024}, {"sliding_window": None}),  # Llama does not use it
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 1024}, {"sliding_window": 1024}),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9, "use_sliding_window": False},
            {"sliding_window": None},
        ),
    ],
)
def test_fields(differs: dict[str, Any], expected: dict[str, Any]) -> None:
    config = config_from_dict({**LLAMA, **differs})
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM is not supported; supported are LlamaForCausalLM"),
        ({"architectures": None}, "architecture missing is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"mlp_bias": True}, "mlp_bias True is not supported"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "has low_freq_factor None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many'"),
        ({"num_key_value_heads": 5}, "32 query heads do not divide into 5"),
        ({"head_dim": 7}, "head_dim is 7"),
    ],
)
def test_refused(differs: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message.replace("(", r"\(")) as caught:
        config_from_dict({**LLAMA, **differs})
    assert "\n" not in str(caught.value)


def test_llama3_scaling_equals_transformers() -> None:
    config = config_from_dict({**LLAMA, "rope_theta": 5e5, "rope_scaling": LLAMA3_SCALING})
    assert config.rope_factors is not None
    theirs = transformers.LlamaConfig(
        hidden_size=4096, num_attention_heads=32, rope_parameters={**LLAMA3_SCALING, "rope_theta": 5e5}
    )
    wanted, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    plain = 5e5 ** (-np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(plain / np.array(config.rope_factors), wanted.numpy(), rtol=1e-5)


def test_context_limits() -> None:
    config = config_from_dict({**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 1024})
    config.check_context(1024)
    with pytest.raises(ModelError, match=r"sliding window of 1024 tokens.*--max-context 1024"):
        config.check_context(1025)
    with pytest.raises(ModelError, match="exceeds the model's 4096"):
        config.check_context(4097)


def test_end_tokens_of_a_directory(tmp_path: Path) -> None:
    """config.json names one end; generation_config.json and the chat tokens of the tokenizer add theirs."""
    tokens = {"7": {"content": "<|im_end|>"}, "8": {"content": "</s>"}, "9": {"content": "<|im_start|>"}}
    for name, row in {
        "config.json": LLAMA,
        "generation_config.json": {"eos_token_id": [3, 2]},
        "tokenizer_config.json": {"added_tokens_decoder": tokens, "eos_token": {"content": "</s>"}},
    }.items():
        (tmp_path / name).write_text(json.dumps(row))
    assert load_model_config(tmp_path).eos_token_ids == (2, 3, 7, 8)


def test_unreadable_directories(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json: cannot be read as JSON"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds a list; a JSON object is needed"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "hidden_act": "gelu"}))
    with pytest.raises(ModelError, match=r"config.json: hidden_act"):
        load_model_config(tmp_path)


def gguf(path: Path, architecture: str = "llama", tensors: tuple[str, ...] = (), **values: Any) -> Path:
    """A small GGUF; `values` (dots written as double underscores) override the header's."""
    writer = GGUFWriter(path, architecture)
    header: dict[str, Any] = {
        "block_count": 2,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention__head_count": 4,
        "attention__head_count_kv": 2,
        "attention__layer_norm_rms_epsilon": 1e-6,
        **values,
    }
    for key, value in header.items():
        name = f"{architecture}.{key.replace('__', '.')}"
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        (writer.add_string if isinstance(value, str) else add)(name, value)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 1)
    writer.add_array("tokenizer.ggml.tokens", ["<unk>", "</s>", "é", "<|eot_id|>", "b"])
    for tensor in ("token_embd.weight", *tensors):
        writer.add_tensor(tensor, np.ones((5, 64) if "embd" in tensor else 8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_header(tmp_path: Path) -> None:
    config = load_model_config(gguf(tmp_path / "m.gguf", tensors=("rope_freqs.weight", "blk.0.attn_q_norm.weight")))
    assert config == ModelConfig(
        architecture="llama",
        vocab_size=5,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_context=512,
        norm_eps=config.norm_eps,
        rope_theta=10000.0,
        rope_factors=(1.0,) * 8,
        qk_norm=True,
        tied_embeddings=True,
        eos_token_ids=(1, 3),
    )
    assert config.norm_eps == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("architecture", "values", "message"),
    [
        ("gemma2", {}, "architecture 'gemma2' is not supported; supported are llama, qwen2, qwen3"),
        ("llama", {"expert_count": 8}, "8 experts"),
        ("llama", {"rope__scaling__type": "yarn"}, "rope scaling 'yarn'"),
        ("llama", {"rope__dimension_count": 8}, "rope.dimension_count 8 differs from the head dimension 16"),
        ("llama", {"embedding_length": "wide"}, "llama.embedding_length is 'wide'"),
    ],
)
def test_gguf_refused(tmp_path: Path, architecture: str, values: dict[str, Any], message: str) -> None:
    path = gguf(tmp_path / "m.gguf", architecture, **values)
    with pytest.raises(ModelError, match=message) as caught:
        load_model_config(path)
    assert str(path) in str(caught.value)


def test_reading_a_configuration_leaves_torch_out() -> None:
    """The server reads configurations, sizes and limits; it must not pay for torch."""
    modules = "pellucid.models.config, pellucid.runtime.config, pellucid.runtime.memory, pellucid.models.weights.gguf"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "src"}, check=False).returncode == 0
