"""What the tests of sockets share."""

from pathlib import Path

import pytest

from vllm_mc2.channel import prepare_socket_dir


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A private socket directory."""
    path = tmp_path / "s"
    prepare_socket_dir(path)
    return path
