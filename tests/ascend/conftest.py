"""Fixtures over the simulator. Where it cannot be made, the tests fail: nothing here is left out in silence."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ascend import environment
from tests.ascend.simulator.bindings import Process


@pytest.fixture(scope="session")
def simulator() -> Path:
    """The folder with the variants of ``libascendcl.so``: ``lib``, ``old`` and ``oldest``."""
    return environment.build_simulator()


@pytest.fixture(scope="session")
def npu_environment(tmp_path_factory: pytest.TempPathFactory) -> environment.NpuEnvironment:
    """One simulated machine for child Pythons with torch_npu."""
    return environment.npu_environment(tmp_path_factory.mktemp("machine"))


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The folder of a machine of this test alone."""
    return tmp_path / "machine"


@pytest.fixture
def start(simulator: Path, machine: Path) -> Iterator[Callable[..., Process]]:
    """Starts a process on the test's machine, with the runtime loaded and device 0 selected."""
    processes: list[Process] = []

    def start_one(*, variant: str = "lib", device: int | None = 0, **settings: Any) -> Process:
        process = Process(simulator / variant / "libascendcl.so", machine, **{k: str(v) for k, v in settings.items()})
        processes.append(process)
        process.init()
        if device is not None:
            process.set_device(device)
        return process

    yield start_one
    for process in processes:
        if process.popen.poll() is None:
            process.popen.kill()
        process._wait()
