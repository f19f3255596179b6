"""``pip install .`` on a machine without vLLM and torch: one abi3 wheel that works by itself."""

import subprocess
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow]

USE = """
import importlib.util, sys
from importlib.metadata import entry_points
from vllm_mc2._native import AddressRange, LeaseReader, LeaseTable, Pool
import vllm_mc2.memory, vllm_mc2.leases, vllm_mc2.session, vllm_mc2.plugin
assert importlib.util.find_spec("vllm") is None and importlib.util.find_spec("torch") is None
(entry,) = entry_points(group="vllm.general_plugins")
entry.load()()  # without vLLM: a log line, no exception
with AddressRange(4 << 20) as r, Pool(2 << 20, huge_pages="off") as pool:
    r.map_pool(0, pool, 0, 2 << 20)
    pool.seal()
    r.map_peer(2 << 20, pool.fd, 0, 2 << 20)
    r.copy([(0, 2 << 20, 4096)])
print(vllm_mc2.__version__)
"""


def test_one_wheel_for_all_pythons_from_3_11_with_types_and_entry_point(tree_wheel: Path) -> None:
    assert "-cp311-abi3-linux_" in tree_wheel.name
    names = zipfile.ZipFile(tree_wheel).namelist()
    for name in (
        "vllm_mc2/_native.abi3.so",
        "vllm_mc2/_native.pyi",
        "vllm_mc2/py.typed",
        "vllm_mc2/connector/compat.py",
    ):
        assert name in names
    assert not [name for name in names if name.startswith(("tests/", "examples/", "csrc/"))]
    metadata = zipfile.ZipFile(tree_wheel).read(next(name for name in names if name.endswith("METADATA"))).decode()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert [line.split()[1].split(">")[0].split("<")[0] for line in required] == ["msgspec", "nanobind-backend"]


def test_it_installs_and_works_without_vllm_and_torch(tree_wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "v", with_pip=True)
    python = str(tmp_path / "v" / "bin" / "python")
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", str(tree_wheel)], check=True, timeout=300
    )
    result = subprocess.run([python, "-c", USE], check=True, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert result.stdout.strip() == tree_wheel.name.split("-")[1]
    command = [str(tmp_path / "v" / "bin" / "vllm-mc2"), "inspect", "--socket-dir", str(tmp_path / "none")]
    inspected = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert inspected.returncode == 1 and "does not exist" in inspected.stderr
