"""What is made with the secret that all hosts share: proofs of an address, of a session's two sides, and tags of frames.

Every key is derived for one purpose, so that nothing made for one can be used for another. The secret itself is never sent.
"""

import hmac
import struct
from typing import NamedTuple

from vllm_mc2.protocol import TcpChallenge
from vllm_mc2.ticket import TcpAddress

TAG_BYTES = 16
_SEQUENCE = struct.Struct("<Q")
_SECONDS = struct.Struct("<dd")


def _derive(secret: bytes, *parts: bytes) -> bytes:
    """32 bytes. Each part is preceded by its length, so that no two lists of parts look alike."""
    text = b"".join(len(part).to_bytes(4, "little") + part for part in (b"vllm-mc2", *parts))
    return hmac.digest(secret, text, "sha256")


def address_proof(secret: bytes, incarnation: str, address: TcpAddress) -> str:
    """32 hex digits for a ticket: who knows the secret says that this incarnation listens there. Without it a client of decode's
    HTTP API could make decode connect anywhere.
    """
    parts = (incarnation.encode(), address.host.encode(), str(address.port).encode())
    return _derive(secret, b"address", *parts)[:TAG_BYTES].hex()


def is_proven(secret: bytes, incarnation: str, address: TcpAddress, proof: str | None) -> bool:
    """Whether a ticket's proof is the one for this address."""
    return proof is not None and hmac.compare_digest(address_proof(secret, incarnation, address), proof)


class SessionKeys(NamedTuple):
    """Of one connection; both sides get the same ones."""

    client_proof: bytes
    server_proof: bytes
    client_key: bytes
    """Of the frames that the client sends."""
    server_key: bytes


def session_keys(
    secret: bytes, challenge: TcpChallenge, client_nonce: bytes, client_timeout_seconds: float
) -> SessionKeys:
    """Everything that was said in the clear goes into the keys, so that a change on the way makes the proofs fail."""
    seconds = _SECONDS.pack(challenge.timeout_seconds, client_timeout_seconds)
    said = (challenge.nonce, client_nonce, seconds, str(challenge.protocol).encode())
    labels = (b"client proof", b"server proof", b"client key", b"server key")
    return SessionKeys(*(_derive(secret, label, *said) for label in labels))


def frame_tag(key: bytes, sequence: int, payload: bytes) -> bytes:
    """16 bytes for the frame with this number in its direction: no frame can be changed, left out, repeated or put elsewhere."""
    return hmac.digest(key, _SEQUENCE.pack(sequence) + payload, "sha256")[:TAG_BYTES]
