"""What a model is, in numbers: read from a Hugging Face `config.json` or from a GGUF header, without torch.

Invariants: a `ModelConfig` that exists describes a model this project computes exactly. Whatever would change the
arithmetic and is not implemented (another activation, a partial rotary embedding, experts, an unknown rope scaling) is
refused here, by name, before a weight is touched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid.core.errors import ModelError
from pellucid.kernels.layout import SCALE_BYTES
from pellucid.models.json_object import read_object
from pellucid.models.weights.gguf import GgufFile

# Hugging Face architecture -> GGUF architecture. Mistral files in GGUF call themselves llama.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Tokens that end a turn in the chat formats of the supported families, whatever the file declares as its one eos.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_turn|>")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder of the Llama family.

    `architecture` is one of llama, mistral, qwen2, qwen3. `rope_factors` divide the rotary frequencies, one factor per
    pair of dimensions (`head_dim // 2` of them), or is None where the frequencies are plain: every supported kind of
    rope scaling is such a list. `sliding_window` is the number of last tokens a layer sees, where the model was trained
    so; longer contexts than that are refused (`check_context`).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    rope_theta: float
    rope_factors: tuple[float, ...] | None = None
    sliding_window: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ModelError(f"the model's {name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} query heads do not divide into {self.num_kv_heads} key-value heads; "
                f"the model's configuration is inconsistent"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}; a rotary embedding needs an even one")

    def check_context(self, num_tokens: int) -> None:
        """Raise ModelError where a sequence of `num_tokens` cannot be computed as the model was trained."""
        if num_tokens > self.max_context:
            raise ModelError(
                f"a context of {num_tokens} tokens exceeds the model's {self.max_context}; "
                f"pass --max-context {self.max_context} or less"
            )
        if self.sliding_window is not None and num_tokens > self.sliding_window:
            raise ModelError(
                f"the model attends through a sliding window of {self.sliding_window} tokens, which is supported only "
                f"where it never binds; pass --max-context {self.sliding_window} or less (asked: {num_tokens})"
            )

    def cache_spec(self, dtype: str) -> CacheSpec:
        """What the KV cache stores for a token of this model in float32, bfloat16 or int8."""
        element_bytes, scale_bytes = {"float32": (4, 0), "bfloat16": (2, 0), "int8": (1, SCALE_BYTES)}[dtype]
        return CacheSpec((LayerGroup(self.num_layers, self.num_kv_heads, self.head_dim, element_bytes, scale_bytes),))


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that store the same per token: a key and a value of `head_dim` elements for each KV head, each with the
    scale that its elements share, if they have one."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    scale_bytes: int = 0

    @property
    def width(self) -> int:
        """Elements that a head's key or value takes, with its scale."""
        return self.head_dim + self.scale_bytes // self.element_bytes

    @property
    def bytes_per_token(self) -> int:
        """2 (key, value) x layers x KV heads x (head_dim x bytes per element + bytes of a scale)."""
        return 2 * self.num_layers * self.num_kv_heads * self.width * self.element_bytes


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What one token costs in the KV cache, by layer group. One group today; hybrid models have several."""

    groups: tuple[LayerGroup, ...]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token occupies over all layers."""
        return sum(group.bytes_per_token for group in self.groups)


def load_model_config(path: str | Path) -> ModelConfig:
    """The configuration of the model at `path`: a directory with `config.json`, or a `.gguf` file.

    Raises ModelError (one line) for anything that is missing, unreadable or not supported.
    """
    path = Path(path)
    if path.is_dir():
        return config_from_directory(path)
    with GgufFile(path) as file:
        return config_from_gguf(file)


