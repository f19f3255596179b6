"""A wrong setting ends a real server at start, with a message that says what is wrong; nothing is left."""

from pathlib import Path

import pytest

from examples.pair import ServerError, kv_transfer_config
from tests.e2e.conftest import LOG_DIR
from tests.support.servers import vllm_server

pytestmark = [pytest.mark.e2e]


def test_a_wrong_key_is_named(tiny_model: Path, tmp_path: Path) -> None:
    config = kv_transfer_config("kv_producer", extra={"socket_dir": str(tmp_path / "s"), "windw_factor": 4})
    with vllm_server("misconfigured", tiny_model, kv_config=config, log_dir=LOG_DIR) as server:
        with pytest.raises(ServerError, match="ended with status"):
            server.wait_ready()
        text = server.log_text()
    assert "kv_connector_extra_config.windw_factor = 4: expected no such key; known keys: " in text
    assert not (tmp_path / "s").exists() or list((tmp_path / "s").iterdir()) == []
