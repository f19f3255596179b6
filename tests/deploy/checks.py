"""What schemas cannot know: whether the three containers fit vLLM, the connector, and each other."""

import contextlib
import functools
import io
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from tests.deploy.pair import ROLES, Container, Pair
from vllm_mc2.config import MC2Config, parse_config
from vllm_mc2.errors import ConfigError

GIB = 2**30
BESIDES_KV_BYTES = 2 * GIB
"""Weights of the default model in float32, the interpreter, torch."""
SWEEP_SECONDS = 5
"""How long vLLM's front end may tidy the socket directory before it ends (vllm_mc2/channel.py)."""
EXPECTED_ROLE = {"prefill": "kv_producer", "decode": "kv_consumer"}
MAY_DIFFER = {"port", "kv_transfer_config", "shutdown_timeout"}


@functools.cache
def serve_parser() -> Any:
    """The parser of `vllm serve`; importing it takes seconds."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))


def parse_serve(argv: list[str]) -> Namespace | str:
    """What vLLM reads in the arguments of `vllm serve`, or what it says against them."""
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            arguments: Namespace = serve_parser().parse_args(argv)
            validate_parsed_serve_args(arguments)
    except (SystemExit, ValueError, TypeError) as error:
        lines = said.getvalue().partition("error:")[2].split()
        return " ".join(lines) or str(error)
    return arguments


def problems(pair: Pair) -> list[str]:
    """Everything that is wrong with a pair; empty when it fits together."""
    if tuple(sorted(pair)) != tuple(sorted(ROLES)):
        return [f"containers {sorted(pair)}"]
    found = [f"{role}: {text}" for role, container in pair.items() for text in _of_any(container)]
    if len({pair[role].user for role in EXPECTED_ROLE}) != 1:
        found.append("prefill and decode run as different users, which refuse each other")
    parsed: dict[str, Namespace] = {}
    settings: dict[str, MC2Config] = {}
    for role in EXPECTED_ROLE:
        container = pair[role]
        if container.argv[:2] != ["vllm", "serve"]:
            found.append(f"{role}: is no `vllm serve`")
            continue
        arguments = parse_serve(container.argv[2:])
        if isinstance(arguments, str):
            found.append(f"{role}: vLLM refuses its arguments: {arguments}")
            continue
        parsed[role] = arguments
        found += [f"{role}: {text}" for text in _of_server(container, arguments, settings)]
    if len(parsed) == 2:
        found += _differences(parsed["prefill"], parsed["decode"])
    if len(settings) == 2:
        found += _no_meeting(pair, settings)
    return found + list(_of_proxy(pair))


def _of_any(container: Container) -> Iterator[str]:
    for what, is_so in container.confined.items():
        if not is_so:
            yield f"not confined: {what}"
    if container.user.startswith("0"):
        yield "runs as root"
    if any("$(" in part or "${" in part for part in container.argv):
        yield f"a variable is not filled in: {container.argv}"
    listens = {int(part) for part in re.findall(r"--port=(\d+)", " ".join(container.argv))}
    if container.probed != {(port, "/health") for port in listens} or len(listens) != 1:
        yield f"listens on {listens}, is asked at {container.probed}"
    if not any(address.endswith(f":{port}") for port in listens for address in container.answers):
        yield f"listens on {listens}, where nobody is led: {container.answers}"
    if "--host=0.0.0.0" not in container.argv:
        yield "answers inside its container only"


def _of_server(container: Container, arguments: Namespace, settings: dict[str, MC2Config]) -> Iterator[str]:
    transfer = arguments.kv_transfer_config
    if transfer is None or transfer.kv_connector != "MC2Connector":
        yield f"its connector is {transfer and transfer.kv_connector}"
        return
    if transfer.kv_role != EXPECTED_ROLE[container.role]:
        yield f"is {transfer.kv_role}"
    try:
        settings[container.role] = parse_config(transfer.kv_connector_extra_config)
    except ConfigError as error:
        yield str(error)
    kv_bytes = int(container.environment.get("VLLM_CPU_KVCACHE_SPACE", "0")) * GIB
    if not kv_bytes or container.memory_bytes < kv_bytes + BESIDES_KV_BYTES:
        yield f"{container.memory_bytes} bytes of memory for a KV cache of {kv_bytes}"
    if container.environment.get("VLLM_CPU_OMP_THREADS_BIND") != "nobind":
        yield "both sides bind themselves to the same cores"
    if container.grace_seconds <= arguments.shutdown_timeout + 2 * SWEEP_SECONDS:
        yield f"is killed after {container.grace_seconds} s, its requests have {arguments.shutdown_timeout} s"
    for path in ("/tmp/x", "/var/cache/mc2/x"):
        if (mount := _mount_of(container, path)) is None or not mount.writable:
            yield f"cannot write {path}"


def _differences(prefill: Namespace, decode: Namespace) -> Iterator[str]:
    """The fingerprint compares most of it, and would refuse in place; the rest is a trap as well."""
    mine, theirs = vars(prefill), vars(decode)
    for name in mine.keys() - MAY_DIFFER:
        if mine[name] != theirs[name]:
            yield f"--{name} is {mine[name]!r} on prefill, {theirs[name]!r} on decode"


def _mount_of(container: Container, path: str) -> Any:
    """The innermost mount that `path` lies in."""
    over = [mount for mount in container.mounts if PurePosixPath(path).is_relative_to(mount.path)]
    return max(over, key=lambda mount: len(mount.path), default=None)


def _no_meeting(pair: Pair, settings: dict[str, MC2Config]) -> Iterator[str]:
    """Both must find the same folder of the host under the path that they are told."""
    met = set()
    for role, config in settings.items():
        directory = config.resolve_socket_dir()
        mount = _mount_of(pair[role], str(directory))
        if config.socket_dir is None or mount is None:
            yield f"{role}: its socket directory {directory} is in no volume"
        elif not mount.writable:
            yield f"{role}: cannot write its socket directory {directory}"
        elif directory == type(directory)(mount.path):
            # A volume's own folder is root's, or open to all: an engine refuses it. Below, it makes one.
            yield f"{role}: its socket directory {directory} is a mount point"
        else:
            met.add((mount.source, directory.relative_to(mount.path)))
    if len(met) > 1:
        yield f"prefill and decode do not meet: {sorted(map(str, met))}"


def _of_proxy(pair: Pair) -> Iterator[str]:
    argv = pair["proxy"].argv
    if argv[:2] != ["python", "/opt/vllm-mc2/proxy.py"]:
        yield f"proxy: runs {argv[:2]}"
    for role in EXPECTED_ROLE:
        urls = [urlsplit(part.partition("=")[2]) for part in argv if part.startswith(f"--{role}=")]
        if not urls or any(url.scheme != "http" or url.netloc not in pair[role].answers for url in urls):
            yield f"proxy: asks {[url.geturl() for url in urls]} for {role}, which is {sorted(pair[role].answers)}"
