"""An engine process: a rig engine that steps by itself while it has requests, and serves the controller's commands.

It behaves like vLLM's engine core: asleep when there is nothing to do, woken by a command, one step at a time otherwise.
Faults that were armed strike in the middle of that. Everything that ends is reported at once, without being asked.
"""

import faulthandler
import functools
import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig

from tests.chaos import points
from tests.chaos.footprint import footprint
from tests.chaos.pages import PageWatch
from tests.connector import rig
from tests.support.processes import Message, Pipe
from vllm_mc2.session import SessionServer

SLEEPER_SECONDS = 120
CRASHED = 70


def check_points() -> None:
    """Raises when the list of points does not fit the code."""
    for name in points.ALL_POINTS:
        points.resolve(name)


class EngineProcess:
    """The loop and the commands."""

    def __init__(self, pipe: Pipe, model: Path, spec: dict[str, Any]) -> None:
        self._pipe = pipe
        self._sockets: list[str] = []
        self._known: set[str] = set()
        self._steps = 0
        self._closing = False
        self._churns = False
        self._record_sockets()
        self._points = points.Points(
            lambda fault: self._tell(type="strike", fault=fault.id, point=fault.point), self._leave_sleeper
        )
        self._points.install()
        self._points.arm([points.Armed(**fault) for fault in spec["armed"]])
        self._pages = PageWatch(lambda **problem: self._tell(type="wrong", **problem))
        # The rig leaves the engine id to vLLM; a restarted server keeps its own.
        with_engine_id = functools.partial(KVTransferConfig, engine_id=spec["engine_id"])
        setattr(rig, "KVTransferConfig", with_engine_id)  # noqa: B010
        extra = {key: value for key, value in spec["extra"].items() if value is not None}
        self._engine = rig.RigEngine(
            model,
            Path(spec["directory"]),
            spec["role"],
            num_blocks=spec["num_blocks"],
            policy=spec["policy"],
            extra=extra,
            max_num_batched_tokens=spec["max_num_batched_tokens"],
        )
        self._pages.watch(self._engine)
        start = footprint(os.getpid())
        assert start is not None
        self._tell(
            type="ready",
            sockets=self._sockets,
            fds=start.fds,
            threads=start.threads,
            maps=[[*mapping, count] for mapping, count in start.maps.items()],
        )

    def _record_sockets(self) -> None:
        init = SessionServer.__init__

        def wrapper(server: SessionServer, *args: Any, **kwargs: Any) -> None:
            init(server, *args, **kwargs)
            self._sockets.append(server.path.name)

        SessionServer.__init__ = wrapper  # type: ignore[method-assign, assignment]

    def _tell(self, **message: Any) -> None:
        self._pipe.send(message)

    # --- the loop ---

    def run(self) -> None:
        """Until ``close``, or the controller is gone."""
        while not self._closing:
            is_busy = self._engine.scheduler.has_requests()
            if select.select([self._pipe], [], [], 0 if is_busy else None)[0]:
                message, _fds = self._pipe.receive()
                if message is None:
                    return
                self._serve(message)
            elif is_busy:
                self._step()
        self._engine.close()

    def _step(self) -> None:
        self._steps += 1
        if self._engine.step() == 0:
            time.sleep(0.001)
        if self._pages.take_ended() and self._churns:
            self._churn()
        self._report_finished()

    def _report_finished(self) -> None:
        for request_id in list(self._engine.finished):
            tokens, reason, params = self._engine.finished.pop(request_id)
            self._forget(request_id)
            computed = self._engine.num_computed_prompt_tokens.pop(request_id, 0)
            self._tell(
                type="finished", id=request_id, tokens=tokens, reason=str(reason), params=params, computed=computed
            )

    def _forget(self, request_id: str) -> None:
        self._known.discard(request_id)
        self._engine._outputs.pop(request_id, None)
        self._engine._tables.pop(request_id, None)

    # --- commands ---

    def _serve(self, message: Message) -> None:
        getattr(self, "_do_" + message["op"])(message)

    def _do_add(self, message: Message) -> None:
        request_id, gone = message["id"], message["gone"]
        self._known.add(request_id)
        more = {"abort_immediately": True} if gone else {}
        self._engine.add(request_id, message["prompt"], message["params"], max_tokens=message["max_tokens"], **more)
        if gone:
            self._do_abort({"id": request_id})

    def _do_abort(self, message: Message) -> None:
        """The id, or the oldest request here when there is none."""
        request_id = message.get("id") or next(iter(self._engine.scheduler.requests), None)
        if request_id not in self._known:
            return
        self._engine.abort(request_id)
        tokens = list(self._engine._outputs.get(request_id, []))
        self._forget(request_id)
        self._tell(type="finished", id=request_id, tokens=tokens, reason="abort", params=None, computed=0)

    def _do_begin(self, message: Message) -> None:
        """A round begins."""
        self._points.arm([points.Armed(**fault) for fault in message["armed"]])
        self._churns = message["churns"]
        self._pages.offer_seconds = message["offer_seconds"]
        self._engine.stats.clear()

    def _do_disarm(self, message: Message) -> None:
        self._points.arm([])

    def _do_reset(self, message: Message) -> None:
        """What vLLM's engine core does for ``/reset_prefix_cache``; it passes a failure on to the caller."""
        try:
            done = self._engine.scheduler.reset_prefix_cache(reset_running_requests=message["running"])
        except RuntimeError as error:
            if "Failed to reset KV cache" not in str(error):
                raise
            done = False
        self._tell(type="reset", done=done)

    def _do_churn(self, message: Message) -> None:
        self._churn()

    def _churn(self) -> None:
        """What a huge request does: every free block is taken, overwritten and given back."""
        pool = self._engine.scheduler.kv_cache_manager.block_pool
        blocks = pool.get_new_blocks(pool.get_num_free_blocks())
        ids = [block.block_id for block in blocks]
        for tensor in self._engine.kv.values():
            tensor[ids] = -1.0
        pool.free_blocks(blocks)

    def _do_sleeper(self, message: Message) -> None:
        self._leave_sleeper()

    def _leave_sleeper(self) -> None:
        """A forked child that outlives this process and keeps its sockets and memory open."""
        pid = os.fork()
        if pid == 0:
            signal.alarm(SLEEPER_SECONDS)
            self._pipe.close()
            while True:
                signal.pause()
        self._tell(type="sleeper")

    def _do_report(self, message: Message) -> None:
        """The state of the books; also checks the pages of live leases."""
        engine = self._engine
        decode, prefill = engine.connector._decode, engine.connector._prefill
        pool = engine.scheduler.kv_cache_manager.block_pool
        self._pages.check_live()
        self._tell(
            type="reply",
            seq=message["seq"],
            used_blocks=len(pool.blocks) - 1 - pool.get_num_free_blocks(),
            book=len(prefill.book) if prefill is not None else 0,
            snapshot=decode.snapshot() if decode is not None else {},
            requests=list(engine.scheduler.requests),
            known=sorted(self._known),
            stats={key: value for key, value in engine.stats.items() if key.startswith(("handoffs|", "leases"))},
            steps=self._steps,
        )

    def _do_close(self, message: Message) -> None:
        self._closing = True


def serve(pipe: Pipe, model: Path, spec: dict[str, Any]) -> int:
    """Run one engine in this process; its exit code."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        EngineProcess(pipe, model, spec).run()
    except BaseException:
        # Process border: whatever ended the engine is the finding.
        trace = traceback.format_exc()
        print(trace, file=sys.stderr, flush=True)
        pipe.send({"type": "crash", "trace": trace[-4000:]})
        return CRASHED
    return 0
