"""Tests against the wheel that would be published, where the package's source cannot be imported.

    python -m tests.packaging.installed [--wheel FILE] [--folder build/installed] [pytest's arguments]

The wheel (without `--wheel` the one in `dist` for this machine) is installed by pip into an environment of its own,
which takes all other packages from the one that runs this, but neither its editable installation nor its package. The tests
are run in a copy of the checkout without `vllm_mc2`; `build` in it is the checkout's. :mod:`tests.packaging.guard` makes
sure that what was imported is the wheel. Without arguments: the tests that need no servers, those of the connector in a
process of their own.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "installed"
RUNS = (["tests/native", "tests/unit", "tests/ipc", "tests/tensors"], ["tests/connector"])
LEFT_OUT = (".git", ".venv", ".ci", ".*_cache", ".hypothesis", "build", "dist", "vllm_mc2", "__pycache__")
# What would bring the source back, or change what is tested.
UNSET = ("PYTHONPATH", "PYTHONHOME", "PYTEST_ADDOPTS")


def make_environment(wheel: Path, folder: Path) -> Path:
    """The interpreter of a new environment in `folder` with `wheel` and the packages of this environment.

    Raises:
        subprocess.CalledProcessError: pip refuses the wheel; it has said why on standard error.
    """
    venv.EnvBuilder(clear=True, symlinks=True).create(folder)
    python = folder / "bin" / "python"
    # Before the line below: pip would find the other installation and leave it at that.
    options = ["--disable-pip-version-check", "--no-deps", "--no-index", "-q"]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", *options, wheel], check=True, timeout=120
    )
    # Folders that are named in a .pth file come last, and .pth files in them, as that of an editable installation, are not read.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "lib" / version / "site-packages" / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def copy_checkout(folder: Path) -> Path:
    """A new `folder` with all that tests read, but not the package."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    # Models and other projects' packages, which nobody wants to make twice.
    (ROOT / "build").mkdir(exist_ok=True)
    (folder / "build").symlink_to(ROOT / "build")
    return folder


def command(python: Path, arguments: list[str]) -> list[str]:
    return [str(python), "-m", "pytest", "-p", "tests.packaging.guard", "-p", "no:cacheprovider", *arguments]


def environment(python: Path) -> dict[str, str]:
    """Variables for tests that `python` runs: its own commands first, such as `vllm-mc2`."""
    kept = {name: value for name, value in os.environ.items() if name not in UNSET}
    return {**kept, "PATH": f"{python.parent}{os.pathsep}{kept['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Run tests against an installed wheel.", epilog="All else is for pytest."
    )
    parser.add_argument("--wheel", type=Path, help="the wheel (default: the one in dist for this machine)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="made anew: the environment and the copy")
    options, wanted = parser.parse_known_args(arguments)
    found = [options.wheel] if options.wheel else sorted((ROOT / "dist").glob(f"*_{platform.machine()}.whl"))
    if len(found) != 1 or not found[0].is_file():
        parser.error(f"{len(found)} wheels for {platform.machine()} in dist, not 1; `python examples/setup/wheels.py`")
    folder = options.folder.resolve()
    python = make_environment(found[0].resolve(), folder / "environment")
    checkout = copy_checkout(folder / "checkout")
    for run in [wanted] if wanted else RUNS:
        print(f"installed: {found[0].name}: {' '.join(run)}", flush=True)
        done = subprocess.run(command(python, run), cwd=checkout, env=environment(python), check=False)
        if done.returncode != 0:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
