"""The native part of the machine probe: loops that do nothing but read, copy, multiply or wait. No torch.

Each figure is the best rate within a short time, because on a shared machine a mean measures the neighbours. Even so it
moves by tens of per cent within seconds: a figure belongs beside a probe taken in the same run, and its spread is had
by asking several times (`runtime/measure.py` does).
"""

from __future__ import annotations

from pellucid.kernels.processors import open_team

_SPIN_SECONDS = 0.0005
_MULTIPLICATIONS = {"fp32": "f32", "bf16": "bf16", "int8": "int8"}


class NativeLimits:
    """The native loops at one instruction level, on `threads` of the physical cores (0: on all).

    Raises ConfigError where the native kernels are not installed, for an unknown level, or for too many threads.
    """

    def __init__(self, *, isa: str = "auto", threads: int = 0) -> None:
        self._cpu = open_team(isa, threads, _SPIN_SECONDS, deterministic=False)

    @property
    def isa(self) -> str:
        """The instruction level in use."""
        return str(self._cpu.isa)

    @property
    def num_threads(self) -> int:
        return int(self._cpu.num_threads)

    def read(self, num_bytes: int, *, seconds: float) -> float:
        """Bytes/s of reading a working set of `num_bytes` over and over."""
        return float(self._cpu.probe("read", num_bytes, seconds))

    def copy(self, num_bytes: int, *, seconds: float) -> float:
        """Bytes/s copied within memory."""
        return float(self._cpu.probe("copy", num_bytes, seconds))

    def multiply(self, number_format: str, *, seconds: float) -> float | None:
        """FLOP/s of "fp32", "bf16" or "int8" (a multiply and an add are two), operands in registers. The last two are
        the tiles'; None where the level has none."""
        return float(self._cpu.probe(_MULTIPLICATIONS[number_format], 0, seconds)) or None

    def barrier_seconds(self, *, seconds: float) -> float:
        """How long the threads take to wait for each other once."""
        return 1.0 / float(self._cpu.probe("barrier", 0, seconds))
