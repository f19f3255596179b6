"""The tensor API: hand KV caches from one process to another without vLLM. Needs torch; imports no vllm.

``from vllm_mc2 import MC2Communicator, KVCacheManager, KVCacheMapper``. It stands on the connector's own sessions, pools,
leases and mappings; see ``docs/tensor-api.md``.
"""

from vllm_mc2.tensors.communicator import MC2Communicator
from vllm_mc2.tensors.manager import CopiedIntoPoolWarning, KVCacheManager, LayerKV
from vllm_mc2.tensors.mapper import KVCacheMapper, MappedKV
from vllm_mc2.tensors.receiver import RemoteKV
from vllm_mc2.tensors.sender import EndedKV, SentKV

__all__ = [
    "CopiedIntoPoolWarning",
    "EndedKV",
    "KVCacheManager",
    "KVCacheMapper",
    "LayerKV",
    "MC2Communicator",
    "MappedKV",
    "RemoteKV",
    "SentKV",
]
