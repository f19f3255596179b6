"""Named points in vllm_mc2 where a fault may strike: before or after the n-th call of a function since it was armed.

The list is data. A point whose function does not exist any more stops the harness at start: rename it here too.
"""

import functools
import importlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

_C = "vllm_mc2.connector"
PREFILL_POINTS: dict[str, int] = {
    "vllm_mc2.leases:LeaseBook.publish": 3,
    "vllm_mc2.leases:LeaseBook.sweep": 12,
    "vllm_mc2.leases:LeaseBook.add_ledger": 2,
    "vllm_mc2.leases:LeaseBook.drop_ledger": 1,
    "vllm_mc2.session:SessionServer._accept": 3,
    "vllm_mc2.session:SessionServer._welcome": 3,
    "vllm_mc2.channel:FrameSocket.send": 3,
    f"{_C}.prefill:PrefillHalf._on_hello": 2,
    f"{_C}.prefill:PrefillHalf.request_finished": 4,
    f"{_C}.worker:WorkerHalf._on_hello": 2,
}
"""Name -> in how many calls, counted from the start of a round, it may strike."""

DECODE_POINTS: dict[str, int] = {
    "vllm_mc2.leases:PeerLeases.__init__": 2,
    "vllm_mc2.leases:PeerLeases.look_up": 4,
    "vllm_mc2.leases:PeerLeases.claim": 4,
    "vllm_mc2.leases:PeerLeases.block_ids": 3,
    "vllm_mc2.leases:PeerLeases.release": 3,
    "vllm_mc2.leases:PeerLeases.close": 1,
    "vllm_mc2.memory:WorkerMemory.map_peer": 2,
    "vllm_mc2.layout:PoolLayout.region_bytes": 9,  # between the steps of mapping, prefaulting and unmapping
    "vllm_mc2.memory:WorkerMemory.prefault_peer": 2,
    "vllm_mc2.memory:WorkerMemory.unmap_peer": 1,
    "vllm_mc2.memory:WorkerMemory.copy_blocks": 3,
    "vllm_mc2.channel:Channel.connect": 3,
    "vllm_mc2.channel:FrameSocket.receive": 3,
    f"{_C}.borrowed:BorrowedBlocks.attach": 4,
    f"{_C}.borrowed:BorrowedBlocks.end": 3,
    f"{_C}.borrowed:BorrowedBlocks.free_blocks": 4,
    f"{_C}.peer:open_session": 2,
    f"{_C}.worker:open_session": 2,
    f"{_C}.peers:PeerTable._begin_mapping": 2,
    f"{_C}.peers:PeerTable.on_map_results": 2,
    f"{_C}.peers:PeerTable._retire": 1,
    f"{_C}.worker:WorkerHalf._unmap": 1,
    f"{_C}.host_memory:map_elsewhere": 2,
    f"{_C}.pulling:Puller.submit": 3,
    f"{_C}.pulling:PullResults.take": 20,
    f"{_C}.decode:DecodeHalf.on_loaded": 3,
}
COMMON_POINTS: dict[str, int] = {
    "tests.connector.rig:RigEngine._forward": 20,
    "tests.connector.rig:RigEngine._slot_write": 150,
}
START_POINTS: dict[str, int] = {
    "vllm_mc2.session:SessionServer.__init__": 2,
    "pathlib:Path.rename": 2,  # between bind and the socket's final name
    f"{_C}.worker:WorkerHalf.register_kv_caches": 1,
}
"""Of a prefill that is being started."""

ALL_POINTS = {**PREFILL_POINTS, **DECODE_POINTS, **COMMON_POINTS, **START_POINTS}


class Armed(NamedTuple):
    """A fault that waits at a point. ``action``: kill, stop (the controller continues it) or pause (for ``ms``)."""

    id: int
    point: str
    nth: int
    before: bool
    action: str
    ms: int
    sleeper: bool = False
    """Leave a forked child behind."""


class Points:
    """The points of this process; :meth:`install` once, :meth:`arm` per round."""

    def __init__(self, announce: Callable[[Armed], None], leave_sleeper: Callable[[], None]) -> None:
        """``announce(fault)`` tells the controller right before a fault strikes."""
        self._leave_sleeper = leave_sleeper
        self._announce = announce
        self._armed: dict[str, list[Armed]] = {}
        self._calls: dict[str, int] = {}

    def arm(self, faults: list[Armed]) -> None:
        """Replace what is armed and count calls from zero."""
        self._calls = {}
        self._armed = {}
        for fault in faults:
            self._armed.setdefault(fault.point, []).append(fault)

    def install(self) -> None:
        """Wrap every function of the list."""
        for name in ALL_POINTS:
            owner, attribute = resolve(name)
            raw = vars(owner)[attribute]
            if isinstance(raw, classmethod):
                setattr(owner, attribute, classmethod(self._wrap(name, raw.__func__)))
            else:
                setattr(owner, attribute, self._wrap(name, raw))

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            faults = self._armed.get(name)
            if not faults:
                return function(*args, **kwargs)
            call = self._calls[name] = self._calls.get(name, 0) + 1
            self._strike(faults, call, before=True)
            result = function(*args, **kwargs)
            self._strike(faults, call, before=False)
            return result

        return wrapper

    def _strike(self, faults: list[Armed], call: int, *, before: bool) -> None:
        for fault in faults:
            if fault.nth == call and fault.before == before:
                if fault.sleeper:
                    self._leave_sleeper()
                self._announce(fault)
                if fault.action == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(60)  # never get further than the point
                elif fault.action == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    time.sleep(fault.ms / 1000)


def resolve(name: str) -> tuple[Any, str]:
    """The object that has the function of a point, and its attribute there."""
    module, _, path = name.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, attribute = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    if attribute not in vars(owner):
        raise AttributeError(f"chaos point {name}: no such function any more")
    return owner, attribute
