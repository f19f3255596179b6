"""TCP ports for servers that are told theirs on a command line, and start to listen there only seconds later."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

HOST = "127.0.0.1"
FIRST, LAST = 18_000, 28_000
"""Above what Mooncake chooses from, and on most machines below what the kernel gives away by itself."""


@contextmanager
def own_ports(count: int) -> Iterator[list[int]]:
    """Ports that neither the kernel nor another test gives to anybody until the end of the context.

    A port that was free a moment ago, of those that the kernel gives away, may be the end of somebody's connection by the time
    that a server has imported all it needs.
    """
    lowest, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    candidates = range(FIRST, min(LAST, lowest)) or range(FIRST, LAST)
    start = os.getpid() * 97 % len(candidates)
    with ExitStack() as stack:
        found: list[int] = []
        for port in [*candidates[start:], *candidates[:start]]:
            if len(found) == count:
                break
            with ExitStack() as attempt:
                # A name that only this kernel knows, for the same network namespace as the port's, and gone with its owner.
                claim = attempt.enter_context(socket.socket(socket.AF_UNIX))
                with suppress(OSError):
                    claim.bind(f"\0mc2-test-port-{port}")
                    _require_free(port)
                    found.append(port)
                    stack.push(attempt.pop_all())
        assert len(found) == count, f"only {len(found)} of {count} ports are free"
        yield found


def _require_free(port: int) -> None:
    """Raise OSError if somebody has the port at any address."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", port))


@contextmanager
def refusing_port() -> Iterator[int]:
    """A port where every connection is refused: somebody has it, and does not listen."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        yield int(sock.getsockname()[1])
