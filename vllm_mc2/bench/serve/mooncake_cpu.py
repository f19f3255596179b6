"""A shim that lets vLLM's MooncakeConnector start on the CPU backend; nothing of it is ours otherwise.

vLLM 0.32's worker half asks `torch.accelerator` for the current device when it is constructed, which raises on
a host without an accelerator. Mooncake itself moves host memory over TCP without one. A server that is given
this module as ``kv_connector_module_path`` gets 0 as the answer, and then the connector as it is. Only a
comparison needs this: the change is to the importing process's torch, so import it nowhere else.
"""

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector

__all__ = ["MooncakeConnector"]

if not torch.accelerator.is_available():
    torch.accelerator.current_device_index = lambda: 0
