"""Whether other threads are at rest is read from the system."""

import hashlib
import threading
import time
from pathlib import Path

import pytest

from labkit.record.threads import others_sleep


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="waits for a system that has /proc/self/task")
def test_a_thread_at_work_is_seen_and_one_that_waits_is_not():
    stop = threading.Event()
    waiting = threading.Thread(target=stop.wait)
    waiting.start()
    working = threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha256", b"a", b"b", 3_000_000))
    working.start()
    seen = False
    while working.is_alive() and not seen:
        seen = not others_sleep()
        time.sleep(0.001)
    working.join()
    at_rest = any(others_sleep() or time.sleep(0.01) for _ in range(500))
    stop.set()
    waiting.join()
    assert seen and at_rest
