"""Number formats of weights and cache: bytes per element, scales included, and the rate that multiplies them.

Weight-only formats (4-bit groups and the GGUF types) are unpacked and multiplied in 16 bits on every device that has no
better kernel, so their `compute` is bf16; fp8 and int8 name their own rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from pellucid.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """`element_bytes`, scales and zero points included. `compute` names the device rate that multiplies it. In a KV
    cache, each vector (a head's key, its value) takes `vector_bytes` more: its own scale."""

    name: str
    element_bytes: float
    compute: str
    vector_bytes: float = 0.0


def _gguf(name: str, block_bytes: int, block_elements: int) -> NumberFormat:
    return NumberFormat(name, block_bytes / block_elements, "bf16")


# Block layouts: ggml's gguf quantisation types (bytes per block, elements per block).
_FORMATS = (
    NumberFormat("fp32", 4.0, "fp32"),
    NumberFormat("bf16", 2.0, "bf16"),
    NumberFormat("fp16", 2.0, "fp16"),
    NumberFormat("fp8", 1.0, "fp8"),
    NumberFormat("int8", 1.0, "int8", vector_bytes=4.0),
    # 4 bits, and a 16-bit scale with a 4-bit zero point for each group of 128 (GPTQ and AWQ as usually published).
    NumberFormat("int4", (4 + (16 + 4) / 128) / 8, "bf16"),
    NumberFormat("mxfp4", (4 + 8 / 32) / 8, "bf16"),
    NumberFormat("nvfp4", (4 + 8 / 16) / 8, "fp4"),
    _gguf("q4_0", 18, 32),
    _gguf("q4_1", 20, 32),
    _gguf("q5_0", 22, 32),
    _gguf("q5_1", 24, 32),
    _gguf("q8_0", 34, 32),
    _gguf("q2_k", 84, 256),
    _gguf("q3_k", 110, 256),
    _gguf("q4_k", 144, 256),
    _gguf("q5_k", 176, 256),
    _gguf("q6_k", 210, 256),
    _gguf("iq1_s", 50, 256),
    _gguf("iq1_m", 56, 256),
    _gguf("iq2_xxs", 66, 256),
    _gguf("iq2_xs", 74, 256),
    _gguf("iq2_s", 82, 256),
    _gguf("iq3_xxs", 98, 256),
    _gguf("iq3_s", 110, 256),
    _gguf("iq4_nl", 18, 32),
    _gguf("iq4_xs", 136, 256),
)
FORMATS = {f.name: f for f in _FORMATS}
_ALIASES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "f32": "fp32",
    "f16": "fp16",
    "float8": "fp8",
    "float8_e4m3fn": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
}


def number_format(name: str) -> NumberFormat:
    """The format called `name` (any case; torch's and ggml's names too). Raises ConfigError."""
    key = name.lower().removeprefix("torch.")
    found = FORMATS.get(_ALIASES.get(key, key))
    if found is None:
        raise ConfigError(f"number format {name!r} is unknown; one of {', '.join(FORMATS)}")
    return found


def cache_format(name: str) -> NumberFormat:
    """The format called `name`, if a KV cache can be kept in it: 32, 16 or 8 bits. Raises ConfigError."""
    fmt = number_format(name)
    if fmt.name not in ("fp32", "bf16", "fp16", "fp8", "int8", "q8_0"):
        raise ConfigError(f"a KV cache is kept in fp32, bf16, fp16, fp8, int8 or q8_0, not in {name}")
    return fmt
