"""For all tests: how long an example takes never fails one (a busy machine is no defect), and Ctrl-C means what it does
on a terminal: background jobs of a shell start with it ignored, and so would what a test starts and interrupts."""

from __future__ import annotations

import signal

from hypothesis import settings

settings.register_profile("pellucid", deadline=None)
settings.load_profile("pellucid")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
