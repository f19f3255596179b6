"""Each documented command has been run by a test, or says that it was not; what is cheap to run is run here, from the page."""

import ast
import itertools
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import PAGES, ROOT, Block, block_of, blocks, shell_blocks
from vllm_mc2.ascend.settings import parse_foreign
from vllm_mc2.config import parse_config

KV_CONFIG = "--kv-transfer-config"


def shell(body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As a reader runs it, in the root of a clone."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euc", body], cwd=ROOT, env={**os.environ, "PATH": path, **environment}, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip


@cache
def functions_of(path: str) -> frozenset[str]:
    """The test functions in a file."""
    tree = ast.parse((ROOT / path).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(function.name for function in functions if function.name.startswith("test_"))


def test_every_command_has_been_run_or_says_that_it_was_not() -> None:
    unmarked = [
        f"{block.page}:{block.line}: {block.body.splitlines()[0]}"
        for block in shell_blocks()
        if not block.run_by and not block.is_said_not_to_be_run
    ]
    assert unmarked == [], "put `<!-- run by: tests/x.py::test_y -->` right above it, or say in words: not run"


def test_the_tests_that_are_said_to_run_commands_are_there() -> None:
    named = [(block, name) for block in shell_blocks() for name in block.run_by]
    assert len(named) > 8
    for block, name in named:
        path, separator, function = name.partition("::")
        where = f"{block.page}:{block.line}: {name}"
        assert separator and path.startswith("tests/") and (ROOT / path).is_file(), where
        assert function in functions_of(path), where


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("```bash\nls\n```\n", False),
        ("Words.\n\n```sh\nls\n```\n", False),
        ("Not run\nanywhere yet:\n\n```bash\nls\n```\n", True),
        ("This was not run.\n\nOther words.\n\n```bash\nls\n```\n", False),
        ("```bash\nls  # not run\n```\n", True),
        ("<!-- run by: tests/docs/test_commands.py::test_marks -->\n```console\n$ ls\n```\n", True),
        ("<!-- run by: tests/docs/test_commands.py::test_marks -->\nWords.\n\n```bash\nls\n```\n", False),
        ("```\n$ ls\n```\n", False),
    ],
)
def test_marks(text: str, marked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    monkeypatch.setattr("tests.docs.pages.ROOT", tmp_path)
    (block,) = blocks(page)
    assert block.is_shell
    assert (bool(block.run_by) or block.is_said_not_to_be_run) is marked


# --- configurations ---


def configurations() -> list[tuple[Block, dict[str, Any]]]:
    """Every value of ``--kv-transfer-config`` in a command."""
    found = []
    for block in shell_blocks():
        for words in block.commands:
            for index, word in enumerate(words):
                if word == KV_CONFIG:
                    found.append((block, words[index + 1]))
                elif word.startswith(f"{KV_CONFIG}="):
                    found.append((block, word.partition("=")[2]))
    return [(block, json.loads(text)) for block, text in found if not text.startswith("$")]


def ours(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Settings of our connector in it, also as one of a MultiConnector's."""
    extra = config.get("kv_connector_extra_config", {})
    if config["kv_connector"] == "MultiConnector":
        return [settings for child in extra["connectors"] for settings in ours(child)]
    return [extra] if config["kv_connector"] == "MC2Connector" else []


def test_vllm_and_we_accept_every_documented_configuration(tmp_path: Path) -> None:
    from vllm.config import KVTransferConfig

    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    found = configurations()
    assert len(found) >= 8
    num_ours = 0
    for _, config in found:
        KVTransferConfig(**config)
        for settings in ours(config):
            num_ours += 1
            there = {"tcp_secret_file": str(secret)} if "tcp_secret_file" in settings else {}
            native, _ = parse_foreign({**settings, **there})
            parse_config(native)
    assert num_ours >= 8


def test_vllm_accepts_the_arguments_of_every_documented_server() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    num_servers = 0
    for block in shell_blocks():
        for words in block.commands:
            for index, word in enumerate(words):
                if word == "vllm" and words[index + 1 : index + 2] == ["serve"]:
                    arguments = [argument for argument in words[index + 2 :] if argument not in {"...", "&"}]
                    arguments = ["{}" if argument.startswith("$(") else argument for argument in arguments]
                    parsed = parser.parse_args(arguments)
                    assert parsed.model_tag or parsed.model, block
                    num_servers += 1
    assert num_servers >= 8


def test_our_command_accepts_the_arguments_of_every_documented_call() -> None:
    from vllm_mc2.cli import _parser

    num_calls = 0
    for block in shell_blocks():
        if block.language == "console":
            continue  # with its answers, which may be about wrong arguments: tests/cli compares them
        for words in block.commands:
            without_environment = [*itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words)]
            if without_environment[:1] != ["vllm-mc2"]:
                continue
            arguments = [
                *itertools.takewhile(lambda word: word not in {"|", ">", "&&", ";", "&"}, without_environment[1:])
            ]
            num_calls += 1
            if not {"--help", "--version"} & {*arguments}:
                _parser().parse_args(arguments)
    assert num_calls >= 10


# --- commands ---


def test_doctor_as_the_quickstart_has_it() -> None:
    block = block_of("docs/quickstart/host.md", "vllm-mc2 doctor")
    done = shell(block.body)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines() if line[:1].isupper()} <= {"PASS", "INFO"}


@pytest.mark.parametrize("page", ["docs/quickstart/two-hosts.md", "docs/other-hosts.md"])
def test_the_secret_of_the_quickstart_is_accepted(page: str, tmp_path: Path) -> None:
    block = block_of(page, "(umask 077;")
    done = shell(block.body, HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    path = tmp_path / "mc2-secret"
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(parse_config({"tcp_secret_file": str(path)}).resolve_tcp_secret() or b"") == 64


def test_every_setting_that_a_page_names_exists() -> None:
    """In the JSON of any block; prose is checked by eye."""
    known = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "configuration.md").read_text(), re.MULTILINE))
    assert len(known) > 10
    for path in PAGES:
        for block in blocks(path):
            if block.language == "console":
                continue
            for text in re.findall(r'"kv_connector_extra_config":\s*(\{[^{}]*\})', block.body):
                assert set(parse_foreign(json.loads(text))[0]) <= known, f"{block.page}:{block.line}"
