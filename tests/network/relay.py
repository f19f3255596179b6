"""A relay between two TCP peers: a cable that can be cut, and a listener on the line that can change what passes."""

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Self

Change = Callable[[bytes, str], bytes]


class Relay:
    """Connect to :attr:`port` instead of the target. ``change(data, "up" or "down")`` may alter what passes; up is to it."""

    def __init__(self, target: tuple[str, int], change: Change = lambda data, way: data) -> None:
        self._target = target
        self.change = change
        self.whole = threading.Event()
        self.whole.set()
        self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Nothing passes any more, and no end is closed."""
        self.whole.clear()

    def mend(self) -> None:
        self.whole.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.num_connections += 1
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                for source, sink, way in ((client, server, "up"), (server, client, "down")):
                    threading.Thread(target=self._pass_on, args=(source, sink, way), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                while not self.whole.wait(0.05):
                    if self._closed:
                        return
                sink.sendall(self.change(data, way))
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        self.close_connections()

    def close_connections(self) -> None:
        """Those that were made so far."""
        sockets, self._sockets = self._sockets, []
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
