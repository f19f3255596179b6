"""D24, what tests/connector/test_refusals.py leaves: fields of ten million ids or characters, or nested, cost one request."""

import re
from pathlib import Path

from tests.isolation.conftest import Cell, StartEngine
from tests.support.fake_model import prompt_of_family

PROMPT = prompt_of_family(1, 70)
HARMLESS = {"ids beside the ticket", "a long host"}
"""What is not in the ticket itself is not looked at on one host."""

BAD = {"ids for a ticket", "ids in a ticket", "a long slot", "a long path", "nesting"}


def private_mib(cell: Cell) -> int:
    text = Path(f"/proc/{cell.host_pid}/smaps_rollup").read_text()
    return sum(int(kib) for kib in re.findall(r"^Private_\w+:\s+(\d+)", text, re.MULTILINE)) >> 10


def test_huge_fields_cost_their_own_request_only(start: StartEngine) -> None:
    prefill = start("kv_producer", container=False, wait=False)
    decode = start("kv_consumer", container=False)
    prefill.wait_until(lambda: prefill.ready)
    result = decode.run("before", PROMPT, prefill.prefill("before", PROMPT))
    assert result["params"]["mc2"]["way"] == "attach"
    before = private_mib(decode)
    for number, kind in enumerate(sorted(BAD | HARMLESS)):
        prompt = prompt_of_family(10 + number, 70)
        good = prefill.prefill(kind, prompt)
        decode.ask("add_huge", kind=kind, id=kind, prompt=prompt, params=good, max_tokens=4)
        result = decode.result(kind)
        expected = ("recompute", "bad_ticket") if kind in BAD else ("attach", "")
        assert (result["params"]["mc2"]["way"], result["params"]["mc2"]["reason"] or "") == expected, kind
        if kind in BAD:  # which has used up nothing
            prompt_again = decode.run(kind + " again", prompt, good)
            assert prompt_again["params"]["mc2"]["way"] == "attach"
    # Nothing of them is kept, and no line of the log has them in full.
    assert private_mib(decode) - before < 64
    assert max(len(line) for line in decode.log.read_text().splitlines()) < 2000
    prefill.settle()
    decode.settle()