def config_from_directory(directory: Path) -> ModelConfig:
    """The configuration in `directory`/config.json, with end tokens also from the files beside it."""
    if not (directory / "config.json").exists():
        raise ModelError(f"{directory} has no config.json; a model directory needs config.json and *.safetensors")
    row = read_object(directory / "config.json")
    generation = _object_if_any(directory / "generation_config.json")
    tokenizer = _object_if_any(directory / "tokenizer_config.json")
    added = tokenizer.get("added_tokens_decoder") or {}
    eos_text = tokenizer.get("eos_token")
    eos_text = eos_text.get("content") if isinstance(eos_text, dict) else eos_text
    ends = [int(i) for i, token in added.items() if token.get("content") in (*END_OF_TURN, eos_text)]
    try:
        return config_from_dict(row, extra_eos=(*_ids(generation.get("eos_token_id")), *ends))
    except ModelError as error:
        raise ModelError(f"{directory / 'config.json'}: {error}") from None


def config_from_dict(row: Mapping[str, Any], *, extra_eos: Iterable[int] = ()) -> ModelConfig:
    """The configuration of a Hugging Face `config.json`. Raises ModelError for what is not supported."""
    found = row.get("architectures") or []
    names = [name for name in found if name in ARCHITECTURES]
    if not names:
        raise ModelError(
            f"architecture {', '.join(found) or 'missing'} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    architecture = ARCHITECTURES[names[0]]
    for field, expected in (("hidden_act", "silu"), ("mlp_bias", False), ("quantization_config", None)):
        if row.get(field, expected) not in (expected, None):
            raise ModelError(f"{field} {row[field]!r} is not supported; only {expected!r} is")
    if row.get("attention_bias") and architecture != "qwen2":
        raise ModelError("attention_bias true is not supported outside Qwen2")
    heads, hidden = _integer(row, "num_attention_heads"), _integer(row, "hidden_size")
    head_dim = int(row.get("head_dim") or hidden // heads)
    theta, factors = _rope_from_dict(row, head_dim)
    window = row.get("sliding_window") if row.get("use_sliding_window", architecture == "mistral") else None
    eos = dict.fromkeys([*_ids(row.get("eos_token_id")), *extra_eos])
    return ModelConfig(
        architecture=architecture,
        vocab_size=_integer(row, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(row, "intermediate_size"),
        num_layers=_integer(row, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=int(row.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        max_context=_integer(row, "max_position_embeddings"),
        norm_eps=float(row.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_factors=factors,
        sliding_window=window,
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        tied_embeddings=bool(row.get("tie_word_embeddings", False)),
        eos_token_ids=tuple(eos),
    )


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """The configuration in a GGUF header. Raises ModelError naming the file for what is missing or not supported."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise ModelError(
            f"{file.path}: architecture {architecture!r} is not supported; "
            f"supported are {', '.join(GGUF_ARCHITECTURES)}"
        )

    def value(key: str, default: Any = None) -> Any:
        found = file.metadata.get(f"{architecture}.{key}", default)
        if found is None:
            raise ModelError(f"{file.path}: the header has no {architecture}.{key}")
        return found

    def integer(key: str, default: Any = None) -> int:
        found = value(key, default)
        if not isinstance(found, int):
            raise ModelError(f"{file.path}: {architecture}.{key} is {found!r}; one integer is needed")
        return found

    if value("expert_count", 0):
        raise ModelError(f"{file.path}: {value('expert_count')} experts (mixture of experts) are not supported")
    heads, hidden = integer("attention.head_count"), integer("embedding_length")
    head_dim = integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if int(value(key, head_dim)) != head_dim:
            raise ModelError(
                f"{file.path}: {key} {value(key)} differs from the head dimension {head_dim}: not supported"
            )
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing")
    return ModelConfig(
        architecture=architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=integer("feed_forward_length"),
        num_layers=integer("block_count"),
        num_heads=heads,
        num_kv_heads=integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_context=integer("context_length"),
        norm_eps=float(value("attention.layer_norm_rms_epsilon")),
        rope_theta=float(value("rope.freq_base", 10000.0)),
        rope_factors=_rope_from_gguf(file, architecture, head_dim),
        sliding_window=file.metadata.get(f"{architecture}.attention.sliding_window") or None,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        tied_embeddings="output.weight" not in file.tensors,
        eos_token_ids=_gguf_eos(file),
    )


def llama3_rope_factors(
    *, theta: float, head_dim: int, factor: float, low: float, high: float, original: float
) -> tuple[float, ...]:
    """Llama 3.1's frequency scaling as divisors, one per pair of dimensions.

    Wavelengths above `original / low` tokens are stretched by `factor`, those below `original / high` are kept, and
    between the two the scale is blended linearly in `original / wavelength` (Llama 3.1 model card, `rope_scaling`).
    """
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        blend = (original / wavelength - low) / (high - low)
        blend = min(max(blend, 0.0), 1.0)
        factors.append(1.0 / ((1.0 - blend) / factor + blend))
    return tuple(factors)


def _rope_from_dict(row: Mapping[str, Any], head_dim: int) -> tuple[float, tuple[float, ...] | None]:
    """(theta, factors) from `rope_theta` + `rope_scaling`, or from the newer `rope_parameters` that holds both."""
    scaling = dict(row.get("rope_parameters") or row.get("rope_scaling") or {})
    theta = float(scaling.get("rope_theta") or row.get("rope_theta") or 10000.0)
    if (scaling.get("partial_rotary_factor") or row.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("partial_rotary_factor below 1 is not supported")
    kind = scaling.get("rope_type", scaling.get("type", "default"))

    def number(key: str) -> float:
        if not isinstance(scaling.get(key), (int, float)):
            raise ModelError(f"rope scaling {kind!r} has {key} {scaling.get(key)!r}; a number is needed")
        return float(scaling[key])

    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, (number("factor"),) * (head_dim // 2)
    if kind == "llama3":
        factors = llama3_rope_factors(
            theta=theta,
            head_dim=head_dim,
            factor=number("factor"),
            low=number("low_freq_factor"),
            high=number("high_freq_factor"),
            original=number("original_max_position_embeddings"),
        )
        return theta, factors
    raise ModelError(f"rope scaling {kind!r} is not supported; supported are default, linear, llama3")


def _rope_from_gguf(file: GgufFile, architecture: str, head_dim: int) -> tuple[float, ...] | None:
    """Rope factors of a GGUF: llama3 scaling is stored as a tensor of them, linear scaling as one number."""
    kind = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        factors = tuple(float(f) for f in file.dequantize("rope_freqs.weight"))
        if len(factors) != head_dim // 2:
            raise ModelError(f"{file.path}: rope_freqs.weight has {len(factors)} factors, expected {head_dim // 2}")
        return factors
    if kind == "linear":
        return (float(file.metadata[f"{architecture}.rope.scaling.factor"]),) * (head_dim // 2)
    if kind != "none":
        raise ModelError(f"{file.path}: rope scaling {kind!r} is not supported; supported are none, linear, llama3")
    return None


def _gguf_eos(file: GgufFile) -> tuple[int, ...]:
    """End tokens that the header declares, and the vocabulary's end-of-turn tokens, which some headers forget."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    declared = [file.metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in file.metadata]
    tokens = file.metadata.get("tokenizer.ggml.tokens") or ()
    found = [i for i, token in enumerate(tokens) if token in END_OF_TURN]
    return tuple(dict.fromkeys(int(i) for i in [*declared, *found]))


def _ids(value: int | list[int] | None) -> list[int]:
    """`eos_token_id` may be absent, one id, or a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _integer(row: Mapping[str, Any], key: str) -> int:
    if not isinstance(row.get(key), int):
        raise ModelError(f"{key} is {row.get(key)!r}; an integer is needed")
    return int(row[key])


def _object_if_any(path: Path) -> dict[str, Any]:
    """The object in a JSON file, an empty one where there is no file."""
    return read_object(path) if path.exists() else {}
