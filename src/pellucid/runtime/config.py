"""How the executor computes: device, precision, threads, determinism. Frozen, checked when built, free of torch.

`resolve` turns "auto" into what this machine does best; after it nothing is left to decide and nothing is read.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pellucid.core.errors import ConfigError
from pellucid.kernels.processors import native, physical_cores

Dtype = Literal["auto", "float32", "bfloat16"]
DTYPES = ("float32", "bfloat16")
# Processor flags under which PyTorch multiplies bfloat16 matrices in hardware; without them it is slower than float32.
_FAST_BFLOAT16 = ("amx_bf16", "avx512_bf16", "bf16")


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """`dtype` is that of weights and activations; logits are float32 always. "auto" takes bfloat16 where the native
    kernels run (they widen it where a processor cannot multiply it), where the processor multiplies it in hardware, and
    on a device that is no CPU; else float32. `kv_dtype` is that of the KV cache; "auto" is `dtype`. `threads` 0 takes
    one per physical core that this process may use. `isa` "reference" keeps native kernels out; portable, avx2, avx512
    or amx forces their level. `weights` is how they hold matrices: auto keeps a file's precision. `deterministic`: a
    request's tokens do not depend on what else is in its batch (`kernels/deterministic.py` says at what price)."""

    device: str = "cpu"
    dtype: Dtype = "auto"
    kv_dtype: Literal["auto", "int8"] = "auto"
    block_size: int = 16
    threads: int = 0
    deterministic: bool = False
    isa: str = "auto"
    weights: Literal["auto", "bf16", "int8", "int4"] = "auto"

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", *DTYPES):
            raise ConfigError(f"dtype is {self.dtype!r}; use auto, float32 or bfloat16")
        if self.kv_dtype not in ("auto", "int8"):
            raise ConfigError(f"kv_dtype is {self.kv_dtype!r}; use auto (as dtype) or int8")
        if self.weights not in ("auto", "bf16", "int8", "int4"):
            raise ConfigError(f"weights is {self.weights!r}; use auto, bf16, int8 or int4")
        if self.block_size < 1:
            raise ConfigError(f"block_size is {self.block_size}; it must be at least 1")
        if self.threads < 0:
            raise ConfigError(f"threads is {self.threads}; it must be 0 (one per core) or more")
        if self.deterministic and not self.device.startswith("cpu"):
            raise ConfigError(f"deterministic is promised on the CPU only, and the device is {self.device}")

    @property
    def cache_dtype(self) -> str:
        """What keys and values are kept in. Needs a resolved dtype."""
        if self.kv_dtype == "auto" and self.dtype == "auto":
            raise ConfigError("the precision of a cache like dtype auto is not known before it is resolved")
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype


def resolve(config: RuntimeConfig) -> RuntimeConfig:
    """The same configuration with dtype and threads decided for this machine."""
    native_serves = config.isa != "reference" and native() is not None
    fast = not config.device.startswith("cpu") or native_serves or not processor_flags().isdisjoint(_FAST_BFLOAT16)
    dtype: Dtype = config.dtype if config.dtype != "auto" else ("bfloat16" if fast else "float32")
    return replace(config, dtype=dtype, threads=config.threads or len(physical_cores()))


def processor_flags() -> frozenset[str]:
    """The feature flags that Linux reports for the first processor; empty where it reports none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    key = "Features" if platform.machine() == "aarch64" else "flags"
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return frozenset(value.split())
    return frozenset()
