"""``--config``: what an engine would be given as ``--kv-transfer-config``."""

from typing import Literal

import msgspec

from vllm_mc2.ascend.settings import parse_foreign
from vllm_mc2.cli.config import CONNECTOR_NAME
from vllm_mc2.config import MC2Config, parse_config
from vllm_mc2.errors import ConfigError
from vllm_mc2.findings import Finding

Role = Literal["kv_producer", "kv_consumer", "kv_both"]
_ADVICE = "vllm-mc2 config prints a right one, vllm-mc2 config --keys every key"


class Wanted(msgspec.Struct, frozen=True):
    """What an engine here would be; without ``--config`` anything, with the default settings."""

    config: MC2Config = MC2Config()
    role: Role | None = None


class _Connector(msgspec.Struct, frozen=True):
    """What of vLLM's ``KVTransferConfig`` concerns us; the rest is vLLM's to check."""

    kv_connector: str
    kv_role: Role | None = None
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    engine_id: str | None = None
    kv_connector_module_path: str | None = None
    kv_connector_extra_config: dict[str, object] = {}


def read_settings(text: str) -> tuple[Wanted, Finding]:
    """What ``text`` asks for, with what is to be said of it; the defaults where it is wrong."""
    name = "configuration"
    try:
        connector = _ours(msgspec.json.decode(text, type=_Connector))
        extra = connector.kv_connector_extra_config
        config = parse_config(parse_foreign(extra)[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return Wanted(), Finding(name, "fail", f"not a --kv-transfer-config: {error}", _ADVICE)
    except ConfigError as error:
        return Wanted(), Finding(name, "fail", str(error), _ADVICE)
    role = connector.kv_role
    if role is None:
        text = "kv_role is missing: expected one of 'kv_producer', 'kv_consumer', 'kv_both'"
        return Wanted(config), Finding(name, "fail", text, _ADVICE)
    settings = ", ".join(sorted(extra)) or "all defaults"
    detail = f"{role}, kv_load_failure_policy {connector.kv_load_failure_policy}; {settings}"
    return Wanted(config, role), Finding(name, "pass", f"an engine would take it: {detail}")


def _ours(connector: _Connector) -> _Connector:
    """That itself, or the one of ours in a ``MultiConnector``."""
    if connector.kv_connector == CONNECTOR_NAME:
        return connector
    if connector.kv_connector == "MultiConnector":
        inner = msgspec.convert(connector.kv_connector_extra_config.get("connectors", []), list[_Connector])
        found = [each for each in inner if each.kv_connector == CONNECTOR_NAME]
        if len(found) == 1:
            return found[0]
        raise ConfigError(f"a MultiConnector with {len(found)} {CONNECTOR_NAME}, expected one")
    raise ConfigError(f"kv_connector = {connector.kv_connector!r}: expected {CONNECTOR_NAME}")
