"""What a new mapping of a peer's pool costs at first touch: why page tables are filled in once per peer, in advance."""

import os
import time
from typing import Any

import torch

from vllm_mc2._native import AddressRange, Pool
from vllm_mc2.bench.handoff.messages import Link, Note, Touch, Touched

PAGE_BYTES = 4096
WAIT_SECONDS = 120.0


def offer(ask: Touch, peer: Link) -> None:
    """Sender: make a pool, hand it over, keep it until the receiver is done.

    Raises:
        OSError: too little memory.
    """
    with Pool(ask.num_bytes, huge_pages=ask.huge_pages, name="mc2-bench-touch") as pool:
        pool.seal()
        peer.send(Note(f"{pool.method} {pool.page_bytes}".encode()), (pool.fd,))
        peer.expect(Note, WAIT_SECONDS)


def measure(ask: Touch, peer: Link) -> Touched:
    """Receiver: map it anew for each repeat, and read one byte of each page, with and without filling in first."""
    note, fds = peer.receive(WAIT_SECONDS)
    assert isinstance(note, Note)
    method, page_bytes = note.data.decode().split()
    touched = Touched(method, int(page_bytes), [], [], [], [], [])
    try:
        for _ in range(ask.num_repeats):
            _repeat(ask.num_bytes, fds[0], touched)
    finally:
        os.close(fds[0])
    peer.send(Note())
    return touched


def _repeat(num_bytes: int, fd: int, touched: Touched) -> None:
    with AddressRange(num_bytes) as window:
        for prefault in (False, True):
            touched.map_ns.append(_nanoseconds(lambda: window.map_peer(0, fd, 0, num_bytes)))
            pages: Any = torch.frombuffer(window.buffer(), dtype=torch.uint8)[::PAGE_BYTES]
            if prefault:
                touched.prefault_ns.append(_nanoseconds(lambda: window.prefault(0, num_bytes)))
                touched.warm_touch_ns.append(_nanoseconds(pages.sum))
            else:
                touched.cold_touch_ns.append(_nanoseconds(pages.sum))
            del pages
            touched.unmap_ns.append(_nanoseconds(lambda: window.unmap(0, num_bytes)))


def _nanoseconds(work: Any) -> int:
    begin = time.monotonic_ns()
    work()
    return time.monotonic_ns() - begin
