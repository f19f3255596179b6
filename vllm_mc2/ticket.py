"""The ticket that travels with a request, from prefill's response through a proxy to decode's request.

A client of either HTTP API sees it and may send anything in its place.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from vllm_mc2.errors import TicketError
from vllm_mc2.protocol import PROTOCOL_VERSION, Ticket

TICKET_KEY = "mc2_ticket"


class TcpAddress(NamedTuple):
    """Where a prefill listens for other hosts."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


LOCAL_ADDRESS = TcpAddress("localhost", 0)
"""In tickets of a prefill that does not listen for other hosts: peers meet in the socket directory."""


def ticket_params(ticket: Ticket, engine_id: str, tp_size: int, address: TcpAddress = LOCAL_ADDRESS) -> dict[str, Any]:
    """``kv_transfer_params`` of prefill's response: the field names that proxies and routers know, plus the ticket.

    Its size does not depend on the prompt, and it names no blocks: a client of decode's HTTP API must not be able to
    ask for other people's.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": f"{ticket.slot}-{ticket.generation}",
        "remote_host": address.host,
        "remote_port": address.port,
        "tp_size": tp_size,
        TICKET_KEY: msgspec.to_builtins(ticket),
    }


def parse_ticket(params: Mapping[str, Any]) -> Ticket:
    """The ticket in a decode request's ``kv_transfer_params``, which came through an HTTP API and may hold anything.

    Raises:
        TicketError: no ticket, or one that is not well-formed or of another protocol version.
    """
    raw = params.get(TICKET_KEY)
    if raw is None:
        raise TicketError(f"kv_transfer_params hold no {TICKET_KEY}")
    try:
        ticket = msgspec.convert(raw, Ticket, strict=True)
    except (msgspec.ValidationError, UnicodeError, RecursionError) as error:  # JSON may hold half of a surrogate pair
        raise TicketError(f"malformed {TICKET_KEY}: {error}") from error
    if ticket.version != PROTOCOL_VERSION:
        raise TicketError(f"{TICKET_KEY} is of protocol {ticket.version}, this side speaks {PROTOCOL_VERSION}")
    return ticket


def parse_address(params: Mapping[str, Any]) -> TcpAddress | None:
    """Where a decode request says that its prefill listens, or None. It may be anything: connect only to what a ticket proves."""
    host, port = params.get("remote_host"), params.get("remote_port")
    if not isinstance(host, str) or not 0 < len(host) <= 255 or type(port) is not int or not 0 < port < 65536:
        return None
    # Prefill puts a number there. What is not even printable ASCII has no proof, and half a surrogate pair none to compare.
    return TcpAddress(host, port) if host.isascii() and host.isprintable() else None
