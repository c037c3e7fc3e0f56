"""Pellucid: an LLM serving engine you can see through.

`from pellucid import LLM` is the offline face; `pellucid serve` the online one. Importing the package costs nothing:
torch is loaded when an engine is built, never by `import pellucid`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pellucid.llm import LLM as LLM

__version__ = "0.1.0"
__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from pellucid.llm import LLM

        return LLM
    raise AttributeError(f"module 'pellucid' has no attribute {name!r}")
