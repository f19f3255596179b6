"""Settings: defaults work, mistakes name the key, the value and what is allowed."""

from pathlib import Path

import pytest

from vllm_mc2.config import MC2Config, parse_config
from vllm_mc2.errors import ConfigError


def test_defaults_need_no_editing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    config = parse_config({})
    assert config == MC2Config()
    assert config.resolve_socket_dir() == tmp_path / "vllm-mc2"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert config.resolve_socket_dir().name.startswith("vllm-mc2-")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("window_pool_factor", -1, "from 0.0 to 1024.0"),
        ("window_pool_factor", "8", "a number"),
        ("huge_pages", "yes", "'auto', 'off', 'require'"),
        ("num_lease_slots", 0, "from 1 to 65536"),
        ("num_lease_slots", 1.5, "a whole number"),
        ("num_lease_slots", True, "a whole number"),
        ("offer_timeout_seconds", 0, "above 0.0"),
        ("handshake_timeout_seconds", 601, "up to 600.0"),
        ("prefault", 1, "true or false"),
        ("model_identity", "", "a text"),
        ("socket_dir", 7, "a text"),
        ("socket_dir", "relative", "an absolute path"),
        ("socket_dir", "/" + "x" * 90, "at most 85 bytes"),
    ],
)
def test_a_wrong_value_names_key_value_and_range(key: str, value: object, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({key: value})
    message = str(caught.value)
    assert f"kv_connector_extra_config.{key} = {value!r}" in message
    assert allowed in message


def test_an_unknown_key_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.windw.*window_pool_factor"):
        parse_config({"windw": 1})
