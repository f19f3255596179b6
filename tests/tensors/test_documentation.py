"""The programs in docs/tensor-api.md run as they are written, but for the port."""

import re
import subprocess
import sys
from pathlib import Path

from tests.support.ports import own_ports

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "tensor-api.md").read_text()


def test_the_two_programs_in_the_documentation_run_as_written(tmp_path: Path) -> None:
    with own_ports(1) as (port,):
        run_both(tmp_path, port)


def run_both(tmp_path: Path, port: int) -> None:
    programs = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(programs) == 2
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", program.replace("5678", str(port))],
            stdout=subprocess.PIPE,
            text=True,
            env={"XDG_RUNTIME_DIR": str(tmp_path), "PATH": ""},
        )
        for program in programs
    ]
    try:
        said = [child.communicate(timeout=250)[0].strip() for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0]
    # Each program says in a comment what it prints.
    for program, output in zip(programs, said, strict=True):
        assert f"# {output}" in program
