"""Settings: defaults work, mistakes name the key, the value and what is allowed."""

from pathlib import Path

import pytest

from vllm_mc2.config import SECRET_VARIABLE, MC2Config, parse_config
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


SECRET = "correct horse battery staple"


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text(f"  {SECRET}\n")
    return path


def test_no_secret_means_no_other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    assert parse_config({}).resolve_tcp_secret() is None


def test_the_file_comes_before_the_environment_and_that_before_the_key(
    monkeypatch: pytest.MonkeyPatch, secret_file: Path
) -> None:
    keys: dict[str, object] = {"tcp_secret": "the key's own secret"}
    assert parse_config(keys).resolve_tcp_secret() == b"the key's own secret"
    monkeypatch.setenv(SECRET_VARIABLE, "the environment's secret")
    assert parse_config(keys).resolve_tcp_secret() == b"the environment's secret"
    keys["tcp_secret_file"] = str(secret_file)
    assert parse_config(keys).resolve_tcp_secret() == SECRET.encode()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777])
def test_a_secret_that_others_can_read_is_refused(secret_file: Path, mode: int) -> None:
    secret_file.chmod(mode)
    with pytest.raises(ConfigError, match=r"tcp_secret_file .*: others may read or write it, expected mode 0600"):
        parse_config({"tcp_secret_file": str(secret_file)})


def test_a_secret_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tcp_secret_file = .*a readable file of text"):
        parse_config({"tcp_secret_file": str(tmp_path / "nothing")})


@pytest.mark.parametrize("secret", ["short", "fifteen letters", " " * 40])
def test_a_short_secret_is_refused_and_not_shown(secret: str) -> None:
    with pytest.raises(ConfigError, match=r"tcp_secret: a secret of .* bytes, expected at least 16") as refusal:
        parse_config({"tcp_secret": secret})
    assert secret not in str(refusal.value)


@pytest.mark.parametrize("secret", [["a", "secret"], {"a": SECRET}, "", SECRET * 1000])
def test_a_secret_of_the_wrong_kind_is_not_shown(secret: object) -> None:
    with pytest.raises(ConfigError, match=r"tcp_secret = \(not shown\): expected a text") as refusal:
        parse_config({"tcp_secret": secret})
    assert not secret or str(secret) not in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "value"), [("tcp_port", 65536), ("tcp_port", -1), ("tcp_timeout_seconds", 0.1), ("tcp_address", "")]
)
def test_network_settings_out_of_range(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key} = "):
        parse_config({key: value})
