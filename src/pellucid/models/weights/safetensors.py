"""The safetensors files of a model directory, mapped into memory, as one set of named tensors.

Invariants: a name appears in one file only; nothing is copied until `copy_into`, which reads straight from the map into
the place where the model wants the values. Files are closed with the source.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pellucid.core.errors import ModelError

_INDEX = "model.safetensors.index.json"
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """One tensor of an open file."""

    name: str
    shape: tuple[int, ...]
    storage: str
    path: Path
    file: Any

    def copy_into(self, out: Tensor) -> None:
        """Fill `out` with the values, converted to its dtype."""
        out.copy_(self.file.get_tensor(self.name))

    def raw(self) -> npt.NDArray[np.uint8]:
        """The stored bytes as `[rows, bytes per row]`; a one-dimensional tensor is one row."""
        rows = self.shape[0] if len(self.shape) > 1 else 1
        stored: npt.NDArray[np.uint8] = self.file.get_tensor(self.name).reshape(rows, -1).view(torch.uint8).numpy()
        return stored


class SafetensorsSource:
    """All tensors of `directory`, by their names in the file. Raises ModelError for what is missing or damaged."""

    def __init__(self, directory: Path) -> None:
        self.location = directory
        self.tensors: dict[str, SafetensorsTensor] = {}
        self._files = ExitStack()
        for path in _weight_files(directory):
            self._open(path)

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tensors = {}
        self._files.close()

    def get(self, name: str) -> SafetensorsTensor | None:
        """The tensor of that name, or None."""
        return self.tensors.get(name)

    def names(self) -> Iterable[str]:
        """All names."""
        return self.tensors.keys()

    def _open(self, path: Path) -> None:
        try:
            file = self._files.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read: {error}; fetch it again if the download was cut short") from None
        for name in file.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
            view = file.get_slice(name)
            if view.get_dtype() not in _FLOATS:
                raise ModelError(
                    f"{path}: tensor {name} is stored as {view.get_dtype()}; supported are {', '.join(_FLOATS)}"
                )
            if name in self.tensors:
                raise ModelError(f"tensor {name} is in both {self.tensors[name].path.name} and {path.name}")
            self.tensors[name] = SafetensorsTensor(name, tuple(view.get_shape()), view.get_dtype(), path, file)


def _weight_files(directory: Path) -> list[Path]:
    """The files that the index names, or every `*.safetensors` where there is no index."""
    index = directory / _INDEX
    if not index.exists():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise ModelError(
                f"{directory} holds no *.safetensors file; supported are safetensors directories and .gguf"
            )
        return files
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a safetensors index: {error!r}") from None
    missing = [name for name in names if not (directory / name).exists()]
    if missing:
        raise ModelError(f"{directory} lacks {missing[0]} ({len(missing)} of {len(names)} files that {_INDEX} names)")
    return [directory / name for name in names]
