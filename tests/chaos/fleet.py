"""The controller's side of the engine processes: start, commands, messages, and their deaths, by pidfd."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.footprint import Footprint, Mapping, state_of
from tests.chaos.plan import ROLES, MemberSpec
from tests.chaos.points import Armed
from tests.support.processes import ROOT, Message, Pipe, ZygoteClient

MODEL = ROOT / "build" / "models" / "tiny-llama"


class Member:
    """One engine process, from its start to its death."""

    def __init__(self, name: str, spec: MemberSpec, pid: int, pidfd: int, pipe: Pipe, log: Path) -> None:
        self.name = name
        self.spec = spec
        self.pid = pid
        self.pidfd = pidfd
        self.pipe = pipe
        self.log = log
        self.alive = True
        self.may_end = False
        """Whether its end is our doing."""
        self.is_stopped = False
        self.has_sleeper = False
        self.baseline: Footprint | None = None
        self.sockets: set[str] = set()
        self.replies: dict[int, Message] = {}

    @property
    def is_prefill(self) -> bool:
        return self.name[0] != "D"

    def signal(self, number: int) -> None:
        """Through the pidfd: never to another process that got the pid."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def on_ready(self, message: Message) -> None:
        maps = {Mapping(kind, inode, writable): count for kind, inode, writable, count in message["maps"]}
        self.baseline = Footprint(message["fds"], message["threads"], maps)
        self.sockets = set(message["sockets"])


class Fleet:
    """All engines, alive or not yet replaced. ``on_message`` and ``on_death`` are the round's."""

    def __init__(self, workdir: Path, package: str | None = None) -> None:
        self.directory = workdir / "s"
        self._logs = workdir / "logs"
        self._logs.mkdir(parents=True)
        arguments = [str(MODEL), *([package] if package else [])]
        self.zygote = ZygoteClient("tests.chaos.zygote", arguments, self._logs / "zygote.log")
        self.members: dict[str, Member] = {}
        self.num_started = 0
        self.on_message: Callable[[Member, Message], None] = lambda member, message: None
        self.on_death: Callable[[Member], None] = lambda member: None
        self._poll = select.poll()
        self._by_fd: dict[int, Member] = {}
        self._seq = 0

    @property
    def alive(self) -> list[Member]:
        return [member for member in self.members.values() if member.alive]

    def start(self, name: str, spec: MemberSpec, armed: tuple[Armed, ...] = ()) -> Member:
        """Start an engine; it is ready to take commands at once, and works them off when it is up."""
        assert name not in self.members or not self.members[name].alive
        self.num_started += 1
        extra = {
            "offer_timeout_seconds": 0.5,
            "handshake_timeout_seconds": spec.handshake_timeout_seconds,
            "window_pool_factor": spec.window_pool_factor,
            "prefault": spec.prefault,
            "mode": spec.mode,
        }
        settings = {
            "directory": str(self.directory), "role": ROLES[name[0]], "engine_id": f"chaos-{name}", "extra": extra,
            "num_blocks": spec.num_blocks, "policy": spec.policy,
            "max_num_batched_tokens": spec.max_num_batched_tokens,
            "armed": [fault._asdict() for fault in armed],
        }  # fmt: skip
        log = self._logs / f"{self.num_started:05d}-{name}.log"
        mine, theirs = Pipe.pair()
        with log.open("wb") as output:
            pid, pidfd = self.zygote.fork(settings, [theirs.fileno()], output.fileno())
        theirs.close()
        mine.sock.setblocking(False)
        member = Member(name, spec, pid, pidfd, mine, log)
        self.members[name] = member
        for fd in (mine.fileno(), member.pidfd):
            self._by_fd[fd] = member
            self._poll.register(fd, select.POLLIN)
        return member

    def pump(self, timeout_seconds: float) -> None:
        """Wait for messages and deaths, and tell whoever listens."""
        for fd, _events in self._poll.poll(max(0.0, timeout_seconds) * 1000):
            member = self._by_fd.get(fd)
            if member is None:
                continue
            self._drain(member)
            if fd == member.pidfd:
                self._bury(member)

    def _drain(self, member: Member) -> None:
        while True:
            try:
                message, _fds = member.pipe.receive()
            except BlockingIOError:
                return
            if message is None:
                if member.pipe.fileno() in self._by_fd:
                    self._poll.unregister(member.pipe.fileno())
                    del self._by_fd[member.pipe.fileno()]
                return
            if message["type"] == "ready":
                member.on_ready(message)
            elif message["type"] == "sleeper":
                member.has_sleeper = True
            elif message["type"] == "reply":
                member.replies[message["seq"]] = message
            else:
                self.on_message(member, message)

    def _bury(self, member: Member) -> None:
        for fd in (member.pipe.fileno(), member.pidfd):
            if self._by_fd.pop(fd, None) is not None:
                self._poll.unregister(fd)
        member.pipe.close()
        os.close(member.pidfd)
        member.alive = False
        self.on_death(member)

    def ask(self, member: Member, deadline: float, op: str, **more: Any) -> Message | None:
        """Send a command and wait for its reply; None when the member dies or does not answer in time."""
        self._seq += 1
        seq = self._seq
        member.pipe.send({"op": op, "seq": seq, **more})
        while seq not in member.replies and member.alive and time.monotonic() < deadline:
            self.pump(deadline - time.monotonic())
        return member.replies.pop(seq, None)

    def continue_member(self, member: Member) -> bool:
        """Continue a stopped engine; False while it has not stopped yet."""
        if member.alive and state_of(member.pid) not in "TtX":
            return False
        member.is_stopped = False
        if member.alive:
            member.signal(signal.SIGCONT)
        return True

    def end_orphans(self) -> int:
        """Kill what dead engines have left behind; how many there were."""
        orphans = self.zygote.children() - {member.pid for member in self.alive}
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(orphans)

    def kill_all(self) -> None:
        """The end of all engines, in whatever state things are, and of what they left in the socket directory."""
        for member in self.alive:
            member.may_end = True
            member.signal(signal.SIGKILL)
        deadline = time.monotonic() + 60
        while self.alive and time.monotonic() < deadline:
            self.pump(0.1)
        self.end_orphans()
        if self.directory.exists():
            for path in self.directory.iterdir():
                path.unlink()

    def close(self) -> None:
        """Leave no process behind."""
        try:
            self.kill_all()
        finally:
            self.zygote.close()
