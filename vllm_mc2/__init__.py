"""vllm-mc2: decode from the prefill's KV cache in place.

Layout map (dependencies point down, see ``docs/how-it-works.md``)::

    plugin      registers the connector with vLLM; lazy, idempotent, never raises
    connector/  the only importer of vllm: facade, scheduler halves, worker half, compat
    session     sessions with peers: listener thread, handshake, death watch
    channel     Unix sockets, frames, descriptors
    leases      index table and ledgers (native) as Python objects
    memory      pools and address ranges (native) as Python objects
    protocol    messages and tickets; digest: what a ticket fits
    layout      where layers and blocks lie in a pool and in an address range
    config      ``kv_connector_extra_config`` as one frozen struct
    errors      every exception of this package

Importing this package imports neither vllm nor torch nor the native module.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("vllm-mc2")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
