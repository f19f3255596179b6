"""``examples/tensor_api.py``: what a stranger runs first."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]


def run(command: list[str], cwd: Path, temporary: Path) -> str:
    """What it says; it leaves neither files nor processes."""
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert list(temporary.iterdir()) == []
    running = [
        process for process in psutil.process_iter(["cmdline"]) if str(temporary) in str(process.info["cmdline"])
    ]
    assert running == []
    return done.stdout


def test_it_ends_well_and_says_so(directory: Path) -> None:
    """Run as a module; it starts its other half as a script."""
    output = run([sys.executable, "-W", "error", "-m", "examples.tensor_api"], ROOT, directory)
    lines = output.splitlines()
    assert lines[-1] == "equal"
    rows = [re.split(r"\s{2,}", line) for line in lines[1:4]]
    assert [row[0] for row in rows] == ["paged", "paged", "contiguous"]
    assert [row[5] for row in rows] == ["by block, in place", "torch's, gathered", "torch's, in place"]
    for row in rows:
        assert (
            int(row[1].replace(",", "")) >= 4 * 2 * 1000 * 2 * 32 * 4
        )  # layers, K and V, tokens, heads, size, float32
        assert int(row[2]) < 64 and float(row[6]) <= 1e-5
    assert "prefill was killed; what was mapped is still there" in output
    assert "request 'late' was not mapped" in output


def test_it_notices_what_is_not_equal(directory: Path) -> None:
    """The same program with one key of the mapped cache read wrongly."""
    code = (
        "import sys; sys.argv = ['x']; from examples import tensor_api\n"
        "right = tensor_api.attention_over_blocks\n"
        "tensor_api.attention_over_blocks = lambda q, k, v, blocks: right(q, k, v, [*blocks[1:], blocks[0]])\n"
        "sys.exit(tensor_api.main())"
    )
    environment = {**os.environ, "TMPDIR": str(directory)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 1 and done.stdout.splitlines()[-1] == "NOT EQUAL", done.stdout + done.stderr
