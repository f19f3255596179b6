"""The prompt digest: what ties a ticket to the prompt it was made for.

It covers everything that determines the KV of the first ``num_tokens`` tokens besides the model itself: token ids, the
LoRA adapter, images and audio (by vLLM's content hashes and positions) and the cache salt. Prefill puts it into the
lease; decode computes it over its own request and refuses a lease that does not match. Without it, prompt A's ticket
sent with prompt B would put A's KV into decode's prefix cache under B's hash.

The digest is keyed with the lease's token, so that a published digest says nothing about the prompt to anybody
who does not hold the ticket.
"""

import hashlib
from array import array
from collections.abc import Sequence

import msgspec

DIGEST_BYTES = 32


class PromptExtras(msgspec.Struct, frozen=True, array_like=True):
    """What else than token ids determines a prompt's KV."""

    lora_name: str | None = None
    cache_salt: str | None = None
    media: tuple[tuple[str, int, int], ...] = ()
    """(content hash, first position, number of positions) of each image, audio or video that begins in the prompt."""


def prompt_digest(token: bytes, token_ids: Sequence[int], extras: PromptExtras) -> bytes:
    """32 bytes over ``token_ids`` (each 0 .. 2**32 - 1) and ``extras``, keyed with the lease's 16-byte ``token``.

    Raises:
        OverflowError: a token id is negative or too large.
    """
    digest = hashlib.blake2b(key=token, digest_size=DIGEST_BYTES)
    packed = msgspec.msgpack.encode((len(token_ids), extras))
    digest.update(len(packed).to_bytes(8, "little"))
    digest.update(packed)
    digest.update(array("I", token_ids).tobytes())
    return digest.digest()
