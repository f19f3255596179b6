"""One thread that sleeps until a peer ends, for engines that are idle when it happens.

A busy engine notices a dead peer in its next step (:meth:`PeerTable.poll`). An idle one takes no step, and must still give a
dead prefill's memory back within a bounded time: otherwise a replacement may not find the memory to start.
"""

import logging
import os
import select
import threading
from collections.abc import Callable

from vllm_mc2.network.borrower import RemoteSession
from vllm_mc2.session import Session

logger = logging.getLogger("vllm.mc2.deathwatch")


class DeathWatchThread:
    """Calls ``on_gone(key)`` once, on its own thread, when a watched session's peer has ended. Any thread may call.

    The callee must make sure for itself that the peer is gone: descriptors are numbers, and numbers are reused.
    """

    def __init__(self, on_gone: Callable[[str], None]) -> None:
        self._on_gone = on_gone
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._lock = threading.Lock()
        self._keys: dict[int, str] = {}
        self._thread: threading.Thread | None = None

    def watch(self, key: str, session: Session | RemoteSession) -> None:
        """Begin to watch. The thread starts with the first session, so that who has no peers has no thread."""
        with self._lock:
            for fd in session.descriptors():
                if fd in self._keys:
                    continue  # watched already, and still to be reported
                self._keys[fd] = key
                self._epoll.register(fd, select.EPOLLIN | select.EPOLLRDHUP)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mc2-deathwatch", daemon=True)
                self._thread.start()

    def forget(self, session: Session | RemoteSession) -> None:
        """Stop watching; to be called before the session is closed. Idempotent."""
        with self._lock:
            for fd in session.descriptors():
                if self._keys.pop(fd, None) is not None:
                    self._epoll.unregister(fd)

    def close(self) -> None:
        """End the thread; idempotent, not from the thread itself."""
        if self._epoll.closed:
            return
        os.eventfd_write(self._wake_fd, 1)
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        self._epoll.close()
        os.close(self._wake_fd)

    def _run(self) -> None:
        while True:
            fds = [fd for fd, _ in self._epoll.poll()]
            if self._wake_fd in fds:
                return
            for key in {key for fd in fds if (key := self._take(fd)) is not None}:
                try:
                    self._on_gone(key)
                except Exception:
                    # Thread border: one peer's end must not end the watch over the others.
                    logger.exception("could not give back the memory of a dead peer; the next step will")

    def _take(self, fd: int) -> str | None:
        """The key that is watched on ``fd``; none of its descriptors is watched afterwards, so it is reported once."""
        with self._lock:
            key = self._keys.get(fd)
            for other in [other for other, its_key in self._keys.items() if its_key == key]:
                del self._keys[other]
                self._epoll.unregister(other)
        return key
