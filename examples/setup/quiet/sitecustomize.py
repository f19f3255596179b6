"""Tame vLLM's busy waiting on a small machine; for the demo and the tests only, never shipped.

vLLM's readers of shared-memory queues call `os.sched_yield()` in a loop for a second after each
message. With two servers on two cores the kernel lets those loops starve everybody else, for up to 30
seconds at a time. A 50 microsecond sleep gives the core away for real. `examples/pair.py` puts this
folder on the PYTHONPATH of the servers it starts, where Python imports `sitecustomize` by itself.
"""

import os
import time

YIELD_SECONDS = 50e-6


def _sched_yield() -> None:
    time.sleep(YIELD_SECONDS)


os.sched_yield = _sched_yield
