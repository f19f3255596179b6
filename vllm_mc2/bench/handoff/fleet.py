"""The worker processes: started, asked, stopped while others have their turn, and ended, whatever happens.

A worker that dies ends the run: :class:`WorkerError` says which and why. Nothing is left then, since all memory is in
memfds and private mappings, all sockets but those in a temporary directory have no name, and workers die with the command.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Literal, Self

from vllm_mc2.bench.handoff.cases import COPYING_WAYS, OUR_WAYS, PEER_WAYS, Case
from vllm_mc2.bench.handoff.messages import (
    Answer,
    Ask,
    Close,
    Failed,
    Link,
    LinkClosedError,
    Message,
    Open,
    Opened,
    Received,
    Sent,
    Stamp,
    Touch,
    Touched,
    Turn,
)

OPEN_SECONDS = 300.0
TURN_SECONDS = 120.0
END_SECONDS = 3.0
_LOG_TAIL_LINES = 12


class WorkerError(Exception):
    """A worker process has ended, failed, or does not answer. The message is for the user."""


class WorkerProcess:
    """One process and the command's link to it."""

    def __init__(self, name: str, role: Literal["sender", "receiver"], peer: Link) -> None:
        self.name = name
        self._log = os.memfd_create("mc2-bench-log", os.MFD_CLOEXEC)
        self.link, theirs = Link.pair()
        command = [sys.executable, "-m", "vllm_mc2.bench.handoff.worker"]
        command += [role, str(theirs.fileno()), str(peer.fileno()), str(os.getpid())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno(), peer.fileno()],
        )
        theirs.close()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a process that has ended gets none."""
        self._process.send_signal(number)

    def answer(self) -> tuple[Message, list[int]]:
        """What it has sent, which must be there.

        Raises:
            WorkerError: it has failed or ended instead.
        """
        try:
            message, fds = self.link.receive(1.0)
        except (LinkClosedError, TimeoutError) as error:
            raise WorkerError(self.obituary()) from error
        if isinstance(message, Failed):
            raise WorkerError(f"the {self.name} failed: {message.text}")
        return message, fds

    def obituary(self) -> str:
        """How it ended, with the end of what it printed."""
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return f"the {self.name} (process {self._process.pid}) has closed its link"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        log = os.pread(self._log, 1 << 20, max(0, os.fstat(self._log).st_size - (1 << 20)))
        tail = log.decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join([f"the {self.name} (process {self._process.pid}) {how}", *(f"  | {line}" for line in tail)])

    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def end(self) -> None:
        """Kill it, stopped or not. It has nothing to tidy up: all that it holds goes with it."""
        self._process.kill()
        self._process.wait()
        self.link.close()
        os.close(self._log)


class Pair:
    """A sender and a receiver, connected with each other."""

    def __init__(self, name: str) -> None:
        one, other = Link.pair()
        self.sender = WorkerProcess(f"{name}sender", "sender", one)
        try:
            self.receiver = WorkerProcess(f"{name}receiver", "receiver", other)
        except BaseException:
            self.sender.end()
            raise
        finally:
            one.close()
            other.close()

    @property
    def workers(self) -> tuple[WorkerProcess, WorkerProcess]:
        """Sender and receiver."""
        return self.sender, self.receiver

    def ask(
        self, ask: Ask, timeout_seconds: float, fds: Sequence[int] = ()
    ) -> tuple[tuple[Message, list[int]], tuple[Message, list[int]]]:
        """Ask both the same, and wait for both; ``fds`` go to the sender.

        Raises:
            WorkerError: one of them has ended, failed, or not answered in time.
        """
        _send(self.sender, ask, fds)
        _send(self.receiver, ask)
        answers = _gather(self.workers, timeout_seconds)
        return answers[0], answers[1]

    def signal(self, number: signal.Signals) -> None:
        """Send both a signal."""
        for worker in self.workers:
            worker.signal(number)

    def end(self) -> None:
        """End both."""
        for worker in self.workers:
            worker.end()


class Fleet:
    """All worker processes of a run. A context manager."""

    def __init__(self) -> None:
        self._main: Pair | None = None
        self._peers: Pair | None = None
        self._socket_dir = tempfile.mkdtemp(prefix="mc2-bench-")
        self._num_stamps = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for pair in (self._main, self._peers):
            if pair is not None:
                pair.end()
        shutil.rmtree(self._socket_dir, ignore_errors=True)

    def open(self, ways: Sequence[str], caches: Sequence[Case], contiguous_bytes: int) -> Opened:
        """Everything that a stage needs; what there is to say about it.

        Raises:
            WorkerError: it cannot be had.
        """
        mine = [way for way in ways if way not in PEER_WAYS]
        theirs = [way for way in ways if way in PEER_WAYS]
        # Peers read the source that the main pair makes, so that has one even if it copies nothing itself.
        if theirs and not any(way in COPYING_WAYS for way in mine):
            mine.append("memcpy")
        if self._main is None:
            self._main = Pair("")
        if theirs and self._peers is None:
            self._peers = Pair("peers' ")  # it imports its libraries while the main pair makes memory ready
        ask = Open(mine, list(caches), contiguous_bytes, self._socket_dir)
        (opened, fds), (also, _) = self._main.ask(ask, OPEN_SECONDS)
        try:
            merged = _merge(opened, also)
            if theirs:
                assert self._peers is not None
                answers = self._peers.ask(Open(theirs, [], contiguous_bytes, self._socket_dir), OPEN_SECONDS, fds)
                merged = _merge(merged, *(message for message, _ in answers))
                self._peers.signal(signal.SIGSTOP)
        finally:
            for fd in fds:
                os.close(fd)
        return merged

    def close(self) -> None:
        """Give back what :meth:`open` got; the main processes stay, the peers' end."""
        if self._peers is not None:
            # Not asked to close: these libraries keep threads and hooks, which nothing after this needs.
            self._peers.end()
            self._peers = None
        if self._main is not None:
            self._main.ask(Close(), OPEN_SECONDS)

    def turn(self, way: str, case: Case, cache: int, *, check_all: bool) -> tuple[Sent, Received]:
        """Hand one case over by one way.

        Raises:
            WorkerError: it did not work.
        """
        assert self._main is not None
        self._num_stamps += 1
        stamp = 0 if check_all else self._num_stamps
        _send(self._main.sender, Stamp(case, cache if way in OUR_WAYS else None, stamp))
        _gather([self._main.sender], TURN_SECONDS)
        pair = self._peers if way in PEER_WAYS else self._main
        assert pair is not None
        ask = Turn(way, case, cache, stamp, check_all)
        with self._running(pair):
            (sent, _), (received, _) = pair.ask(ask, TURN_SECONDS)
        assert isinstance(sent, Sent)
        assert isinstance(received, Received)
        return sent, received

    @contextlib.contextmanager
    def _running(self, pair: Pair) -> Iterator[None]:
        if pair is self._main:
            yield
            return
        pair.signal(signal.SIGCONT)
        try:
            yield
        finally:
            pair.signal(signal.SIGSTOP)

    def touch(self, ask: Touch) -> Touched:
        """First-touch costs of a new mapping.

        Raises:
            WorkerError: it did not work.
        """
        if self._main is None:
            self._main = Pair("")
        _, (touched, _) = self._main.ask(ask, OPEN_SECONDS)
        assert isinstance(touched, Touched)
        return touched


