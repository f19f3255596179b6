"""The real vllm-ascend: its source package, unpacked, never installed and never built.

pip itself can fetch a source package only by building its metadata, which for this one needs a compiler and CANN. So it
is looked up here in the index that pip is configured for, and checked against the digest that is written down here.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.23.0.post1"
FILE = f"vllm_ascend-{VERSION}.tar.gz"
SHA256 = "a3b9f4a5dd7aa50c37e03d1f35937c4ae5aeacc49b734cac74d59ce5757738e1"
TARGET = ROOT / "build" / "ascend" / f"vllm_ascend-{VERSION}"
TIMEOUT_SECONDS = 180


def source() -> Path:
    """The folder with ``vllm_ascend``, ``examples`` and ``setup.py``; downloaded when it is not there.

    Raises:
        RuntimeError: the file is not the one that the tests were written for, or the index does not have it.
    """
    if TARGET.exists():
        return TARGET
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TARGET.parent) as folder:
        archive = Path(folder) / FILE
        _download(archive)
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest != SHA256:
            raise RuntimeError(f"{FILE} has SHA-256 {digest}, expected {SHA256}")
        unpacked = Path(folder) / "unpacked"
        with tarfile.open(archive) as tar:
            tar.extractall(unpacked, filter="data")
        try:
            # All or nothing, also when two test runs do this at once.
            (unpacked / TARGET.name).rename(TARGET)
        except OSError:
            if not TARGET.exists():
                raise
    return TARGET


def _download(target: Path) -> None:
    local = os.environ.get("MC2_VLLM_ASCEND_SDIST")
    if local:
        shutil.copyfile(local, target)
        return
    try:
        import pypi_simple
    except ImportError as error:
        raise RuntimeError("pypi-simple is not installed, see examples/setup/requirements-cpu.txt") from error
    session = pypi_simple.PyPISimple(_pip_setting("index-url") or pypi_simple.PYPI_SIMPLE_ENDPOINT)
    with session as index:
        certificates = _pip_setting("cert")
        if certificates:
            index.s.verify = certificates
        packages = index.get_project_page("vllm-ascend", timeout=TIMEOUT_SECONDS).packages
        found = [package for package in packages if package.filename == FILE]
        if not found:
            raise RuntimeError(f"the package index has no {FILE}")
        index.download_package(found[0], target, timeout=TIMEOUT_SECONDS)


def _pip_setting(name: str) -> str | None:
    """What pip would use: its environment variable first, then its configuration files."""
    variable = os.environ.get("PIP_" + name.upper().replace("-", "_"))
    if variable:
        return variable
    command = [sys.executable, "-m", "pip", "config", "get", f"global.{name}"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    return answer.stdout.strip() or None if answer.returncode == 0 else None
