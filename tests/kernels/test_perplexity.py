"""The precision that each default path promises, on the real model: `benchmarks/perplexity.py` as a test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.default_model import REASON, default_model_path

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def test_every_path_is_within_its_limit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    perplexity = pytest.importorskip("benchmarks.perplexity")
    model: Path | None = default_model_path()
    if model is None or not model.exists():
        pytest.skip(REASON)
    monkeypatch.setattr(sys, "argv", ["perplexity", str(model)])
    perplexity.main()  # exits where a path is beyond its limit
    assert capsys.readouterr().out.count("within limit True") == 10
