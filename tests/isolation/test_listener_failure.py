"""D25, its last part: when a bug ends the thread that serves sessions, that is seen, and nobody reads wrong bytes for it."""

import socket
from pathlib import Path
from typing import Any

from tests.isolation.conftest import Cell, StartEngine
from tests.support.fake_model import expected_tokens, prompt_of_family

PROMPT, OTHER = prompt_of_family(1, 70), prompt_of_family(2, 70)
LONG = 400


def break_listener(prefill: Cell, shared: Path, params: dict[str, Any]) -> None:
    """The next frame ends prefill's session thread by a bug."""
    prefill.ask("break_sessions")
    path = shared / f"{params['mc2_ticket']['incarnation'][:16]}.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(50)
        sock.connect(str(path))
        sock.sendall(b"\1\0\0\0x")
        assert sock.recv(1) == b""
    prefill.wait_until(lambda: not path.exists())


def test_what_is_held_stays_held(start: StartEngine, shared: Path) -> None:
    """Decode is alive and reads prefill's blocks: an end of its session that is our fault must not give them to others."""
    prefill = start("kv_producer", container=False, wait=False)
    decode = start("kv_consumer", container=False)
    prefill.wait_until(lambda: prefill.ready)
    params = prefill.prefill("r", PROMPT)
    decode.add("r", PROMPT, params, LONG)
    decode.wait_until(lambda: decode.ask("report")["snapshot"]["borrowed_blocks"])
    break_listener(prefill, shared, params)
    text = prefill.log.read_text()
    assert text.count("restart this engine") == 1 and "ZeroDivisionError: a bug of ours" in text
    # Whatever prefill takes for free, it overwrites.
    for number in range(10):
        prefill.tell("churn")
        prefill.run(f"tick {number}", [1, 2, 3], None, 1)
    assert prefill.ask("report")["book"] == 1
    assert decode.result("r")["tokens"] == expected_tokens(PROMPT, LONG)
    # The lease ends as ever: by what decode writes into its ledger. And the engine computes what it is asked.
    report = prefill.settle()
    assert "leases_ended|peer_gone" not in report["stats"]
    decode.settle()


def test_no_tickets_are_given_out_for_which_nobody_could_come(start: StartEngine, shared: Path) -> None:
    prefill = start("kv_producer", container=False)
    params = prefill.prefill("before", PROMPT)
    break_listener(prefill, shared, params)
    assert prefill.run("after", OTHER, {"do_remote_decode": True}, 1)["params"] is None
    assert "gets no ticket: decodes cannot reach this engine any more" in prefill.log.read_text()
