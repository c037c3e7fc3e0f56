"""What "auto" becomes on which machine."""

from __future__ import annotations

import pytest

from pellucid.runtime import config
from pellucid.runtime.config import RuntimeConfig, resolve


@pytest.mark.parametrize(
    ("flags", "built", "isa", "device", "dtype"),
    [
        ({"avx2"}, True, "auto", "cpu", "bfloat16"),  # the native kernels widen bfloat16
        ({"avx2"}, True, "avx2", "cpu", "bfloat16"),
        ({"avx2"}, True, "reference", "cpu", "float32"),  # plain PyTorch would be slower in bfloat16
        ({"avx2"}, False, "auto", "cpu", "float32"),
        ({"avx2", "avx512_bf16"}, False, "auto", "cpu", "bfloat16"),
        (set(), False, "auto", "cuda", "bfloat16"),
    ],
)
def test_auto_takes_what_serves_best(monkeypatch, flags, built, isa, device, dtype):
    monkeypatch.setattr(config, "processor_flags", lambda: frozenset(flags))
    monkeypatch.setattr(config, "native", lambda: object() if built else None)
    resolved = resolve(RuntimeConfig(device=device, isa=isa))
    assert resolved.dtype == dtype
    assert resolved.threads >= 1
    assert resolve(RuntimeConfig(device=device, isa=isa, dtype="float32")).dtype == "float32"
