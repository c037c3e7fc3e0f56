"""What an engine is told of its machine: one size of cache by two sources, and what fits is taken or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from pellucid import sizing
from pellucid.core.errors import ConfigError
from pellucid.models.config import ARCHITECTURES, GGUF_ARCHITECTURES, load_model_config
from pellucid.planner.memory import Batching
from pellucid.planner.named_shapes import named_shapes
from pellucid.runtime.config import DTYPES, RuntimeConfig
from pellucid.settings import EngineSettings

CONFIG: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
BATCHING = Batching(token_budget=512, max_running=4, memory_fraction=1.0)


def directory(path: Path, architecture: str, **changes: Any) -> Path:
    row = {"architectures": [architecture], "model_type": ARCHITECTURES[architecture], **CONFIG, **changes}
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(row))
    return path


def gguf_file(path: Path, architecture: str, *, head_dim: int | None) -> Path:
    writer = GGUFWriter(path, architecture)
    for name, value in {
        "block_count": 3,
        "context_length": 512,
        "embedding_length": 96,
        "feed_forward_length": 128,
        "attention.head_count": 6,
        "attention.head_count_kv": 2,
        **({} if head_dim is None else {"attention.key_length": head_dim, "attention.value_length": head_dim}),
    }.items():
        writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", np.ones((500, 96), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def cache_sizes(path: Path, dtype: Any, kv_dtype: Any = "auto") -> tuple[float, float]:
    """Bytes per token by the planner and by the runtime."""
    runtime = RuntimeConfig(dtype=dtype, kv_dtype=kv_dtype)
    planned = sizing.served_shape(path, runtime).kv_bytes_per_token()
    return planned, load_model_config(path).cache_spec(runtime.cache_dtype).bytes_per_token


@pytest.mark.parametrize(("dtype", "kv_dtype"), [*((dtype, "auto") for dtype in DTYPES), ("bfloat16", "int8")])
@pytest.mark.parametrize("changes", [{}, {"head_dim": 32}, {"num_key_value_heads": 6}, {"num_key_value_heads": None}])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_planner_and_runtime_agree_on_the_cache_of_a_directory(
    architecture: str, changes: dict[str, Any], dtype: str, kv_dtype: str, tmp_path: Path
) -> None:
    planned, stored = cache_sizes(directory(tmp_path / "m", architecture, **changes), dtype, kv_dtype)
    assert planned == stored > 0


@pytest.mark.parametrize("head_dim", [None, 32])
@pytest.mark.parametrize("architecture", GGUF_ARCHITECTURES)
def test_planner_and_runtime_agree_on_the_cache_of_a_gguf(
    architecture: str, head_dim: int | None, tmp_path: Path
) -> None:
    planned, stored = cache_sizes(gguf_file(tmp_path / "m.gguf", architecture, head_dim=head_dim), "bfloat16")
    assert planned == stored > 0


def test_a_named_shape_of_a_supported_family_agrees_too(tmp_path: Path) -> None:
    """The engine's and the planner's reader see the same published configurations."""
    families = {model_type: name for name, model_type in ARCHITECTURES.items()}
    seen = 0
    for name, row in named_shapes().items():
        if row["model_type"] in families and not row.get("sliding_window"):
            planned, stored = cache_sizes(directory(tmp_path / name, families[row["model_type"]], **row), "bfloat16")
            assert planned == stored, name
            seen += 1
    assert seen > 10


class Host:
    """A machine with so many bytes free and no profile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, free: int | None) -> None:
        self.folder = folder
        monkeypatch.setattr(sizing, "available_bytes", lambda: free)

    def cache(self, asked: int, **changes: Any) -> int:
        path = directory(self.folder / "m", "LlamaForCausalLM")
        environment = {"XDG_STATE_HOME": str(self.folder)}
        runtime = RuntimeConfig(dtype="bfloat16", threads=1, **changes)
        return sizing.cache_bytes(asked, path, runtime, batching=BATCHING, context=512, environment=environment)


def test_what_was_asked_for_is_taken_where_it_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Host(monkeypatch, tmp_path, 2 * 10**9).cache(10**9) == 10**9


def test_what_does_not_fit_is_refused_with_every_term(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host = Host(monkeypatch, tmp_path, 2 * 10**9)
    with pytest.raises(ConfigError, match=r"2 GB of KV cache do not fit: of 2 GB that are free, weights .* runtime"):
        host.cache(2 * 10**9)
    with pytest.raises(ConfigError) as refusal:
        host.cache(2 * 10**9)
    room = int(str(refusal.value).partition("--kv-memory ")[2].partition("MiB")[0]) << 20
    assert host.cache(room) == room, "the size that the message proposes is accepted"


def test_a_model_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for asked in (0, 10**6):
        with pytest.raises(ConfigError, match="do not hold m: weights"):
            Host(monkeypatch, tmp_path, 10**8).cache(asked)


def test_auto_takes_what_is_free_up_to_what_can_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    per_token = 2 * 3 * 2 * 16 * 2
    plenty = Host(monkeypatch, tmp_path, 10**12).cache(0)
    assert plenty == 4 * 512 * per_token // 2**20 * 2**20 or plenty == 4 * 512 * per_token
    scarce = Host(monkeypatch, tmp_path, 690_800_000).cache(0)
    assert 0 < scarce < plenty


def test_where_free_memory_is_not_known_only_auto_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host = Host(monkeypatch, tmp_path, None)
    assert host.cache(10**15) == 10**15
    for changes in ({}, {"device": "cuda"}):
        with pytest.raises(ConfigError, match="pass --kv-memory with a size"):
            host.cache(0, **changes)


def test_auto_is_a_value_of_the_setting() -> None:
    parse = next(f for f in EngineSettings.__dataclass_fields__.values() if f.name == "kv_memory").metadata["parser"]
    assert (parse("auto"), parse("1GiB")) == (0, 2**30)
    with pytest.raises(ConfigError, match="size in bytes"):
        parse("most")


def test_a_profile_counts_only_for_an_engine_like_the_one_measured(tmp_path: Path) -> None:
    path = directory(tmp_path / "m", "LlamaForCausalLM")
    origin = sizing.engine_prior(path, RuntimeConfig(dtype="bfloat16", threads=3), {"XDG_STATE_HOME": str(tmp_path)})
    assert origin.origin == "assumed for 3 cores, because no profile describes this engine on this machine"
