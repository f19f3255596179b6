"""Gauges of ``/metrics``: how much is held, lent and mapped *now*, also by an engine that is idle.

vLLM takes statistics from an engine that steps, and an idle one does not: what it said last would stay on display for ever, after
leases have expired and peers have died. So a gauge has no value of its own. When ``/metrics`` is read, the front end asks the
engine's socket (``CountsHello``), whose thread answers without the scheduler and without a step.

Nothing here can hold up the front end for longer than :data:`ANSWER_SECONDS` per engine:

* Before an engine has counted anything, it has nothing to show: 0, and nobody is asked.
* Nobody listens any more: 0, since what the engine held has ended with it.
* No answer in time (stopped, or starved): not a number, and for :data:`PATIENCE_SECONDS` it is not asked again.

Where a value cannot be computed on reading (several API server processes share files; Ray has its own), a thread asks in the
background, for as long as anything is not 0.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import Gauge

from vllm_mc2 import channel
from vllm_mc2.channel import socket_path
from vllm_mc2.errors import MC2Error, PeerUnreachableError
from vllm_mc2.inspection import EngineCounts
from vllm_mc2.protocol import PROTOCOL_VERSION, CountsHello, expect

logger = logging.getLogger("vllm.mc2.metrics")

ANSWER_SECONDS = 0.25
FRESH_SECONDS = 1.0
"""All gauges of one reading come from one answer."""
PATIENCE_SECONDS = 10.0
REFRESH_SECONDS = 5.0
"""Of the thread that asks in the background."""

_NOBODY = {errno.ENOENT, errno.ECONNREFUSED}
_NOTHING = EngineCounts(incarnation="0" * 32, num_blocks=1)


class Reading(NamedTuple):
    """A gauge, with the labels that it has beside those of the engine, and where its value comes from."""

    name: str
    labels: tuple[str, ...]
    value: Callable[[EngineCounts], float]


TEXTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "leases": ("Leases of this prefill that have not ended.", ("state",)),
    "lent_blocks": ("Blocks of this prefill under leases, each counted once.", ()),
    "lent_share": ("Share of this prefill's KV cache that is under leases, 0 to 1.", ()),
    "decodes": ("Decodes that have a session with this prefill.", ()),
    "peers": ("Prefills that this decode knows.", ("state",)),
    "dead_peer_bytes": ("Memory of prefills that have ended, still mapped by this decode.", ()),
    "loans": ("Leases that this decode holds.", ()),
    "borrowed_blocks": ("Blocks of prefills' memory in this decode's prefix cache.", ()),
    "requests_with_ticket": ("Requests of this decode that came with a ticket and have not ended.", ()),
}
READINGS = (
    Reading("leases", ("offered",), lambda counts: counts.offered_leases),
    Reading("leases", ("held",), lambda counts: counts.held_leases),
    Reading("lent_blocks", (), lambda counts: counts.lent_blocks),
    Reading("lent_share", (), lambda counts: counts.lent_blocks / max(1, counts.num_blocks)),
    Reading("decodes", (), lambda counts: counts.decodes),
    Reading("peers", ("connecting",), lambda counts: counts.connecting_peers),
    Reading("peers", ("mapping",), lambda counts: counts.mapping_peers),
    Reading("peers", ("ready",), lambda counts: counts.ready_peers),
    Reading("peers", ("gone",), lambda counts: counts.gone_peers),
    Reading("peers", ("failed",), lambda counts: counts.failed_peers),
    Reading("dead_peer_bytes", (), lambda counts: counts.dead_peer_bytes),
    Reading("loans", (), lambda counts: counts.loans),
    Reading("borrowed_blocks", (), lambda counts: counts.borrowed_blocks),
    Reading("requests_with_ticket", (), lambda counts: counts.handoffs),
)


def ask(path: Path, timeout_seconds: float) -> EngineCounts:
    """One engine's numbers. Blocks up to the timeout.

    Raises:
        PeerUnreachableError: nobody listens there, or no answer in time.
        PeerRefusedError, ProtocolError: it is of another version, or answered what the protocol does not allow.
        OSError: it did not take the question.
    """
    return expect(channel.ask(path, CountsHello(PROTOCOL_VERSION), timeout_seconds), EngineCounts)


class _Engine:
    """What the front end knows of one engine. Any thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        """Held while the engine is asked: who reads at the same time waits for the same answer."""
        self._socket_id: str | None = None
        self._counts: EngineCounts | None = _NOTHING
        self._valid_until = 0.0

    def meet(self, socket_id: str) -> None:
        """It has counted something, and listens there. Never waits."""
        if socket_id != self._socket_id:
            self._socket_id, self._valid_until = socket_id, 0.0

    def counts(self) -> EngineCounts | None:
        """Its numbers, at most :data:`FRESH_SECONDS` old; None when it does not answer."""
        with self._lock:
            socket_id = self._socket_id
            if socket_id is not None and time.monotonic() >= self._valid_until:
                self._counts = self._ask(socket_id)
                patience = PATIENCE_SECONDS if self._counts is None else FRESH_SECONDS
                self._valid_until = time.monotonic() + patience
            return self._counts

    def _ask(self, socket_id: str) -> EngineCounts | None:
        try:
            return ask(socket_path(self._directory, socket_id), ANSWER_SECONDS)
        except PeerUnreachableError as error:
            if error.errno in _NOBODY:
                return _NOTHING
            problem: Exception = error
        except (MC2Error, OSError) as error:
            problem = error
        logger.debug("an engine does not say what it holds: %s", problem)
        return None


class EngineGauges:
    """The gauges of all engines of one front end."""

    def __init__(
        self,
        directory: Path,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Registers them. ``directory``: where the engines listen."""
        self._engines = {index: _Engine(directory) for index in per_engine_labelvalues}
        gauge_cls: Any = metric_types[Gauge]
        # Several API servers share their values through files, which nobody computes anything for (prometheus_client's
        # multi-process mode); a class of somebody else's may know no set_function.
        computes = gauge_cls is Gauge and "PROMETHEUS_MULTIPROC_DIR" not in os.environ
        self._to_set: list[tuple[Any, Callable[[], float]]] = []
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None
        gauges = {
            name: gauge_cls(
                name=f"vllm:mc2_{name}",
                documentation=text,
                labelnames=[*labelnames, *labels],
                multiprocess_mode="mostrecent",
            )
            for name, (text, labels) in TEXTS.items()
        }
        for index, base in per_engine_labelvalues.items():
            for reading in READINGS:
                child = gauges[reading.name].labels(*base, *reading.labels)
                read = partial(self._read, index, reading)
                if computes:
                    child.set_function(read)
                else:
                    child.set(0)
                    self._to_set.append((child, read))

    def meet(self, engine_index: int, socket_id: str) -> None:
        """An engine has counted something, and listens there. Never waits; one thread."""
        self._engines[engine_index].meet(socket_id)
        if not self._to_set:
            return
        self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_setting, name="mc2-gauges", daemon=True)
            self._thread.start()

    def _read(self, engine_index: int, reading: Reading) -> float:
        counts = self._engines[engine_index].counts()
        return float("nan") if counts is None else float(reading.value(counts))

    def _keep_setting(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            values = [read() for _, read in self._to_set]
            for (child, _), value in zip(self._to_set, values, strict=True):
                child.set(value)
            if any(values):
                self._wanted.set()
                time.sleep(REFRESH_SECONDS)
