"""The direction of imports, and what stays out of which process."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "pellucid"

# Each room may import those listed (and itself). Whatever is not listed is forbidden.
SIBLINGS = ("engine", "workload", "planner", "telemetry", "text")
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    **{room: {"core"} for room in SIBLINGS},
    "kernels": {"core"},
    "models": {"kernels", "core"},
    "runtime": {"models", "kernels", "engine", "core"},
    "sim": {"engine", "core"},
    "settings": {"runtime", "planner", "core"},
    "sizing": {"runtime", "models", "kernels", "planner", "core"},
    "build": {"settings", "sizing", "runtime", "models", "kernels", *SIBLINGS, "core"},
    "assembly": {"settings", "runtime", *SIBLINGS, "core"},
    "server": {"build", "models", *SIBLINGS, "core"},
    "llm": {"assembly", "build", "settings", "models", *SIBLINGS, "core"},
    "cli": {"llm", "server", "assembly", "build", "settings", "sizing", "runtime", "models", *SIBLINGS, "core"},
}
CORE_FORBIDDEN = {"time", "random", "threading", "logging", "os"}
TORCH_ROOMS = {"runtime", "models", "kernels"}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = sorted(
    path for path in SOURCE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py") or path.parent != SOURCE
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    room = room_of(path)
    rooms = {name.split(".")[1] for name in imports(path) if name.startswith("pellucid.")} - {"__version__", room}
    assert rooms <= MAY_IMPORT[room], f"{room} must not import {sorted(rooms - MAY_IMPORT[room])}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_libraries_stay_where_they_belong(path):
    room = room_of(path)
    tops = {name.split(".")[0] for name in imports(path)} - {"pellucid"}
    if room == "core":
        assert tops <= set(sys.stdlib_module_names), f"the core imports the standard library only, not {sorted(tops)}"
        assert not tops & CORE_FORBIDDEN, (
            f"the core owns no clock, chance, thread, log or file: {tops & CORE_FORBIDDEN}"
        )
    if room not in TORCH_ROOMS:
        assert "torch" not in tops, f"torch lives in {sorted(TORCH_ROOMS)}, not in {room}"


@pytest.mark.parametrize(
    "room",
    [
        "core",
        "engine",
        "sim",
        "workload",
        "planner",
        "text",
        "server",
        "cli",
        "build",
        "assembly",
        "settings",
        "sizing",
    ],
)
def test_importing_a_room_does_not_load_torch(room):
    code = f"""
import importlib, pkgutil, sys
package = importlib.import_module("pellucid.{room}")
for module in pkgutil.walk_packages(getattr(package, "__path__", []), "pellucid.{room}."):
    importlib.import_module(module.name)
print(*sorted({{"torch", "transformers"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(SOURCE.parent)}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
