"""The face for servers, on the toy model: threads, event loops, backpressure, faults, and how it ends.

No test waits for time to pass: gates and events order what happens. A test that hangs is ended by an alarm.
"""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from .helpers import HANG


@pytest.fixture(autouse=True)
def _no_hang_and_no_thread_left() -> Iterator[None]:
    """Every test: a hang is a failure, and no thread of ours outlives it."""

    def ring(*_: Any) -> None:
        raise TimeoutError(f"the test hangs: {[t.name for t in threading.enumerate()]}")

    before = set(threading.enumerate())
    old = signal.signal(signal.SIGALRM, ring)
    signal.alarm(HANG)
    try:
        yield
        left = [t for t in threading.enumerate() if t not in before and t.name.startswith("paceline")]
        if left:
            gc.collect()
        for thread in left:  # an engine that was dropped, not closed, needs a moment
            thread.join(timeout=10)
        assert not [t for t in left if t.is_alive()]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
