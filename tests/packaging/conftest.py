"""What is built once for all tests here: the source distribution and the wheels."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.locking import own_folder

ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "examples" / "setup"
WORK = own_folder(ROOT / "build" / "wheels")
"""Tests look into it after the build, so it cannot be another process's too."""

TAG = "cp311-abi3-manylinux_2_28_"


def load(name: str) -> ModuleType:
    """A script of `examples/setup` as a module."""
    spec = importlib.util.spec_from_file_location(f"mc2_{name}", SETUP / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def script() -> ModuleType:
    return load("wheels")


@pytest.fixture(scope="session")
def release() -> ModuleType:
    return load("release")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What `wheels.py` makes, the source distribution first. Tools and zig's cache are kept in `build`; what is built is not."""
    output = tmp_path_factory.mktemp("dist")
    command = [sys.executable, str(SETUP / "wheels.py"), "--output", str(output), "--work", str(WORK)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=550)
    assert done.returncode == 0, done.stderr
    paths = list(map(Path, done.stdout.split()))
    assert sorted(output.iterdir()) == sorted(paths)
    return paths


@pytest.fixture(scope="session")
def sdist(built: list[Path]) -> Path:
    assert built[0].name.endswith(".tar.gz")
    return built[0]


@pytest.fixture(scope="session")
def wheels(built: list[Path]) -> dict[str, Path]:
    """Wheel by machine."""
    return {path.stem.partition(TAG)[2]: path for path in built[1:]}


@pytest.fixture(scope="session")
def sources(built: list[Path]) -> dict[str, Path]:
    """Unpacked source distribution by the machine that the wheel was built for."""
    return {machine: next((WORK / machine / "source").iterdir()) for machine in ("aarch64", "x86_64")}


@pytest.fixture(scope="session")
def tree_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip wheel .` makes of the checkout for this machine."""
    folder = tmp_path_factory.mktemp("wheel")
    # Isolated: build requirements come from pyproject.toml alone, not from this environment.
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)]
    subprocess.run([*command, f"-Cbuild-dir={folder / 'build'}"], check=True, timeout=500)
    (path,) = folder.glob("*.whl")
    return path
