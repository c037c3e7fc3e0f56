"""A JSON object from a file beside a model, or one line that says why there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pellucid.core.errors import ModelError


def read_object(path: Path) -> dict[str, Any]:
    """The object in the JSON file at `path`. Raises ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a {type(value).__name__}; a JSON object is needed")
    return value
