"""Where the test traces are: excerpts in the repository, and whole traces beside the checkout where somebody put
them."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def data() -> Path:
    """The excerpts that come with the repository (see the README there)."""
    return ROOT / "tests" / "data"


@pytest.fixture
def shared_traces() -> Path:
    """The whole public traces, in `../shared/traces` of the checkout."""
    folder = ROOT.parent / "shared" / "traces"
    if not folder.is_dir():
        pytest.skip("the whole traces are not beside this checkout (../shared/traces)")
    return folder
