"""Runs targets in processes of their own, and says in one line what each has seen."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_COVERAGE = re.compile(r"ft: (\d+) corp: (\d+)/")
_EXECUTED = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_REFUSED = re.compile(r"\w*Error |not ")
_FAILURES = ("crash-", "timeout-", "oom-", "leak-")


class Result(NamedTuple):
    """Of one target."""

    name: str
    num_inputs: int
    seconds: float
    coverage: int
    """Branches and answers that were seen; of native targets: places in the code."""
    corpus: int
    """Inputs that each showed something new."""
    num_accepted: str
    """How many of a million were taken for good ones, or empty where nobody counts."""
    failures: list[Path]
    status: int

    @property
    def is_good(self) -> bool:
        """Everything ran and nothing was found."""
        return self.status == 0 and not self.failures

    def __str__(self) -> str:
        state = "no crash" if self.is_good else f"FAILED with status {self.status}"
        accepted = f", {self.num_accepted} accepted" if self.num_accepted else ""
        return (
            f"{self.name:16} {self.num_inputs:>9,} inputs {self.seconds:>6.0f} s  coverage {self.coverage:>5}, "
            f"corpus {self.corpus:>5}{accepted}: {state}"
        )


def run_target(name: str, command: list[str], folder: Path, options: list[str]) -> Result:
    """Run one target to its end. Its log is ``NAME.log`` in ``folder``, inputs that failed are beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{name}.log"
    (folder / f"{name}.json").unlink(missing_ok=True)
    before = set(folder.glob(f"{name}-*"))
    begin = time.monotonic()
    with log.open("wb") as file:
        status = subprocess.run(
            [*command, *options], stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, check=False
        ).returncode
    seconds = time.monotonic() - begin
    text = log.read_text(errors="replace")
    covered = _COVERAGE.findall(text)
    coverage, corpus = (int(each) for each in covered[-1]) if covered else (0, 0)
    executed = _EXECUTED.findall(text)
    failures = [
        path
        for path in sorted(set(folder.glob(f"{name}-*")) - before)
        if path.name.startswith(tuple(f"{name}-{kind}" for kind in _FAILURES))
    ]
    return Result(
        name,
        int(executed[-1]) if executed else 0,
        seconds,
        coverage,
        corpus,
        _accepted(folder / f"{name}.json"),
        failures,
        status,
    )


def _accepted(path: Path) -> str:
    """The share of inputs that were not refused: a fuzzer that never gets past the first check finds nothing behind it."""
    if not path.exists():
        return ""
    answers: dict[str, int] = json.loads(path.read_text())["answers"]
    refused = sum(count for answer, count in answers.items() if _REFUSED.match(answer))
    total = sum(answers.values())
    return f"{100 * (total - refused) / total:.2f}%" if total else ""


def python_command(name: str, folder: Path) -> list[str]:
    """Of a target in Python."""
    return [sys.executable, "-m", "tests.fuzz.worker", name, str(folder)]
