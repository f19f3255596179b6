"""What a run counts."""

from collections import Counter
from typing import Literal

Kind = Literal["leaks", "wrong_bytes", "hangs"]


class Tally:
    """Problems and figures over all rounds."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rounds = 0
        self.problems: list[tuple[int, Kind, str]] = []
        self.faults: Counter[str] = Counter()
        self.points: Counter[str] = Counter()
        """Strikes per named point."""
        self.ways: Counter[str] = Counter()
        """What became of the requests on decodes."""
        self.resets: Counter[str] = Counter()
        """vLLM refuses to reset a prefix cache while blocks are in use, and on a prefill leases use them."""
        self.lease_ends: Counter[str] = Counter()

    def add(self, kind: Kind, text: str) -> None:
        """A finding of the present round."""
        self.problems.append((self.rounds, kind, text))

    def count(self, kind: Kind) -> int:
        return sum(found == kind for _, found, _ in self.problems)

    def as_json(self) -> dict[str, int]:
        """The last line of the output."""
        return {
            "rounds": self.rounds,
            "faults": sum(self.faults.values()),
            "leaks": self.count("leaks"),
            "wrong_bytes": self.count("wrong_bytes"),
            "hangs": self.count("hangs"),
            "seed": self.seed,
        }
