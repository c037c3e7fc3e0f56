"""The kernel tests on a build with the address and undefined-behaviour sanitizers: `python -m tests.kernels.sanitized`.

The sanitized module must not replace the one in use, so it is built under build/sanitized beside a copy of the package,
and the tests run in a process that finds that copy first and whose first libraries are the sanitizers'.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "sanitized"
LIBRARIES = ("libasan.so", "libubsan.so", "libstdc++.so.6")
# An installation in place answers imports before sys.path does.
RUN = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def build() -> None:
    """Compile the module into a fresh copy of the package."""
    package = BUILD / "package" / "pellucid"
    shutil.rmtree(package.parent, ignore_errors=True)
    shutil.copytree(ROOT / "src" / "pellucid", package, ignore=shutil.ignore_patterns("_native*", "__pycache__"))
    options = [
        f"-DPython_EXECUTABLE={sys.executable}",
        "-DPELLUCID_SANITIZE=ON",
        f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={package / 'kernels'}",
    ]
    subprocess.run(["cmake", "-S", ROOT, "-B", BUILD, *options], check=True)
    subprocess.run(["cmake", "--build", BUILD, "--parallel"], check=True)


def library(name: str) -> str:
    compiler = os.environ.get("CXX", "g++")
    asked = [compiler, f"-print-file-name={name}"]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


def test(arguments: list[str]) -> int:
    """Run the native kernels' tests; pytest's exit status, or a sanitizer's."""
    tests = sorted(str(path.relative_to(ROOT)) for path in Path(__file__).parent.glob("test_native_*.py"))
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(library(name) for name in LIBRARIES),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
    # A sanitizer writes to the file descriptor and ends the process: pytest must not keep what it wrote.
    options = ["-q", "-p", "no:cacheprovider", "--capture=sys", "-o", f"pythonpath={BUILD / 'package'} ."]
    # Starts a process of its own, with a bare environment, to see what it imports.
    options += ["--deselect", "tests/kernels/test_native_limits.py::test_measuring_needs_no_torch"]
    command = [sys.executable, "-c", RUN, *options]
    return subprocess.run([*command, *tests, *arguments], cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    build()
    sys.exit(test(sys.argv[1:]))
