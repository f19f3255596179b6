"""``vllm-mc2 config``: what it prints is what vLLM and the engine take."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllm_mc2 import cli, plugin
from vllm_mc2.cli.config import CONNECTOR_MODULE, CONNECTOR_NAME, ROLES
from vllm_mc2.config import MC2Config, allowed, parse_config
from vllm_mc2.errors import ConfigError


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> dict[str, Any]:
        assert cli.main(["config", *arguments]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        config: dict[str, Any] = json.loads(captured.out)
        return config

    return run


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["config", "--role", "prefill", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("vllm-mc2 config: ")
    return captured.err


def test_the_names_are_those_of_the_plugin() -> None:
    assert (CONNECTOR_NAME, CONNECTOR_MODULE) == (plugin.CONNECTOR_NAME, plugin.CONNECTOR_MODULE)


@pytest.mark.parametrize(("role", "kv_role"), ROLES.items())
def test_the_least(printed: Any, role: str, kv_role: str) -> None:
    assert printed("--role", role) == {"kv_connector": CONNECTOR_NAME, "kv_role": kv_role}


def test_vllm_takes_it(printed: Any) -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from vllm_mc2.connector import MC2Connector

    plugin.register()
    options = ["--policy", "recompute", "--engine-id", "e 1", "--module-path", "--mode", "pull"]
    for role, kv_role in ROLES.items():
        for arguments in ([], options):
            config = KVTransferConfig(**printed("--role", role, *arguments))
            assert config.kv_role == kv_role
            assert KVConnectorFactory.get_connector_class(config) is MC2Connector
            parse_config(config.kv_connector_extra_config)
    assert (config.engine_id, config.kv_load_failure_policy) == ("e 1", "recompute")
    assert config.kv_connector_module_path == CONNECTOR_MODULE
    assert config.kv_connector_extra_config == {"mode": "pull"}


def test_vllms_own_command_line_takes_it(printed: Any) -> None:
    """The text itself, through vLLM's parser."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    text = json.dumps(printed("--role", "prefill", "--set", "huge_pages=off"))
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", "m", "--kv-transfer-config", text])
    assert args.kv_transfer_config.kv_connector_extra_config == {"huge_pages": "off"}


TEXTS = {
    "mode": ("attach", "attach"),
    "pull_threads": ("7", 7),
    "socket_dir": ("/run/mc2", "/run/mc2"),
    "window_pool_factor": ("2.5", 2.5),
    "huge_pages": ("require", "require"),
    "prefault": ("false", False),
    "num_lease_slots": ("64", 64),
    "max_lent_fraction": ("0.5", 0.5),
    "offer_timeout_seconds": ("120", 120.0),
    "handshake_timeout_seconds": ("5", 5.0),
    "tcp_address": ("10.0.0.1", "10.0.0.1"),
    "tcp_port": ("14000", 14000),
    "tcp_secret_file": ("SECRET", "SECRET"),
    "tcp_secret": ("0123456789abcdef", "0123456789abcdef"),
    "tcp_timeout_seconds": ("3", 3.0),
    "npu_attach": ("true", True),
    "model_identity": ("7", "7"),
    "report_in_response": ("1", True),
}


def test_every_key_can_be_set_in_its_own_type(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("0123456789abcdef")
    assert set(TEXTS) == {field.encode_name for field in msgspec.structs.fields(MC2Config)}
    arguments = [f"--set={key}={text.replace('SECRET', str(secret))}" for key, (text, _) in TEXTS.items()]
    assert cli.main(["config", "--role", "both", *arguments]) == 0
    captured = capsys.readouterr()
    extra = json.loads(captured.out)["kv_connector_extra_config"]
    wanted = {key: value if value != "SECRET" else str(secret) for key, (_, value) in TEXTS.items()}
    assert extra == wanted
    assert {key: type(value) for key, value in extra.items()} == {key: type(value) for key, value in wanted.items()}
    assert parse_config(extra).pull_threads == 7
    assert "tcp_secret_file" in captured.err  # what is better than a secret in a command line


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("pull_threads", "99", 99),
        ("pull_threads", "many", "many"),
        ("mode", "copy", "copy"),
        ("prefault", "yes", "yes"),
    ],
)
def test_wrong_values_are_refused_in_the_words_of_the_engine(
    capsys: pytest.CaptureFixture[str], key: str, text: str, value: object
) -> None:
    said = refused(capsys, "--set", f"{key}={text}")
    with pytest.raises(ConfigError) as caught:
        parse_config({key: value})
    assert said == f"vllm-mc2 config: {caught.value}\n" and allowed(key) in said


def test_what_else_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no such key; known keys: handshake_timeout_seconds" in refused(capsys, "--set", "colour=red")
    assert "expected KEY=VALUE" in refused(capsys, "--set", "pull_threads")
    assert "expected KEY=VALUE" in refused(capsys, "--set", "=4")
    assert "mode is given twice" in refused(capsys, "--mode", "pull", "--set", "mode=auto")
    assert "mode = 'copy': expected one of" in refused(capsys, "--mode", "copy")
    assert "at most 85 bytes" in refused(capsys, "--socket-dir", "/" + "x" * 90)
    assert "1 to 256 characters" in refused(capsys, "--engine-id", "")
    assert "a readable file" in refused(capsys, "--set", f"tcp_secret_file={tmp_path}/none")
    assert "UTF-8" in refused(capsys, "--socket-dir", "/\udcff")  # as Python has an argument with the byte 0xff
    secret = "tcp_secret=short"
    for said in (refused(capsys, "--set", secret), refused(capsys, "--set", secret, "--set", secret)):
        assert "short" not in said
    monkeypatch.setenv("MC2_TCP_SECRET", "x")
    assert "MC2_TCP_SECRET" in refused(capsys)  # an engine with this environment would not start


def test_a_relative_directory_is_made_absolute(printed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    extra = "kv_connector_extra_config"
    assert printed("--role", "both", "--socket-dir", "s")[extra] == {"socket_dir": str(tmp_path / "s")}
    assert printed("--role", "both", "--socket-dir", "~/s")[extra] == {"socket_dir": "/home/me/s"}


def test_in_a_shell_it_is_one_word() -> None:
    """As in the documentation: ``--kv-transfer-config "$(vllm-mc2 config ...)"``."""
    command = shlex.quote(str(Path(sys.executable).with_name("vllm-mc2")))
    value = "two words, \"quotes\" and 'more' $HOME"
    script = f'printf "%s|" --kv-transfer-config "$({command} config --role prefill --set model_identity={shlex.quote(value)})"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    option, text, rest = done.stdout.split("|")
    assert (option, rest, done.stderr) == ("--kv-transfer-config", "", "") and "\n" not in text
    assert json.loads(text)["kv_connector_extra_config"] == {"model_identity": value}


def test_pretty_is_the_same_on_several_lines(printed: Any) -> None:
    arguments = ("--role", "decode", "--set", "prefault=false")
    assert printed(*arguments, "--pretty") == printed(*arguments)


def test_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["KEY", "DEFAULT", "ALLOWED"]
    for line, field in zip(lines[1:], msgspec.structs.fields(MC2Config), strict=True):
        key, default, text = line.split(maxsplit=2)
        assert (key, json.loads(default), text) == (field.encode_name, field.default, allowed(field.encode_name))
