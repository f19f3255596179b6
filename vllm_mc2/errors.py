"""Every exception that vllm-mc2 raises on purpose, named for what the caller can do about it."""


class MC2Error(Exception):
    """Base of all errors of this package."""


class ConfigError(MC2Error, ValueError):
    """A setting is wrong. The message names the key, the value and what is allowed. Raised at start only."""


class LayoutError(MC2Error, ValueError):
    """A KV cache cannot be laid out or shared the way it was asked for; attach is impossible with it."""


class ProtocolError(MC2Error, ValueError):
    """A peer sent something that the protocol does not allow. The session with that peer ends, nothing else."""


class TicketError(MC2Error, ValueError):
    """A request's ``kv_transfer_params`` hold no usable ticket. That request is handled without one."""


class PeerRefusedError(MC2Error):
    """The peer answered, and refused. ``field`` names what differs."""

    def __init__(self, field: str, mine: str, theirs: str) -> None:
        super().__init__(f"refused: {field} differs (here {mine!r}, there {theirs!r})")
        self.field = field
        self.mine = mine
        self.theirs = theirs


class PeerUnreachableError(MC2Error, OSError):
    """No session with the peer could be made: nobody listens, wrong owner, or no answer in time."""


class TransportError(MC2Error, OSError):
    """The engine that reads other hosts' memory does not start, or could not read. What it was to bring is not there."""


class DeviceError(MC2Error, OSError):
    """A device's library is not there, or a call to it failed; the message has the call and its code."""


class UsageError(MC2Error):
    """A call that this object, in its present state, cannot serve. The message says what to do instead."""


class OrphanedKVError(MC2Error):
    """The prefill that holds a request's KV cache was gone before the cache was mapped: compute it anew."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request {request_id!r}: its prefill is gone, its KV cache must be computed anew")
        self.request_id = request_id


class ExpiredKVError(MC2Error):
    """A request's lease was over before the cache was mapped (its offer timeout): compute it anew, or ask again."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request {request_id!r}: its lease is over, its KV cache must be computed anew")
        self.request_id = request_id
