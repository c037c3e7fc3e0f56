"""For all tests: how long an example takes never fails one (a busy machine is no defect)."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("pellucid", deadline=None)
settings.load_profile("pellucid")
