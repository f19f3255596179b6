"""A round in motion: the controller plays the proxy, strikes the faults, and judges every request that ends.

Everything that must have happened by the round's deadline and has not is a hang.
"""

import heapq
import itertools
import signal
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.chaos.fleet import Fleet, Member
from tests.chaos.plan import Fault, Job, Plan, Send, Strike
from tests.chaos.points import Armed
from tests.chaos.tally import Tally
from tests.support.fake_model import expected_tokens, prompt_of_family
from tests.support.processes import Message

ROUND_SECONDS = 90.0
SLEEPER_WAIT_SECONDS = 0.05
_PREFILL_PARAMS = {"do_remote_decode": True, "do_remote_prefill": False}


class Outstanding(NamedTuple):
    """A request that has not ended."""

    member: Member
    prompt: Sequence[int]
    max_tokens: int
    then: Callable[[Message], None] | None
    """What the proxy does with a prefill's answer."""
    kind: str


class Drive:
    """Runs one plan up to the point where nothing is going on any more."""

    def __init__(self, fleet: Fleet, plan: Plan, tally: Tally, log: Callable[[str], None]) -> None:
        self.fleet = fleet
        self.plan = plan
        self.tally = tally
        self.log = log
        self.aborted: set[str] = set()
        self.outstanding: dict[str, Outstanding] = {}
        self._faults = {fault.id: fault for fault in plan.faults}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._revivals: dict[str, Strike] = {}
        self._num_waiting = 0
        """Engines that are stopped or dead for a while."""
        fleet.on_message = self._on_message
        fleet.on_death = self._on_death

    # --- the loop ---

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), action))

    def run(self) -> bool:
        """False when something hangs."""
        deadline = time.monotonic() + ROUND_SECONDS
        if not self._prepare(deadline):
            return self._hang()
        for job_number, job in enumerate(self.plan.jobs):
            self.after(job.start_ms / 1000, lambda n=job_number, j=job: self._start_job(n, j))  # type: ignore[misc]
        for number, (name, at_ms) in enumerate(self.plan.pokes):
            self.after(at_ms / 1000, lambda n=number, m=name: self._poke(n, m))  # type: ignore[misc]
        for fault in self.plan.faults:
            if not fault.point:
                self.after(fault.at_ms / 1000, lambda f=fault: self._strike(f.strike, "timed"))  # type: ignore[misc]
        while self.is_busy:
            self.turn(deadline)
            if time.monotonic() >= deadline:
                return self._hang()
        return self._disarm(deadline) or self._hang()

    @property
    def is_busy(self) -> bool:
        """Whether anything is still to come."""
        closing = any(member.alive and member.may_end for member in self.fleet.members.values())
        return bool(self._timers or self.outstanding or self._num_waiting or closing)

    def turn(self, deadline: float) -> None:
        """Let the next thing happen."""
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        next_time = min(deadline, self._timers[0][0] if self._timers else deadline)
        self.fleet.pump(min(next_time - time.monotonic(), 0.5))

    def _prepare(self, deadline: float) -> bool:
        for name in self.plan.fresh:
            member = self.fleet.members.get(name)
            if member is not None and member.alive:
                self._close(member)
        while any(member.may_end for member in self.fleet.alive):
            self.turn(deadline)
            if time.monotonic() >= deadline:
                return False
        for name, spec in self.plan.members.items():
            member = self.fleet.members.get(name)
            if member is None or not member.alive:
                member = self.fleet.start(name, spec)
            self._begin(member, self._armed_for(name))
        return True

    def _armed_for(self, name: str) -> list[Armed]:
        return [
            Armed(f.id, f.point, f.nth, f.before, f.strike.action, f.strike.ms, f.strike.sleeper)
            for f in self.plan.faults
            if f.point and f.strike.target == name
        ]

    def _begin(self, member: Member, armed: list[Armed]) -> None:
        armed_dicts = [fault._asdict() for fault in armed]
        member.pipe.send(
            {"op": "begin", "armed": armed_dicts, "churns": self.plan.churns, "offer_seconds": self.plan.offer_seconds}
        )

    def _disarm(self, deadline: float) -> bool:
        """No point strikes any more; what struck in the last moment is waited for."""
        for member in self.fleet.alive:
            member.pipe.send({"op": "disarm"})
        for member in self.fleet.alive:
            while self.fleet.ask(member, time.monotonic() + 0.2, "report") is None and member.alive:
                self.turn(deadline)
                if time.monotonic() >= deadline:
                    return False
        while self.is_busy:
            self.turn(deadline)
            if time.monotonic() >= deadline:
                return False
        return True

    def _hang(self) -> bool:
        for request_id, request in self.outstanding.items():
            self.tally.add("hangs", f"request {request_id} ({request.kind}) on {request.member.name} never ended")
        for member in self.fleet.alive:
            if member.may_end:
                self.tally.add("hangs", f"{member.name} does not end")
        if not self.outstanding:
            self.tally.add("hangs", "the round did not come to rest")
        for member in self.fleet.alive:
            member.signal(signal.SIGUSR1)  # stacks of all threads, into its log
        self.fleet.pump(0.2)
        return False

    # --- requests ---

    def _start_job(self, number: int, job: Job) -> None:
        prompt = prompt_of_family(job.family, job.length, number, job.suffix_length)
        member = self.fleet.members[job.prefill]
        request_id = f"{self.plan.round}.{number}.p"

        def hand_over(answer: Message) -> None:
            for index, send in enumerate(job.sends):
                name = f"{self.plan.round}.{number}.d{index}"
                self.after(
                    send.delay_ms / 1000,
                    lambda n=name, s=send: self._send(n, s, prompt, answer["params"]),  # type: ignore[misc]
                )

        self.add(member, request_id, prompt, _PREFILL_PARAMS, 1, "prefill leg", then=hand_over)

    def _poke(self, number: int, name: str) -> None:
        self.add(self.fleet.members[name], f"{self.plan.round}.poke{number}", [number + 7], None, 1, "tick")

    def _send(self, request_id: str, send: Send, prompt: list[int], params: Message | None) -> None:
        prompt = list(prompt)
        if send.kind == "longer":
            prompt += prompt_of_family(5, 20)
        elif send.kind == "other":
            prompt[len(prompt) // 2] += 1
        elif send.kind == "plain":
            params = None
        elif send.kind == "damaged" and params is not None:
            token = params["mc2_ticket"]["token"]
            params = {**params, "mc2_ticket": {**params["mc2_ticket"], "token": token[::-1]}}
        member = self.fleet.members[send.decode]
        is_gone = send.kind == "gone"
        if is_gone:
            self.aborted.add(request_id)
        self.add(member, request_id, prompt, params, send.max_tokens, send.kind, is_gone=is_gone)

    def add(
        self,
        member: Member,
        request_id: str,
        prompt: Sequence[int],
        params: Message | None,
        max_tokens: int,
        kind: str,
        *,
        then: Callable[[Message], None] | None = None,
        is_gone: bool = False,
    ) -> None:
        """Send a request to an engine; one that is dead refuses the connection, and the client is told so."""
        if not member.alive or member.may_end:
            return
        self.outstanding[request_id] = Outstanding(member, prompt, max_tokens, then, kind)
        member.pipe.send(
            {
                "op": "add",
                "id": request_id,
                "prompt": prompt,
                "params": params,
                "max_tokens": max_tokens,
                "gone": is_gone,
            }
        )

    def _on_message(self, member: Member, message: Message) -> None:
        match message["type"]:
            case "finished":
                self._on_finished(member, message)
            case "strike":
                self._on_strike(member, message["fault"], message["point"])
            case "wrong":
                self.tally.add("wrong_bytes", f"{member.name}: {message['what']}")
            case "reset":
                self.tally.resets["done" if message["done"] else "refused by vLLM"] += 1
            case "crash":
                self.tally.add("hangs", f"{member.name} crashed:\n{message['trace']}")

    def _on_finished(self, member: Member, message: Message) -> None:
        request = self.outstanding.pop(message["id"], None)
        if request is None:
            self.tally.add("hangs", f"{member.name}: request {message['id']} ended twice, or is nobody's")
            return
        expected = expected_tokens(request.prompt, request.max_tokens)
        tokens, reason = message["tokens"], message["reason"]
        where = f"request {message['id']} ({request.kind}) on {member.name}"
        if tokens != expected[: len(tokens)]:
            first = next(i for i, (a, b) in enumerate(zip(tokens, [*expected, None], strict=False)) if a != b)
            detail = f"token {first} of {len(tokens)} is wrong, prompt of {len(request.prompt)}"
            self.tally.add("wrong_bytes", f"{where}: {detail}, report {message['params']}")
        elif reason == "length" and len(tokens) != len(expected):
            self.tally.add("wrong_bytes", f"{where}: ended after {len(tokens)} of {len(expected)} tokens")
        elif reason == "error":
            if member.spec.policy != "fail" or request.kind in ("prefill leg", "plain", "tick"):
                self.tally.add("hangs", f"{where} was failed, though its policy is {member.spec.policy}")
        elif reason not in ("length", "abort"):
            self.tally.add("hangs", f"{where} ended as {reason}")
        report = (message["params"] or {}).get("mc2")
        if request.kind not in ("prefill leg", "tick"):
            way = f"{report['way']} {report['reason'] or ''}" if report else f"({reason})"
            self.tally.ways[way.strip()] += 1
        if request.then is not None and reason == "length":
            request.then(message)

    # --- faults ---

    def _on_strike(self, member: Member, fault_id: int, point: str) -> None:
        """A point was reached; the engine strikes itself, the rest is ours."""
        self.tally.points[point] += 1
        fault = self._faults.get(fault_id)
        if fault is None:
            member.may_end = True
            self.tally.faults["kill at start"] += 1
            self.log(f"    {member.name} killed while starting, at {point}")
            return
        self.log(f"    struck: {fault.describe()}")
        self.tally.faults[f"{fault.strike.action} at a point"] += 1
        self._follow(member, fault)
        if fault.then is not None:
            self._strike(fault.then, "meanwhile")

    def _follow(self, member: Member, fault: Fault) -> None:
        strike = fault.strike
        if strike.action == "kill":
            member.may_end = True
            if strike.ms:
                self._revivals[member.name] = strike
        elif strike.action == "stop":
            self._continue_later(member, strike.ms)

    def _strike(self, strike: Strike, when: str) -> None:
        member = self.fleet.members[strike.target]
        if not member.alive or member.may_end:
            return
        label = f"{strike.action}{' with sleeper' if strike.sleeper else ''} {when}"
        self.tally.faults[label] += 1
        self.log(f"    {label}: {strike.target}")
        match strike.action:
            case "kill":
                self._kill(member, strike)
            case "restart":
                self._revivals[member.name] = strike
                self._close(member)
            case "stop":
                member.signal(signal.SIGSTOP)
                self._continue_later(member, strike.ms)
            case "abort":
                member.pipe.send({"op": "abort"})
            case "reset":
                member.pipe.send({"op": "reset", "running": strike.running})
            case "churn":
                member.pipe.send({"op": "churn"})

    def _close(self, member: Member) -> None:
        """Shut down in order; requests on it are lost, as with any server."""
        member.may_end = True
        member.pipe.send({"op": "close"})

    def _kill(self, member: Member, strike: Strike) -> None:
        if strike.ms:
            self._revivals[member.name] = strike
        if not strike.sleeper:
            member.may_end = True
            member.signal(signal.SIGKILL)
            return
        member.pipe.send({"op": "sleeper"})
        limit = time.monotonic() + SLEEPER_WAIT_SECONDS

        def kill_when_left() -> None:
            if member.has_sleeper or time.monotonic() > limit:
                member.may_end = True
                if member.alive:
                    member.signal(signal.SIGKILL)
            else:
                self.after(0.002, kill_when_left)

        kill_when_left()

    def _continue_later(self, member: Member, ms: int) -> None:
        self._num_waiting += 1
        member.is_stopped = True
        tries = itertools.count()

        def go_on() -> None:
            if self.fleet.continue_member(member) or next(tries) > 200:
                self._num_waiting -= 1
            else:
                self.after(0.005, go_on)

        self.after(ms / 1000, go_on)

    def _on_death(self, member: Member) -> None:
        if not member.may_end:
            code = self.fleet.zygote.exit_code(member.pid)
            self.tally.add("hangs", f"{member.name} ended by itself with {code}; log {member.log}")
        lost = [request_id for request_id, request in self.outstanding.items() if request.member is member]
        for request_id in lost:
            del self.outstanding[request_id]
        strike = self._revivals.pop(member.name, None)
        if strike is not None:
            self._num_waiting += 1
            self.after(strike.ms / 1000 if strike.action == "kill" else 0.0, lambda: self._revive(member, strike))

    def _revive(self, old: Member, strike: Strike) -> None:
        self._num_waiting -= 1
        armed = (strike.start_fault,) if strike.start_fault is not None else ()
        member = self.fleet.start(old.name, self.plan.members.get(old.name, old.spec), armed)
        if not armed:  # "begin" would disarm it
            self._begin(member, [])
