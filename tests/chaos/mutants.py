"""Proof that the harness can fail: copies of the package with one bug each, and which counter finds it.

``python -m tests.chaos.mutants [NAME ...]``; exit code 1 when a bug is not found.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import vllm_mc2
import vllm_mc2._native
from tests.chaos.fleet import ROOT

ROUNDS = 150


class Mutant(NamedTuple):
    """A bug: ``old`` in ``file`` becomes ``new``."""

    file: str
    old: str
    new: str


MUTANTS = {
    "decode releases a lease while a block of it is still read": Mutant(
        "connector/borrowed.py",
        "                block.lingering += (loan,)\n                loan.lingering.add(block_id)\n",
        "                pass\n",
    ),
    "decode releases before its blocks leave the prefix cache": Mutant(
        "connector/borrowed.py",
        "            compat.leave_prefix_cache(self._pool, block)\n            if block.ref_cnt == BIAS:\n"
        "                self._forget(block)\n",
        "            if block.ref_cnt == BIAS:\n                self._let_go(block)\n",
    ),
    "prefill does not pin what it lends": Mutant(
        "connector/prefill.py", "        self._block_pool.touch(blocks)\n", "        blocks = []\n"
    ),
    "prefill keeps what a dead decode held": Mutant(
        "connector/prefill.py", "self.book.drop_ledger(ledger[0])", "id(ledger[0])"
    ),
    "decode keeps a dead prefill mapped": Mutant(
        "memory.py",
        "            self._range.unmap(self.plan.block_offset(mine, base), layout.region_bytes(theirs))\n",
        "            pass\n",
    ),
    "decode never gives a lease back": Mutant("leases.py", "        self._reader.release(*lease_id)\n", ""),
    "a ticket fits any prompt": Mutant(
        "connector/loans.py", "compat.request_digest(request, ticket.token_bytes, num_tokens) == offer.digest", "True"
    ),
    "death is told by the socket alone": Mutant(
        "channel.py", "            self._poll.register(self._pidfd, select.POLLIN)\n", "            pass\n"
    ),
    "a pidfd leaks": Mutant(
        "channel.py", "            os.close(self._pidfd)\n            self._pidfd = None\n", "            pass\n"
    ),
    "a lease is given back before its blocks are copied": Mutant(
        "connector/decode.py",
        "        handoff.state = HandoffState.PULLING\n",
        "        handoff.state = HandoffState.PULLING\n        self._loans.leave(handoff)\n",
    ),
    "blocks are copied from one place further": Mutant(
        "connector/decode.py",
        "for block, lent_id in zip(table[first:last], lent[first:last]",
        "for block, lent_id in zip(table[first:last], lent[first + 1 : last] + lent[first : first + 1]",
    ),
    # To give it back too early would do no harm that anybody could see: vLLM never shows the blocks of such a request.
    "a request that ends while it is copied keeps its lease": Mutant(
        "connector/decode.py",
        "            self._ended_pulling[request.request_id] = handoff\n",
        "            pass\n",
    ),
    "a tail is copied from another block": Mutant(
        "connector/decode.py", "handoff.loan.block_ids[handoff.num_full]))", "handoff.loan.block_ids[0]))"
    ),
}


def make_mutant(mutant: Mutant, directory: Path) -> None:
    """A copy of the package, native module included, with the bug in it.

    Raises:
        ValueError: the code has changed, and the list here has not.
    """
    source = Path(str(vllm_mc2.__file__)).parent
    target = directory / "vllm_mc2"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(str(vllm_mc2._native.__file__), target)
    path = target / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} has {text.count(mutant.old)} times: {mutant.old}")
    path.write_text(text.replace(mutant.old, mutant.new))


def run_mutant(name: str, mutant: Mutant) -> bool:
    """Whether the harness finds it; prints how."""
    with tempfile.TemporaryDirectory() as directory:
        make_mutant(mutant, Path(directory))
        command = [sys.executable, "-m", "tests.chaos", "--rounds", str(ROUNDS), "--seed", "1", "--max-failures", "1"]
        output = subprocess.run(
            [*command, "--package", directory], cwd=ROOT, capture_output=True, text=True, check=False
        )
    lines = output.stdout.splitlines()
    found = next((line.strip() for line in lines if line.startswith(("  leaks", "  wrong", "  hangs"))), "")
    result = json.loads(lines[-1])
    is_found = any(result[key] for key in ("leaks", "wrong_bytes", "hangs"))
    print(f"{'found' if is_found else 'MISSED'} after {result['rounds']} rounds: {name}: {found[:200]}", flush=True)
    return is_found


def main() -> int:
    """The exit code."""
    chosen = [name for name in MUTANTS if not sys.argv[1:] or any(word in name for word in sys.argv[1:])]
    return 0 if min([run_mutant(name, MUTANTS[name]) for name in chosen]) else 1


if __name__ == "__main__":
    sys.exit(main())
