"""Entry point ``vllm.general_plugins``: makes ``"kv_connector": "MC2Connector"`` known to vLLM.

vLLM calls it in every process it starts, more than once, and does not catch what it raises; so it is idempotent, imports
nothing heavy, and turns every failure into one log line.
"""

import logging

logger = logging.getLogger("vllm.mc2.plugin")

CONNECTOR_NAME = "MC2Connector"
CONNECTOR_MODULE = "vllm_mc2.connector"


def register() -> None:
    """Register the connector with vLLM's factory, unless it is there already."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
    except ValueError:
        return  # registered already: vLLM loads plugins several times in one process
    except Exception:
        # Plugin border: raising here would keep every vLLM process on this machine from starting.
        logger.exception("could not register %s; this vLLM cannot use it", CONNECTOR_NAME)
