"""Fixtures that several kinds of tests share."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]

# Before vllm is imported anywhere: no telemetry, no hub, and quiet logs.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


# How long an example takes says something about the machine, which others use too, and nothing about the code.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """A random two-layer Llama, made by ``make setup``."""
    path = ROOT / "build" / "models" / "tiny-llama"
    if not (path / "config.json").exists():
        pytest.fail(f"{path} is missing; run `make setup`")
    return path


FOLDERS_WITH_SHARED_FIXTURES = {"isolation", "packaging"}
"""What is built or started once there serves all files of the folder."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keep a file's tests, or a folder's, in one of pytest-xdist's processes, so that their fixtures are made once."""
    folder = item.path.relative_to(ROOT / "tests").parts[0]
    group = folder if folder in FOLDERS_WITH_SHARED_FIXTURES else item.path.stem
    item.add_marker(pytest.mark.xdist_group(f"{folder}/{group}"))
