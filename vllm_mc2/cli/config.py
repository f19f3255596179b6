"""``vllm-mc2 config``: the value of vLLM's ``--kv-transfer-config``, checked as the engine will check it."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from vllm_mc2.cli.exits import OK, USAGE, epilog

CONNECTOR_NAME = "MC2Connector"
CONNECTOR_MODULE = "vllm_mc2.connector"
"""Both as in ``vllm_mc2.plugin``."""

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
MAX_ENGINE_ID_CHARS = 256
_OPTIONS = ("mode", "socket_dir", "tcp_address")
"""Keys that have an option of their own."""

_DESCRIPTION = """\
Prints the JSON for vLLM's --kv-transfer-config on one line, and nothing else. Every key of kv_connector_extra_config can be
set, and is checked by the code with which the engine checks it when it starts. So a tcp_secret_file must be on this host.
"""

_EXAMPLES = """\
examples:
  vllm serve MODEL --port 8100 --kv-transfer-config "$(vllm-mc2 config --role prefill)"
  vllm serve MODEL --port 8200 --kv-transfer-config "$(vllm-mc2 config --role decode --policy recompute)"
  vllm-mc2 config --role prefill --set huge_pages=require --set offer_timeout_seconds=120
  vllm-mc2 config --role prefill --tcp-address 10.0.0.1 --set tcp_port=14000 --set tcp_secret_file=$HOME/mc2-secret
  vllm-mc2 config --keys                             every key, its default and what it accepts
  vllm-mc2 doctor --config "$(vllm-mc2 config --role prefill)"
                                                     would an engine like this run here?
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``config``."""
    parser = commands.add_parser(
        "config",
        help="print the JSON for vLLM's --kv-transfer-config",
        description=_DESCRIPTION,
        epilog=epilog(_EXAMPLES, ok="printed"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--role", choices=list(ROLES), help="what this engine does")
    what.add_argument("--keys", action="store_true", help="print every key, its default and what it accepts")
    parser.add_argument(
        "--mode", metavar="MODE", help="attach (in place), pull (copy) or auto (in place where it can be; the default)"
    )
    parser.add_argument(
        "--policy",
        choices=["fail", "recompute"],
        help="decode, kv_load_failure_policy: fail a request whose ticket cannot be used (vLLM's default), or compute it",
    )
    parser.add_argument("--engine-id", metavar="ID", help="a name for logs and inspect (default: vLLM makes one up)")
    parser.add_argument(
        "--socket-dir", metavar="DIR", help="where the engines of this host meet; the same on both sides"
    )
    parser.add_argument("--tcp-address", metavar="HOST", help="this host's address, for decodes on other hosts")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="settings",
        help="any key of kv_connector_extra_config; may be given several times",
    )
    parser.add_argument(
        "--module-path",
        action="store_true",
        help=f"also name {CONNECTOR_MODULE}, for where VLLM_PLUGINS keeps plugins from loading",
    )
    parser.add_argument("--pretty", action="store_true", help="on several lines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the JSON; the exit code."""
    import msgspec

    from vllm_mc2.errors import ConfigError

    if args.keys:
        print(keys_table())
        return OK
    try:
        config = build(args)
    except ConfigError as error:
        print(f"vllm-mc2 config: {error}", file=sys.stderr)
        return USAGE
    data = msgspec.json.encode(config)
    print((msgspec.json.format(data, indent=2) if args.pretty else data).decode())
    if "tcp_secret" in config.get("kv_connector_extra_config", {}):
        text = (
            "the secret is in this output, in vllm's command line and in its log; tcp_secret_file keeps it out of them"
        )
        print(f"vllm-mc2 config: {text}", file=sys.stderr)
    return OK


def build(args: argparse.Namespace) -> dict[str, Any]:
    """The configuration for vLLM, with only what was asked for.

    Raises:
        ConfigError: a key, its value, or what they make together, with what is allowed.
    """
    from vllm_mc2.config import parse_config
    from vllm_mc2.errors import ConfigError

    extra = extra_config(args)
    parse_config(extra)  # as the engine does: also resolves the directory and the secret
    config: dict[str, Any] = {"kv_connector": CONNECTOR_NAME, "kv_role": ROLES[args.role]}
    if args.engine_id is not None:
        if not 0 < len(args.engine_id) <= MAX_ENGINE_ID_CHARS:
            raise ConfigError(f"--engine-id {args.engine_id!r}: expected 1 to {MAX_ENGINE_ID_CHARS} characters")
        config["engine_id"] = args.engine_id
    if args.policy is not None:
        config["kv_load_failure_policy"] = args.policy
    if args.module_path:
        config["kv_connector_module_path"] = CONNECTOR_MODULE
    if extra:
        config["kv_connector_extra_config"] = extra
    return config


def extra_config(args: argparse.Namespace) -> dict[str, object]:
    """What goes to ``kv_connector_extra_config``, in the types of its keys.

    Raises:
        ConfigError: not ``KEY=VALUE``, a key twice, no such key, or a value of the wrong kind.
    """
    from vllm_mc2.errors import ConfigError

    texts: dict[str, str] = {}
    given = [(key, getattr(args, key)) for key in _OPTIONS if getattr(args, key) is not None]
    for item in args.settings:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {item}: expected KEY=VALUE; vllm-mc2 config --keys lists the keys")
        given.append((key.strip(), value))
    for key, value in given:
        if key in texts:
            raise ConfigError(f"{key} is given twice")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{key}: expected text that UTF-8 can say") from None
        texts[key] = value
    if "socket_dir" in texts:
        texts["socket_dir"] = os.fspath(Path(texts["socket_dir"]).expanduser().absolute())
    return {key: _typed(key, value) for key, value in texts.items()}


def _typed(key: str, text: str) -> object:
    """What ``text`` says in the type of ``key``, as far as a text can: ``"4"`` for a whole number, ``"true"`` for a truth."""
    import msgspec

    from vllm_mc2.config import MC2Config, allowed, parse_config, wrong_value
    from vllm_mc2.errors import ConfigError

    types = {field.encode_name: field.type for field in msgspec.structs.fields(MC2Config)}
    if key not in types:
        parse_config({key: text})  # refuses it, and names the keys that there are
    try:
        value: object = msgspec.convert(text, types[key], strict=False)
    except msgspec.ValidationError:
        raise ConfigError(wrong_value(key, _as_json(text), allowed(key))) from None
    return value


def _as_json(text: str) -> object:
    """A number as a number, so that the message is the engine's."""
    import msgspec

    try:
        value: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return value


def keys_table() -> str:
    """Every key, one a line: its name, its default as JSON, what it accepts."""
    import msgspec

    from vllm_mc2.config import MC2Config, allowed

    rows = [("KEY", "DEFAULT", "ALLOWED")]
    for field in msgspec.structs.fields(MC2Config):
        default = msgspec.json.encode(field.default).decode()
        rows.append((field.encode_name, default, allowed(field.encode_name)))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{key:{widths[0]}}  {default:{widths[1]}}  {text}" for key, default, text in rows)
