"""Fixtures that several kinds of tests share."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Before vllm is imported anywhere: no telemetry, no hub, and quiet logs.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """A random two-layer Llama, made by ``make setup``."""
    path = ROOT / "build" / "models" / "tiny-llama"
    if not (path / "config.json").exists():
        pytest.fail(f"{path} is missing; run `make setup`")
    return path
