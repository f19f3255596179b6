"""Fixtures that several kinds of tests share."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Before vllm is imported anywhere: no telemetry, no hub, and quiet logs.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


# How long an example takes says something about the machine, which others use too, and nothing about the code.
# Tests of an installed wheel (tests/native) do without hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy machine")


@pytest.fixture(autouse=True)
def _no_preloaded_libraries() -> Iterator[None]:
    """Undo what vLLM does to this process on a CPU: it has all later children preload libraries, sanitized ones too."""
    before = os.environ.get("LD_PRELOAD")
    yield
    if before is None:
        os.environ.pop("LD_PRELOAD", None)


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """A random two-layer Llama, made by ``make setup``."""
    path = ROOT / "build" / "models" / "tiny-llama"
    if not (path / "config.json").exists():
        pytest.fail(f"{path} is missing; run `make setup`")
    return path


FOLDERS_WITH_SHARED_FIXTURES = {"isolation", "packaging"}
"""What is built or started once there serves all files of the folder."""
FOLDERS_OF_SINGLE_TESTS = {"connector", "network"}
"""Nothing is shared there, and many tests wait for a time limit: the more at once the better."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep tests that share fixtures in one of pytest-xdist's processes: those of a folder, or of a file, or each alone."""
    from xdist.scheduler import LoadScopeScheduling

    class BySharedFixtures(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = Path(nodeid.partition("::")[0])
            if path.parent.name in FOLDERS_OF_SINGLE_TESTS:
                return nodeid
            return str(path.parent if path.parent.name in FOLDERS_WITH_SHARED_FIXTURES else path)

    return BySharedFixtures(config, log)
