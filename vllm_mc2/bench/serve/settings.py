"""What a run of ``vllm-mc2 bench serve`` shall do. Plain data; importing it costs nothing."""

from __future__ import annotations

import msgspec

BASE_SYSTEMS = ("single", "none", "mc2")
PEERS = ("nixl", "mooncake", "example")
SYSTEMS = (*BASE_SYSTEMS, *PEERS)

ANSWER_TOKENS = 33
"""Tokens of a measured answer: the first, and 32 gaps between tokens after it."""
STEADY_TOKENS = 97
"""Length of the answers by which our time between tokens is compared with that of a pair without hand-off, turn by turn."""
SHORT_ANSWER_TOKENS = 8
"""Tokens of an answer of which only the first is timed; the others show that it is right."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the command line decides."""

    models: tuple[str, ...] = ()
    """Model folders."""
    fat: bool = False
    """Also the random model with 64 KiB of KV per token."""
    lengths: tuple[int, ...] = (256, 1024, 2048, 4096)
    """Prompt lengths in tokens; each is rounded up to whole blocks, and one token is added."""
    fat_lengths: tuple[int, ...] = ()
    """The same for the random model; empty: like ``lengths``."""
    repeats: int = 5
    systems: tuple[str, ...] = SYSTEMS
    concurrency: tuple[int, ...] = (1, 4, 8)
    kv_gib: float | None = None
    """KV cache of each server in GiB; None: what the longest prompts and the highest concurrency need."""
    ready_seconds: float = 600.0
    """How long servers that start together may take."""
    seed: int = 1

    @property
    def steady_turns(self) -> int:
        """How many such answers."""
        return min(12, 4 * self.repeats)

    def lengths_of(self, *, fat: bool) -> tuple[int, ...]:
        """Prompt lengths for one model, ascending, each once."""
        return tuple(sorted(set((self.fat_lengths or self.lengths) if fat else self.lengths)))
