"""Tiny random models of every supported family, made with transformers and saved as a user would have them on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

_SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.35,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 0,
    "bos_token_id": 1,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# name -> (transformers prefix, what differs from _SHAPE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 6}),
    "llama3.1": ("Llama", {"head_dim": 10, "rope_parameters": _LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "mistral": ("Mistral", {"head_dim": 14, "sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 22}),
    "native": ("Llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 96}),
}


def build(family: str, directory: Path, max_shard_size: str = "50GB") -> Any:
    """Make the family's model, save it to `directory` and return the transformers model (float32, eval)."""
    prefix, differs = FAMILIES[family]
    torch.manual_seed(sum(family.encode()))
    config = getattr(transformers, f"{prefix}Config")(**{**_SHAPE, **differs})
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def reference_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """The first `count` greedy tokens according to transformers, one whole forward pass each."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
