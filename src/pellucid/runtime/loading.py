"""Loading the libraries that an engine computes with: the slowest part of a start, and the same for every model."""

from __future__ import annotations

import os
from importlib import import_module


def load_libraries() -> None:
    """Import PyTorch and everything in this package that needs it. A second call does nothing."""
    let_openmp_sleep()
    import_module("pellucid.runtime.executor")


def let_openmp_sleep() -> None:
    """Have PyTorch's threads sleep while they wait. To be called before PyTorch is loaded; a user's own choice stands.

    OpenMP threads that spin at each barrier lose whole time slices where something else wants the cores: a step of
    30 ms was seen to take over a second.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
