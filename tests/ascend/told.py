"""A process that does as it is told on a socket: ``[name, arguments]``, answered by ``["ok", value]`` or ``["error", text]``."""

import socket
import traceback
from collections.abc import Callable
from typing import Any

from vllm_mc2.ascend.calls import receive, send


def serve(fd: int, make: Callable[[], Any]) -> Any:
    """Makes the object whose methods are called, says that it is there, and serves until the other end closes. Returns the
    object, or None if it could not be made.
    """
    sock = socket.socket(fileno=fd)
    try:
        told = make()
    except Exception:
        send(sock, ["error", traceback.format_exc()])
        return None
    send(sock, ["ok", None])
    while (call := receive(sock)) is not None:
        try:
            answer = ["ok", getattr(told, call[0])(*call[1])]
        except Exception:
            answer = ["error", traceback.format_exc()]
        send(sock, answer)
    return told
