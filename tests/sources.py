"""Source packages of other projects: single files taken out of them, never built and never installed.

pip itself fetches a source package only by building its metadata, which for some needs a compiler and more. So it is looked
up here in the index that pip is configured for, and checked against the digest that is written down in the test.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.support.locking import alone
from tests.unpacked import DOWNLOAD_SECONDS


def unpack_source(project: str, file: str, sha256: str, target: Path, wanted: Callable[[str], bool]) -> Path:
    """The folder ``target`` with the wanted files of a source package, their names as in it. All or nothing; done once.

    Taken from the folder that ``MC2_SDIST_DIR`` names, if it has the file.

    Raises:
        RuntimeError: the index does not have the file, or another one under its name.
    """
    with alone(target):
        if not (target / "complete").exists():
            _unpack(project, file, sha256, target, wanted)
    return target


def _unpack(project: str, file: str, sha256: str, target: Path, wanted: Callable[[str], bool]) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        archive, out = Path(name) / file, Path(name) / "out"
        _download(project, archive)
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest != sha256:
            raise RuntimeError(f"{file} has SHA-256 {digest}, expected {sha256}")
        with tarfile.open(archive) as tar:
            members = [member for member in tar if wanted(member.name)]
            tar.extractall(out, members, filter="data")
        (out / "complete").touch()
        shutil.rmtree(target, ignore_errors=True)
        out.rename(target)


def _download(project: str, target: Path) -> None:
    local = Path(os.environ.get("MC2_SDIST_DIR", "/nowhere")) / target.name
    if local.exists():
        shutil.copyfile(local, target)
        return
    try:
        import pypi_simple
    except ImportError as error:
        raise RuntimeError("pypi-simple is not installed, see examples/setup/requirements-cpu.txt") from error
    with pypi_simple.PyPISimple(_pip_setting("index-url") or pypi_simple.PYPI_SIMPLE_ENDPOINT) as index:
        certificates = _pip_setting("cert")
        if certificates:
            index.s.verify = certificates
        packages = index.get_project_page(project, timeout=DOWNLOAD_SECONDS).packages
        found = [package for package in packages if package.filename == target.name]
        if not found:
            raise RuntimeError(f"the package index has no {target.name}")
        index.download_package(found[0], target, timeout=DOWNLOAD_SECONDS)


def _pip_setting(name: str) -> str | None:
    """What pip would use: its environment variables and its configuration files."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=True).stdout
    values = dict(line.split("=", 1) for line in answer.splitlines() if "=" in line)
    for section in (":env:", "global"):
        if f"{section}.{name}" in values:
            return values[f"{section}.{name}"].strip("'\"")
    return None
