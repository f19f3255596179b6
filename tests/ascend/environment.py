"""Real ``torch_npu`` tensors without an NPU: the simulator, the unpacked wheel and the environment for a child Python.

Nothing is installed: torch_npu would otherwise load itself into every process that imports torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.locking import alone
from tests.unpacked import unpack_wheel

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "ascend"
SOURCES = Path(__file__).resolve().parent / "simulator"
SIMULATOR = BUILD / "simulator"
TORCH_NPU = BUILD / "torch_npu-2.13.0"
WHEEL = "torch-npu==2.13.0"
# What torch_npu prints on standard output at import, where there is no CANN.
GREETING = "Warning: ASCEND_HOME_PATH"

VARIANTS = {"newest": "lib", "8.5": "old", "8.3": "oldest"}


def build_simulator() -> Path:
    """The folder with the built variants. Does nothing where they are up to date.

    Raises:
        subprocess.CalledProcessError: it cannot be built; the compiler has said why on standard error.
    """
    with alone(SIMULATOR):
        if not (SIMULATOR / "CMakeCache.txt").exists():
            configure = ["cmake", "-S", str(SOURCES), "-B", str(SIMULATOR), "-G", "Ninja"]
            subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
        build = subprocess.run(
            ["cmake", "--build", str(SIMULATOR), "--parallel", "2"], check=False, capture_output=True, text=True
        )
    if build.returncode != 0:
        sys.stderr.write(build.stdout + build.stderr)
        build.check_returncode()
    return SIMULATOR


def library(variant: str = "newest") -> Path:
    """The ``libascendcl.so`` of a variant: ``newest``, ``8.5`` or ``8.3``."""
    return build_simulator() / VARIANTS[variant] / "libascendcl.so"


def unpack_torch_npu() -> Path:
    """The folder with torch_npu, downloaded once.

    Raises:
        subprocess.CalledProcessError: the download fails.
    """
    return unpack_wheel(WHEEL, TORCH_NPU)


@dataclass(frozen=True)
class NpuEnvironment:
    """What a child Python needs for ``import torch, torch_npu``."""

    torch_npu: Path
    libraries: Path
    folder: Path  # what the processes share; one folder is one machine

    def variables(self, **more: str) -> dict[str, str]:
        """The whole environment of a child, with ``more`` on top."""
        paths = [str(ROOT), str(self.torch_npu)]
        if os.environ.get("PYTHONPATH"):
            paths.append(os.environ["PYTHONPATH"])
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ASCEND_", "MC2_ACL_"))}
        return {
            **inherited,
            "PYTHONPATH": os.pathsep.join(paths),
            "LD_LIBRARY_PATH": str(self.libraries),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "MC2_ACL_SIM_DIR": str(self.folder),
            **more,
        }

    def run(self, code: str, *arguments: str, timeout_seconds: float = 250, **more: str) -> str:
        """Standard output of a Python program; it must end well. torch_npu's own greeting is left out."""
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=self.variables(**more), cwd=ROOT, capture_output=True, text=True, timeout=timeout_seconds, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
        return "".join(line for line in done.stdout.splitlines(keepends=True) if not line.startswith(GREETING))


def npu_environment(folder: Path) -> NpuEnvironment:
    """Builds and downloads what is missing."""
    return NpuEnvironment(torch_npu=unpack_torch_npu(), libraries=build_simulator() / "lib", folder=folder)
