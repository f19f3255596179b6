"""Processes that are forked out of one that has imported everything, talk in whole messages, and die with whoever made them.

Importing vLLM takes seconds, a fork milliseconds. A program that is to be forked from makes a :class:`Zygote`, imports what its
children need and calls :meth:`Zygote.run`; a :class:`ZygoteClient` starts that program and asks it for children.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import msgspec

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 400.0
"""Until a zygote has imported everything on a busy machine."""
END_SECONDS = 90.0
MAX_PACKET_BYTES = 1 << 17
MAX_FDS = 32
CRASHED = 70
"""The exit code of a child that an exception ended."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
Message = dict[str, Any]


def die_with_parent() -> None:
    """SIGKILL for this process when the thread that made it ends; forgotten when it becomes another user."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of what children leave behind when they end."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def fork(work: Callable[[], int | None]) -> int:
    """The pid of a child that does ``work`` and ends with the exit code it returns; None is 0.

    It dies with this process, runs none of its exit handlers, and says on standard error what went wrong.
    """
    pid = os.fork()
    if pid:
        return pid
    code = CRASHED
    try:
        die_with_parent()
        code = work() or 0
    except BaseException:
        # Process border.
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


class Pipe:
    """One end of a ``SOCK_SEQPACKET`` pair; each packet is one JSON object, with descriptors perhaps.

    A packet arrives whole or not at all, so a process may be killed while it sends, and its threads need no lock.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Two connected ends."""
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(left), cls(right)

    @classmethod
    def of(cls, fd: int) -> Self:
        """The end that another process has handed over."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> bool:
        """False when the other end is gone, or stopped and full: then it gets nothing more, as a real client."""
        data = msgspec.json.encode(message)
        assert len(data) <= MAX_PACKET_BYTES, len(data)
        with contextlib.suppress(OSError):
            socket.send_fds(self.sock, [data], list(fds))
            return True
        return False

    def receive(self) -> tuple[Message | None, list[int]]:
        """The next message and its descriptors; None at the end. ``BlockingIOError`` as the socket is set."""
        try:
            data, fds, _flags, _address = socket.recv_fds(self.sock, MAX_PACKET_BYTES, MAX_FDS)
        except ConnectionResetError:
            return None, []
        return (msgspec.json.decode(data) if data else None), fds

    def close(self) -> None:
        self.sock.close()


class Zygote:
    """The process that is forked from; make it before everything else is imported.

    It reaps its children and, as subreaper, what they leave behind. When its client is gone, so are it and its children.
    """

    def __init__(self, fd: int, become: Callable[..., int | None]) -> None:
        """``become(spec, *fds)`` is what a child does, in a session of its own; its exit code."""
        self._control = Pipe.of(fd)
        self._become = become
        self._ended: dict[int, int] = {}
        die_with_parent()
        adopt_orphans()
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def run(self) -> NoReturn:
        """Fork a child whenever the client says so, until that is gone."""
        tasks = Path("/proc/self/task").iterdir()
        names = [task.joinpath("comm").read_text().strip() for task in tasks]
        assert len(names) == 1, f"forking would lose threads: {names}"
        sys.stdout.flush()  # or each child would print it again
        signal.signal(signal.SIGCHLD, lambda number, frame: self._reap())
        self._control.send({"type": "ready"})
        while True:
            message, fds = self._control.receive()
            if message is None:
                os._exit(0)
            match message["op"]:
                case "fork":
                    self._fork(message["spec"], fds)
                case "status":
                    self._reap()
                    self._control.send({"type": "status", "code": self._ended.get(message["pid"])})
                case "children":
                    self._reap()
                    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
                    self._control.send({"type": "children", "pids": [int(pid) for pid in text.split()]})

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                self._ended[ended[0]] = os.waitstatus_to_exitcode(ended[1])

    def _fork(self, spec: Message, fds: list[int]) -> None:
        # Not reaped before its pidfd is opened, however early it ends.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = fork(lambda: self._begin(spec, fds))
        pidfd = os.pidfd_open(pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        self._control.send({"type": "forked", "pid": pid}, [pidfd])
        for fd in (*fds, pidfd):
            os.close(fd)

    def _begin(self, spec: Message, fds: list[int]) -> int | None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.setsid()
        self._control.close()
        *own, log_fd = fds
        for number in (1, 2):
            os.dup2(log_fd, number)
        os.close(log_fd)
        return self._become(spec, *own)


class ZygoteClient:
    """Starts a program with a :class:`Zygote`, and asks it for children."""

    def __init__(
        self, module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """``python -m module FD arguments``; returns when it can be forked from."""
        self._pipe, theirs = Pipe.pair()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
                cwd=ROOT, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, start_new_session=True,
            )  # fmt: skip
        theirs.close()
        self._pipe.sock.settimeout(START_SECONDS)
        try:
            message, _fds = self._pipe.receive()
            if message is None:
                raise RuntimeError(f"{module} did not start:\n{log.read_text(errors='replace')[-4000:]}")
        except BaseException:
            self._process.kill()
            self.close()
            raise

    def _ask(self, message: Message, fds: Sequence[int] = ()) -> tuple[Message, list[int]]:
        self._pipe.send(message, fds)
        answer, received = self._pipe.receive()
        if answer is None:
            raise RuntimeError("the zygote is gone")
        return answer, received

    def fork(self, spec: Message, fds: Sequence[int], log_fd: int) -> tuple[int, int]:
        """``(pid, pidfd)`` of a new child; what it prints is written to ``log_fd``."""
        answer, (pidfd,) = self._ask({"op": "fork", "spec": spec}, [*fds, log_fd])
        return answer["pid"], pidfd

    def exit_code(self, pid: int) -> int | None:
        """Negative for a signal; None while it is running."""
        code: int | None = self._ask({"op": "status", "pid": pid})[0]["code"]
        return code

    def children(self) -> set[int]:
        """Children and orphans of dead children that are running."""
        return set(self._ask({"op": "children"})[0]["pids"])

    def close(self) -> None:
        """The children die with it."""
        self._pipe.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
