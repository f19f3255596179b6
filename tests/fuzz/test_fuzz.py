"""The fuzzers in short: seeded, a few thousand inputs each. ``make fuzz`` runs a million; see docs/fuzzing.md."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import native
from tests.fuzz.campaign import ROOT, python_command, run_target
from tests.fuzz.catalogue import NAMES

RUNS = {"mailbox": 4_000, "config": 4_000, "foreign": 4_000}
FEW = 10_000
SEED = 7


@pytest.mark.parametrize("name", NAMES)
def test_python(name: str, tmp_path: Path) -> None:
    runs = RUNS.get(name, FEW)
    result = run_target(name, python_command(name, tmp_path), tmp_path, [f"-runs={runs}", f"-seed={SEED}"])
    log = (tmp_path / f"{name}.log").read_text(errors="replace")
    assert result.is_good, f"{result.failures}\n{log[-6000:]}"
    assert result.num_inputs >= runs and result.coverage > 0
    assert result.num_accepted not in {"", "100.00%"} or name in {"buffer", "layout"}, (
        "nothing was refused, or nobody counted"
    )
    assert name == "greeting" or result.num_accepted != "0.00%", "nothing got past the first check"


@pytest.fixture(scope="module")
def native_build() -> None:
    native.build()


@pytest.mark.usefixtures("native_build")
@pytest.mark.parametrize("name", native.NAMES)
def test_native(name: str, tmp_path: Path) -> None:
    result = run_target(name, native.command(name, tmp_path), tmp_path, ["-runs=4000", f"-seed={SEED}"])
    assert result.is_good, (tmp_path / f"{name}.log").read_text(errors="replace")[-6000:]
    assert result.num_inputs >= 4000


def test_the_command_line_lists_what_there_is() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--list"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == [*NAMES, *native.NAMES]


def test_every_kept_finding_has_a_target() -> None:
    folder = Path(__file__).parent / "corpus"
    found = {path.parent.name for path in folder.glob("*/*")}
    assert found and found <= set(NAMES)
