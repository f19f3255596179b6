"""A short run of the chaos harness, and what must hold of the harness itself. ``make chaos`` is the long one."""

import json
import os
import random
import subprocess
import sys

import pytest

from tests.chaos.fleet import ROOT
from tests.chaos.plan import make_plan

ROUNDS = 20


def run_chaos(*arguments: str) -> tuple[dict[str, int], str]:
    """The last line of a run, and all of its output."""
    command = [sys.executable, "-m", "tests.chaos", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    output = done.stdout + done.stderr
    assert done.stdout, output
    result = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode == 0) == (result["leaks"] == result["wrong_bytes"] == result["hangs"] == 0), output
    return result, output


@pytest.mark.timeout(920)
def test_a_short_run_is_clean(tiny_model: object) -> None:
    """Always the same plan; ``MC2_CHAOS_SEED`` names another."""
    seed = int(os.environ.get("MC2_CHAOS_SEED", "20261129"))
    result, output = run_chaos("--rounds", str(ROUNDS), "--seed", str(seed), "--max-failures", "1")
    assert list(result) == ["rounds", "faults", "leaks", "wrong_bytes", "hangs", "seed"]
    assert result["seed"] == seed
    assert (result["leaks"], result["wrong_bytes"], result["hangs"]) == (0, 0, 0), output
    assert result["rounds"] == ROUNDS and result["faults"] > 0
    assert "attach: " in output


def test_a_plan_comes_from_seed_and_round_alone() -> None:
    plans = [make_plan(7, number) for number in range(30)]
    random.seed(1)
    assert plans[::-1] == [make_plan(7, number) for number in reversed(range(30))]
    assert plans != [make_plan(8, number) for number in range(30)]