def _send(worker: WorkerProcess, ask: Ask, fds: Sequence[int] = ()) -> None:
    try:
        worker.link.send(ask, fds)
    except LinkClosedError as error:
        raise WorkerError(worker.obituary()) from error


def _gather(workers: Sequence[WorkerProcess], timeout_seconds: float) -> list[tuple[Message, list[int]]]:
    """One answer of each worker, whoever is first."""
    answers: dict[str, tuple[Message, list[int]]] = {}
    deadline = time.monotonic() + timeout_seconds
    while len(answers) < len(workers):
        waiting = {worker.link.fileno(): worker for worker in workers if worker.name not in answers}
        poll = select.poll()
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        events = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not events:
            names = " and the ".join(worker.name for worker in waiting.values())
            raise WorkerError(f"no answer from the {names} in {timeout_seconds:.0f} s")
        for fd, _ in events:
            worker = waiting[fd]
            try:
                answers[worker.name] = worker.answer()
            except WorkerError:
                _blame(workers)
                raise
    return [answers[worker.name] for worker in workers]


def _blame(workers: Sequence[WorkerProcess]) -> None:
    """When one worker dies, its counterpart fails because of that, and may be heard first: name the one that died."""
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline:
        for worker in workers:
            if worker.has_ended():
                raise WorkerError(worker.obituary())
        time.sleep(0.01)


def _merge(*answers: Message) -> Opened:
    notes: dict[str, str] = {}
    absent: dict[str, str] = {}
    for answer in answers:
        assert isinstance(answer, Answer)
        assert isinstance(answer, Opened), f"got {type(answer).__name__}"
        notes |= answer.notes
        absent |= answer.absent
    return Opened(notes, absent)
