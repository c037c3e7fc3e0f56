"""Which GGUF types the native kernels pack from their bits, and what a weight then takes in memory. No torch.

Values keep their bits; what grows is their constants, which become float16 so that no kernel has to put them together:
a scale and a minimum per 32 inputs where the K types have 6 bits each, two scales per 32 inputs where Q6_K has 8.
"""

from __future__ import annotations

from typing import NamedTuple


class GgufType(NamedTuple):
    """A type's number in files, values and bytes of its blocks there, and the format (csrc/kernels.h) that keeps it."""

    number: int
    block_values: int
    block_bytes: int
    packed_as: str


GGUF_TYPES = {
    "Q4_0": GgufType(2, 32, 18, "q4"),
    "Q4_1": GgufType(3, 32, 20, "q4_min"),
    "Q5_0": GgufType(6, 32, 22, "q5_min"),
    "Q5_1": GgufType(7, 32, 24, "q5_min"),
    "Q8_0": GgufType(8, 32, 34, "q8"),
    "Q4_K": GgufType(12, 256, 144, "q4_min"),
    "Q5_K": GgufType(13, 256, 176, "q5_min"),
    "Q6_K": GgufType(14, 256, 210, "q6"),
}
# Types that become bf16, and their numbers; every other type is dequantised and becomes q8.
FLOATING = {"F32": 0, "F16": 1, "BF16": 30}

# Bytes per weight of the packed formats: 32 values and their constants.
PACKED_BYTES = {
    "bf16": 2.0,
    "q4": (16 + 2) / 32,
    "q4_min": (16 + 2 + 2) / 32,
    "q5_min": (16 + 4 + 2 + 2) / 32,
    "q6": (16 + 8 + 2 + 2) / 32,
    "q8": (32 + 2) / 32,
}


def packed_bytes(number: int) -> float:
    """Bytes that an element of a matrix of the GGUF type of this number takes in memory."""
    return _BYTES_BY_NUMBER.get(number, PACKED_BYTES["q8"])


_BYTES_BY_NUMBER = {
    **{kind.number: PACKED_BYTES[kind.packed_as] for kind in GGUF_TYPES.values()},
    **dict.fromkeys(FLOATING.values(), PACKED_BYTES["bf16"]),
}
