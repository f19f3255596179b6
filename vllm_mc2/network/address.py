"""The configured address of this host."""

import ipaddress
import socket

from vllm_mc2.config import wrong_value
from vllm_mc2.errors import ConfigError


def resolve_own_address(name: str) -> str:
    """The numeric address of ``tcp_address``: that itself, or what a name stands for here.

    Raises:
        ConfigError: it stands for nothing, or for every address of the host, which no other host could connect to.
    """
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(wrong_value("tcp_address", name, f"an address or name of this host ({error})")) from error
    host = str(found[0][4][0])
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified or address.is_multicast:
        raise ConfigError(
            wrong_value("tcp_address", name, "one address of this host, not a wildcard: tickets name it to other hosts")
        )
    return host
