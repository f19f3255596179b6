"""Imports vLLM once, then forks engine processes into containers: rig engines as ``tests/chaos`` has them.

``python -m tests.isolation.nursery FD MODEL``, with the environment of :data:`tests.chaos.zygote.SETTINGS`. For each container
it makes a warden, which stays outside; the container's first process; and the engine, which has a process id that another
container's engine has too.
"""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.engine import EngineProcess
from tests.chaos.zygote import warm_up
from tests.isolation import namespaces
from tests.support.processes import Message, Pipe, Zygote, die_with_parent, fork
from vllm_mc2 import session
from vllm_mc2.channel import sweep_stale_sockets
from vllm_mc2.cli.inspect import look


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


MANY = 10_000_000
HUGE: dict[str, Callable[[], dict[str, Any]]] = {
    "ids beside the ticket": lambda: {"remote_block_ids": [[7] * MANY]},
    "ids for a ticket": lambda: {"mc2_ticket": [7] * MANY},
    "ids in a ticket": lambda: {"mc2_ticket": {"version": 1, "blocks": [2**63] * MANY}},
    "a long slot": lambda: {"mc2_ticket": {"version": 1, "slot": "0" * MANY}},
    "a long path": lambda: {"mc2_ticket": {"incarnation": "../" * MANY}},
    "a long host": lambda: {"remote_host": "h" * MANY, "remote_port": 2**63},
    "nesting": lambda: {"mc2_ticket": _nested(100_000), "remote_host": _nested(100_000)},
}
"""D24: fields that a client made huge."""


class ContainedEngine(EngineProcess):
    """Commands that only these tests have."""

    def _do_sweep(self, message: Message) -> None:
        removed = sweep_stale_sockets(Path(message["directory"]), patience_seconds=600.0)
        self._tell(type="reply", seq=message["seq"], removed=removed, pid=os.getpid())

    def _do_add_huge(self, message: Message) -> None:
        """A request whose params do not fit a message of this harness, but a client's request to vLLM."""
        params = {**message["params"], **HUGE[message["kind"]]()}
        self._do_add({**message, "params": params, "gone": False})
        self._tell(type="reply", seq=message["seq"])

    def _do_break_sessions(self, message: Message) -> None:
        """From here on, whoever says something to a listener of this process meets a bug of ours."""

        def fail(buffer: bytearray, max_bytes: int) -> bytes | None:
            raise ZeroDivisionError("a bug of ours")

        session.first_frame = fail
        self._tell(type="reply", seq=message["seq"])

    def _do_look(self, message: Message) -> None:
        found = look(Path(message["directory"]))
        holders = [holder.pid for engine in found.engines for lease in engine.leases for holder in lease.holders]
        peers = [peer.pid for engine in found.engines for peer in engine.peers]
        self._tell(
            type="reply", seq=message["seq"], roles=[engine.role for engine in found.engines], holders=holders,
            peers=peers, stale=found.stale, num_workers=len(found.workers), unanswered=len(found.unanswered),
        )  # fmt: skip


class Container:
    """From the fork on; ``box`` says what it is made of, ``spec`` what runs in it."""

    def __init__(self, model: Path, box: Message, spec: Message, pipe_fd: int, life_fd: int) -> None:
        self._model, self._box, self._spec = model, box, spec
        self._pipe_fd, self._life_fd = pipe_fd, life_fd

    def warden(self) -> None:
        """Makes the namespaces; ends with the container's first process."""
        if self._box["inside"] is not None:
            namespaces.enter(Path(self._spec["directory"]), Path(self._box["inside"]))
            self._spec["directory"] = self._box["inside"]
        first = fork(self._first)
        os.close(self._pipe_fd)  # so that the engine's end is the end of its messages
        os.waitpid(first, 0)

    def _first(self) -> None:
        """Stays when the engine has ended, until the test lets go of the container."""
        if self._box["inside"] is not None:
            namespaces.show_own_processes()
        if self._box["uid_ranges"] is not None:
            namespaces.in_user_namespace(self._box["uid_ranges"])
        fork(self._engine)
        os.close(self._pipe_fd)
        os.read(self._life_fd, 1)

    def _engine(self) -> None:
        # Only now: a killed engine must be seen as such although its container lives on.
        os.close(self._life_fd)
        if self._box["uid"] is not None:
            namespaces.become(self._box["uid"])
            die_with_parent()
        pipe = Pipe.of(self._pipe_fd)
        pidfd = os.pidfd_open(os.getpid())
        pipe.send({"type": "born", "pid": os.getpid(), "uid": os.geteuid()}, [pidfd])
        os.close(pidfd)
        try:
            ContainedEngine(pipe, self._model, self._spec).run()
        except BaseException:
            pipe.send({"type": "crash", "trace": traceback.format_exc()[-4000:]})
            raise


def main() -> None:
    """The model is the engines'; what is made of a container's message is in :class:`Container`."""
    model = Path(sys.argv[2])

    def become(spec: Message, pipe_fd: int, life_fd: int) -> None:
        Container(model, spec["box"], spec["engine"], pipe_fd, life_fd).warden()

    zygote = Zygote(int(sys.argv[1]), become)
    warm_up(model)
    zygote.run()


if __name__ == "__main__":
    main()
