"""Loading the libraries that an engine computes with: the slowest part of a start, and the same for every model."""

from __future__ import annotations

import os
from importlib import import_module


def load_libraries() -> None:
    """Import PyTorch and everything in this package that needs it. A second call does nothing."""
    # OpenMP threads that spin at each barrier lose whole time slices where something else wants the cores: a step of
    # 30 ms was seen to take over a second. Read by OpenMP when it is loaded; a user's own choice stands.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import_module("pellucid.runtime.executor")
