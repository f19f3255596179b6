"""vllm-mc2: decode from the prefill's KV cache in place.

Layout map (dependencies point down, see ``docs/how-it-works.md``)::

    cli/        the command; checks/ is what doctor looks at
    plugin      registers the connector with vLLM; lazy, idempotent, never raises
    bench/      the benchmarks behind ``vllm-mc2 bench``
    connector/  the only importer of vllm: facade, scheduler halves, worker half, compat
    tensors/    MC2Communicator, KVCacheManager, KVCacheMapper: the same without vllm, on torch tensors
    reporting   what leases look like to ``vllm-mc2 inspect``
    session     sessions with peers: listener thread, handshake, death watch
    channel     Unix sockets, frames, descriptors
    leases      index table and ledgers (native) as Python objects
    memory      pools and address ranges (native) as Python objects
    ticket      the way of a ticket through HTTP; digest: what a ticket fits
    protocol    messages
    layout      where layers and blocks lie in a pool and in an address range
    config      ``kv_connector_extra_config`` as one frozen struct
    errors      every exception of this package

Importing this package imports neither vllm nor torch nor the native module.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    from vllm_mc2.tensors import KVCacheManager as KVCacheManager
    from vllm_mc2.tensors import KVCacheMapper as KVCacheMapper
    from vllm_mc2.tensors import MC2Communicator as MC2Communicator

__all__ = ["KVCacheManager", "KVCacheMapper", "MC2Communicator", "__version__"]
_TENSOR_API = frozenset(__all__) - {"__version__"}


def __getattr__(name: str) -> object:
    """The tensor API, imported when it is asked for: it needs torch. And the version, which `pyproject.toml` alone has."""
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("vllm-mc2")
        except PackageNotFoundError:  # a source tree that was never installed
            return "0+unknown"
    if name in _TENSOR_API:
        from vllm_mc2 import tensors

        return getattr(tensors, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
