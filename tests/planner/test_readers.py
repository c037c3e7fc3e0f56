"""Models read from config.json, from a GGUF header, and by name; and what is refused, in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.core.errors import ConfigError, ModelError
from pellucid.planner.config_shape import shape_from_config
from pellucid.planner.formats import FORMATS, cache_format, number_format
from pellucid.planner.gguf_shape import TENSOR_TYPES, shape_from_gguf
from pellucid.planner.named_shapes import named_shapes, shape_by_name
from pellucid.planner.shape import Experts, FeedForward, HeadedAttention

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}


def read(**changes: Any) -> Any:
    config = {**LLAMA, **changes}
    return shape_from_config({k: v for k, v in config.items() if v is not ...}, name="tiny", origin="config.json")


def test_a_llama_by_hand() -> None:
    shape = read()
    layer = 2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 128 + 2 * 64
    assert shape.num_params == 4 * layer + 64 + 2 * 1000 * 64
    assert shape.kv_bytes_per_token() == 2 * 4 * 2 * 8 * 2
    assert read(tie_word_embeddings=True).num_params == shape.num_params - 1000 * 64


def test_head_dim_is_taken_from_the_config_and_not_from_hidden_over_heads() -> None:
    assert read(head_dim=32).kv_bytes_per_token() == 4 * read().kv_bytes_per_token()


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: config has no '{field}'"):
        read(**{field: ...})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not known to the planner"),
        ({"hidden_size": "big"}, "hidden_size is 'big'"),
        ({"num_key_value_heads": 3}, "8 query heads cannot share 3 KV heads"),
        ({"hidden_size": 60}, "not a multiple of 8 heads"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization 'aqlm' is not known"),
        ({"torch_dtype": "float7"}, "number format 'float7' is unknown"),
        ({"model_type": "qwen2", "sliding_window": 8, "layer_types": ["sliding_attention"]}, "layer_types lists 1"),
    ],
)
def test_what_cannot_be_read_gets_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ModelError, ConfigError), match=message) as error:
        read(**changes)
    assert "\n" not in str(error.value)


def test_windows_by_pattern_by_list_by_first_layer_and_for_all() -> None:
    def windows(**changes: Any) -> dict[int | None, int]:
        return {g.attention.window: g.num_layers for g in read(**changes).groups}

    assert windows(model_type="mistral", sliding_window=16) == {16: 4}
    assert windows(model_type="mistral", sliding_window=None) == {None: 4}
    assert windows(model_type="gemma2", sliding_window=16) == {16: 2, None: 2}
    assert windows(model_type="gemma3_text", sliding_window=16, sliding_window_pattern=4) == {16: 3, None: 1}
    kinds = ["sliding_attention", "full_attention", "full_attention", "full_attention"]
    assert windows(model_type="gemma3_text", sliding_window=16, layer_types=kinds) == {16: 1, None: 3}
    assert windows(model_type="qwen2", sliding_window=16, use_sliding_window=False) == {None: 4}
    assert windows(model_type="qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=3) == {
        None: 3,
        16: 1,
    }


def test_dense_layers_before_and_between_experts() -> None:
    def kinds(**changes: Any) -> dict[str, int]:
        moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        shape = read(**{"model_type": "qwen3_moe", **moe, **changes})
        return {type(g.feed_forward).__name__: g.num_layers for g in shape.groups}

    assert kinds() == {"Experts": 4}
    assert kinds(mlp_only_layers=[0, 1]) == {"FeedForward": 2, "Experts": 2}
    assert kinds(decoder_sparse_step=2) == {"FeedForward": 2, "Experts": 2}
    assert kinds(first_k_dense_replace=1) == {"FeedForward": 1, "Experts": 3}


def test_a_plain_feed_forward_layer_has_two_matrices() -> None:
    (group,) = read(model_type="starcoder2").groups
    assert group.feed_forward == FeedForward(128, gated=False)
    assert group.feed_forward.num_params(64) == 2 * 64 * 128


def test_one_kv_head_is_multi_query() -> None:
    (group,) = read(num_key_value_heads=1).groups
    assert isinstance(group.attention, HeadedAttention)
    assert group.attention.cache_elements() == 2 * 8


def test_quantised_layers_keep_their_scales_and_their_tables() -> None:
    awq = read(quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128})
    dense = awq.num_params - 2 * 1000 * 64
    assert awq.weights.dense == pytest.approx(dense * (4 + 20 / 128) / 8)
    assert awq.weights.head == 1000 * 64 * 2
    fp8 = read(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert fp8.weights.dense == pytest.approx(dense * (1 + 4 / 128**2))
    packed = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}}}
    assert read(quantization_config={"quant_method": "compressed-tensors", **packed}).weights.dense > awq.weights.dense


def test_a_multimodal_config_is_read_through_its_text_part() -> None:
    nested = {"model_type": "gemma3", "text_config": {**LLAMA, "model_type": "gemma3_text"}}
    assert shape_from_config(nested, name="nested", origin="config.json").num_layers == 4


class Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    type: int


METADATA = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.block_count": 1,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
    "llama.feed_forward_length": 128,
    "llama.context_length": 2048,
}
Q4_1, Q8_0, F32 = 3, 8, 0


def test_a_gguf_is_counted_byte_for_byte() -> None:
    directory = [
        Entry("token_embd.weight", (64, 1000), Q8_0),
        Entry("blk.0.ffn_up.weight", (64, 128), Q4_1),
        Entry("blk.0.attn_norm.weight", (64,), F32),
    ]
    shape = shape_from_gguf(METADATA, directory, name="tiny", origin="tiny.gguf")
    assert shape.tied
    assert shape.vocab == 1000
    assert shape.weights.head == 64 * 1000 * 34 / 32
    assert shape.weights.dense == 64 * 128 * 20 / 32 + 64 * 4
    assert (shape.weight_format.name, shape.head_format.name) == ("q4_1", "q8_0")
    untied = shape_from_gguf(
        METADATA, [*directory, Entry("output.weight", (64, 1000), Q4_1)], name="tiny", origin="tiny.gguf"
    )
    assert (untied.weights.embedding, untied.head_format.name) == (shape.weights.head, "q4_1")


def test_experts_of_a_gguf() -> None:
    metadata = METADATA | {"llama.expert_count": 8, "llama.expert_used_count": 2}
    directory = [Entry("token_embd.weight", (64, 10), F32), Entry("blk.0.ffn_up_exps.weight", (64, 128, 8), Q4_1)]
    shape = shape_from_gguf(metadata, directory, name="moe", origin="moe.gguf")
    assert isinstance(shape.groups[0].feed_forward, Experts)
    assert shape.weights.experts == 64 * 128 * 8 * 20 / 32


@pytest.mark.parametrize(
    ("metadata", "entry", "message"),
    [
        ({"general.architecture": "rwkv7"}, Entry("x", (1,), 0), "architecture 'rwkv7' is not known"),
        (METADATA, Entry("token_embd.weight", (64, 10), 99), "ggml type 99"),
        (
            METADATA | {"llama.attention.head_count_kv": [2, 4]},
            Entry("token_embd.weight", (64, 10), 0),
            "num_key_value_heads",
        ),
    ],
)
def test_a_gguf_that_cannot_be_read_gets_one_line(metadata: dict[str, Any], entry: Entry, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        shape_from_gguf(metadata, [entry], name="bad", origin="bad.gguf")


def test_block_formats_agree_with_the_gguf_package() -> None:
    for kind, name in TENSOR_TYPES.items():
        elements, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        assert number_format(name).element_bytes == num_bytes / elements, name


@given(name=st.sampled_from(sorted(FORMATS)))
def test_every_format_is_found_by_any_spelling(name: str) -> None:
    assert number_format(name.upper()) is FORMATS[name]


def test_a_cache_in_four_bits_is_refused() -> None:
    assert cache_format("float8_e4m3fn").element_bytes == 1.0
    with pytest.raises(ConfigError, match="a KV cache is kept in"):
        cache_format("q4_0")


def test_every_shipped_model_reads_and_names_its_source() -> None:
    for name, row in named_shapes().items():
        assert shape_by_name(name).num_params > 0
        assert row["source"], name


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B-Instruct", "LLAMA-3.1-8b-instruct"])
def test_published_names_mean_the_same_model(name: str) -> None:
    assert shape_by_name(name).num_params == 8_030_261_248


def test_an_unknown_name_gets_the_nearest_ones() -> None:
    with pytest.raises(ModelError, match=r"nearest: llama-3\.1-8b"):
        shape_by_name("llama-3.1-9b")


def test_the_tables_are_shipped_beside_the_code() -> None:
    import pellucid.planner

    folder = Path(pellucid.planner.__path__[0])
    assert {"shapes.toml", "hardware.toml"} <= {p.name for p in folder.iterdir()}
