"""``vllm-mc2 selftest --device npu``: the data path of a hand-over between two processes on real devices, point by point.

No vLLM and no model: processes of :mod:`vllm_mc2.ascend.selftest_side` share, map, copy, and are killed. Each point says pass or
fail with what was seen, so that a line of the output can be pasted into a report.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from vllm_mc2.ascend.calls import receive, send
from vllm_mc2.ascend.doctor import ascend_findings
from vllm_mc2.findings import Finding, State

NUM_BLOCKS = 64
NUM_PULLED = 24
NUM_REPEATS = 20
CALL_SECONDS = 120.0
NOISE_BYTES = 64 << 20
"""What other things on a device, such as the first copy's queues, may keep."""


class SideError(Exception):
    """What a side said, or that it says nothing any more."""


class RemoteSide:
    """A process that does as it is told. ``close`` ends it in order, ``kill`` does not."""

    def __init__(self, device: int) -> None:
        self._sock, theirs = socket.socketpair()
        self._sock.settimeout(CALL_SECONDS)
        with theirs:
            command = [sys.executable, "-m", "vllm_mc2.ascend.selftest_side", str(theirs.fileno()), str(device)]
            # As vllm-ascend sets it, unless somebody has chosen.
            environment = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True", **os.environ}
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)

    def call(self, name: str, *arguments: Any) -> Any:
        """What the method answers.

        Raises:
            SideError: it failed, or the process is gone.
        """
        self.begin(name, *arguments)
        return self.answer()

    def begin(self, name: str, *arguments: Any) -> None:
        """Send a call, whose answer :meth:`answer` will wait for."""
        try:
            send(self._sock, [name, arguments])
        except OSError as error:
            raise SideError(f"the process is gone ({error})") from error

    def answer(self) -> Any:
        """Of the call that was begun."""
        try:
            answer = receive(self._sock)
        except OSError as error:
            raise SideError(f"no answer in {CALL_SECONDS:.0f} s ({error})") from error
        if answer is None:
            raise SideError(f"the process ended with code {self._process.wait(CALL_SECONDS)}")
        outcome, value = answer
        if outcome != "ok":
            raise SideError(str(value))
        return value

    def kill(self) -> None:
        """SIGKILL."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._sock.close()

    def close(self) -> None:
        """End; kills what does not."""
        self._sock.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class SelfTest:
    """Runs the points in order. A point that fails takes with it only those that need it."""

    def __init__(self, prefill_device: int, decode_device: int, report: Callable[[Finding], None]) -> None:
        """``report`` is called with each finding as soon as it is there."""
        self._devices = prefill_device, decode_device
        self._report = report
        self._sides: list[RemoteSide] = []
        self._random = random.Random(1)  # noqa: S311  (block tables, not secrets)
        self._way = ""
        self._grant = b""

    def run(self) -> bool:
        """Whether nothing failed."""
        is_good = True

        def note(finding: Finding) -> bool:
            nonlocal is_good
            self._report(finding)
            is_good = is_good and finding.state != "fail"
            return finding.state != "fail"

        try:
            for finding in ascend_findings():
                note(finding)
            points = (
                ("share", self._share), ("map", self._map), ("only who is admitted", self._strangers),
                ("pull, bytes equal", self._pull), ("map and unmap again", self._repeat),
                ("orderly stop", self._stop), ("decode killed", self._decode_killed),
                ("prefill killed", self._prefill_killed), ("attach", self._attach),
            )  # fmt: skip
            for name, point in points:
                if not note(self._try(name, point)) and name in {"share", "map"}:
                    note(Finding("the rest", "skip", f"needs {name!r}"))
                    break
        finally:
            for side in self._sides:
                side.close()
        return is_good

    def _try(self, name: str, point: Callable[[], tuple[State, str]]) -> Finding:
        try:
            state, detail = point()
        except (SideError, subprocess.SubprocessError) as error:
            return Finding(name, "fail", str(error))
        return Finding(name, state, detail)

    def _side(self, device: int, *, is_prefill: bool) -> RemoteSide:
        side = RemoteSide(device)
        self._sides.append(side)
        side.call("allocate", NUM_BLOCKS, is_prefill)
        return side

    def _new_prefill(self) -> None:
        self._prefill = self._side(self._devices[0], is_prefill=True)
        self._way, self._passed_over, self._grant = self._prefill.call("share")

    def _new_decode(self) -> RemoteSide:
        side = self._side(self._devices[1], is_prefill=False)
        self._meet(side)
        return side

    def _meet(self, decode: RemoteSide) -> None:
        self._prefill.call("admit", decode.call("pid"))
        decode.call("map_peer", self._grant)

    def _pull_some(self, side: RemoteSide) -> tuple[int, float]:
        """Wrong blocks, and GB/s."""
        own = self._random.sample(range(NUM_BLOCKS), NUM_PULLED)
        peer = self._random.sample(range(NUM_BLOCKS), NUM_PULLED)
        started = time.perf_counter()
        num_bytes = side.call("pull", own, peer)
        took = time.perf_counter() - started
        return side.call("wrong_blocks", own, peer), num_bytes / took / 1e9

    def _share(self) -> tuple[State, str]:
        self._new_prefill()
        passed = f"; not by {'; '.join(self._passed_over)}" if self._passed_over else ""
        return "pass", f"device {self._devices[0]} by {self._way}{passed}"

    def _map(self) -> tuple[State, str]:
        self._decode = self._new_decode()
        where = "the same device" if self._devices[0] == self._devices[1] else f"device {self._devices[1]}"
        return "pass", f"by another process on {where}"

    def _strangers(self) -> tuple[State, str]:
        if self._way == "torch_npu":
            return (
                "skip",
                "torch_npu's handles carry no list of processes: whoever learns one on this host can import it",
            )
        stranger = self._side(self._devices[1], is_prefill=False)
        try:
            stranger.call("map_peer", self._grant)
        except SideError as error:
            return "pass", f"a process that prefill has not admitted is refused: {error}"
        finally:
            stranger.close()
        return "fail", "a process that prefill has not admitted could map its memory"

    def _pull(self) -> tuple[State, str]:
        results = [self._pull_some(self._decode) for _ in range(5)]
        wrong = sum(each for each, _ in results)
        best = max(speed for _, speed in results)
        detail = f"5 times {NUM_PULLED} blocks by random block tables, {wrong} wrong, up to {best:.2f} GB/s with the call's cost"
        return "fail" if wrong else "pass", detail

    def _repeat(self) -> tuple[State, str]:
        before = self._decode.call("free_bytes")
        wrong = 0
        for _ in range(NUM_REPEATS):
            self._decode.call("unmap_peer")
            self._decode.call("map_peer", self._grant)
            wrong += self._pull_some(self._decode)[0]
        lost = before - self._decode.call("free_bytes")
        detail = (
            f"{NUM_REPEATS} times, {wrong} wrong blocks, {max(0, lost) / 2**20:.0f} MiB of the device not given back"
        )
        return "fail" if wrong or lost > NOISE_BYTES else "pass", detail

    def _stop(self) -> tuple[State, str]:
        self._decode.call("unmap_peer")
        self._prefill.call("end_sharing")
        self._decode.close()
        self._prefill.close()
        return "pass", "decode unmapped, then prefill ended its sharing"

    def _decode_killed(self) -> tuple[State, str]:
        self._new_prefill()
        victim = self._new_decode()
        victim.begin("pull", list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS)))
        victim.kill()
        wrong, _ = self._pull_some(self._new_decode())
        return ("fail" if wrong else "pass"), f"prefill serves the next decode, {wrong} wrong blocks"

    def _prefill_killed(self) -> tuple[State, str]:
        decode = self._new_decode()
        self._prefill.kill()
        try:
            wrong, _ = self._pull_some(decode)
            seen = f"its memory could still be read, {wrong} wrong blocks (which decode does not believe in any case)"
        except SideError as error:
            seen = f"reading its memory fails: {error}"
        decode.call("unmap_peer")
        self._new_prefill()
        self._meet(decode)
        wrong, _ = self._pull_some(decode)
        return ("fail" if wrong else "pass"), f"{seen}; decode goes on with the next prefill, {wrong} wrong blocks"

    def _attach(self) -> tuple[State, str]:
        decode = self._side(self._devices[1], is_prefill=False)
        self._prefill.call("admit", decode.call("pid"))
        refused = decode.call("try_attach", self._grant)
        if refused:
            return "info", f"own and imported memory cannot be read through one table, as documented: {refused}"
        return "info", "a kernel reads own and imported memory through one table, which the documentation rules out"
