"""vllm-mc2 under a name that is not its own, for programs that accept only names they know; Dynamo is one.

    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_connector_module_path": "vllm_mc2.connector.aliases", ...}'

The name is borrowed, nothing else: what runs is :class:`~vllm_mc2.connector.MC2Connector`. It does not speak NIXL and needs
no NIXL, so prefill and decode must both be vllm-mc2, under whichever name. Everything that it says of itself says so: the
class that vLLM logs, the logger, the metrics (``vllm:mc2_*``). A ticket of a real NixlConnector is no ticket here
(``bad_ticket``), and the log names whose it was. With this name vLLM itself applies its rules for NIXL; what that means is in
``docs/routers.md``.

Source: ``KVConnectorFactory.get_connector_class`` (a module path goes before vLLM's own registry) and
``dynamo/vllm/kv_connector_protocols.py`` of ai-dynamo 1.6.1.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from vllm_mc2.connector import compat
from vllm_mc2.connector.connector import MC2Connector
from vllm_mc2.ticket import TICKET_KEY, parse_address

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

__all__ = ["MC2ConnectorUnderNixlsName", "NixlConnector"]

logger = logging.getLogger("vllm.mc2.aliases")

_MAX_STRANGERS = 16
_MAX_NAME_CHARACTERS = 64


class MC2ConnectorUnderNixlsName(MC2Connector):
    """vllm-mc2, asked for as ``NixlConnector``. It is not NIXL's connector, does not speak NIXL, and says so at start."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        """Hook, as of :class:`MC2Connector`, with the same errors. Logs once per engine whose name is borrowed."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._strangers: set[str] = set()
        if role is KVConnectorRole.SCHEDULER:
            logger.warning(
                "this is vllm-mc2 under the borrowed name NixlConnector: it does not speak NIXL, and hands over only to and "
                "from engines that run vllm-mc2 as well"
            )

    def on_new_request(self, request: "Request") -> None:
        """Hook: a request has arrived. Names the peer whose ticket is a real NixlConnector's; then it is refused as any other."""
        params = compat.transfer_params(request)
        if is_of_nixl(params):
            peer = _peer_of(params)
            # A client can make it up: what is remembered and logged is bounded.
            if peer not in self._strangers and len(self._strangers) < _MAX_STRANGERS:
                self._strangers.add(peer)
                logger.warning(
                    "request %s comes with kv_transfer_params of a real NixlConnector, engine %s; refused as bad_ticket. That "
                    "prefill must run vllm-mc2 too",
                    request.request_id,
                    peer,
                )
        super().on_new_request(request)


def is_of_nixl(params: Mapping[str, Any]) -> bool:
    """Whether a decode request's ``kv_transfer_params`` are those of vLLM's NixlConnector: blocks by number, no ticket."""
    wants = params.get("do_remote_prefill") is True
    return wants and TICKET_KEY not in params and params.get("remote_block_ids") is not None


def _peer_of(params: Mapping[str, Any]) -> str:
    """The peer's engine id and address, whatever a client has put there, as a short text of one line."""
    name = params.get("remote_engine_id")
    name = repr(name[:_MAX_NAME_CHARACTERS]) if isinstance(name, str) else "without a name"
    address = parse_address(params)
    return name if address is None else f"{name} at {str(address)!r}"


NixlConnector = MC2ConnectorUnderNixlsName
"""The name by which vLLM looks the class up; the class keeps its own, which is the one that vLLM logs."""

# Inside a MultiConnector vLLM looks a child's statistics up by the name of its class.
with suppress(ValueError):
    KVConnectorFactory.register_connector(
        MC2ConnectorUnderNixlsName.__name__, __name__, MC2ConnectorUnderNixlsName.__name__
    )
