"""What entering borrowed blocks into vLLM's scheduler costs: the connector's own code on vLLM's real block pool.

Runs in a process of its own, ``python -m vllm_mc2.bench.registration FD``, which writes its result to that descriptor:
importing vLLM takes seconds and a lot of memory, which nothing else of the benchmark needs.
"""

import gc
import importlib.util
import os
import subprocess
import sys
import time

import msgspec

from vllm_mc2.bench.stats import Spread, spread

NUM_BLOCKS = (32, 256, 2048)
BLOCK_TOKENS = 16
REPEATS = {False: 100, True: 30}
IMPORT_SECONDS = 240.0
_POOL_BLOCKS = 64
_FIRST_WINDOW_BLOCK = 4096


class Registration(msgspec.Struct, frozen=True):
    """One length of block table; microseconds per block."""

    num_blocks: int
    attach_us_per_block: Spread
    """Entering the blocks into the prefix cache, once for each request."""
    end_us_per_block: Spread
    """Taking them out again after the request."""


class RegistrationError(Exception):
    """It could not be measured; the message says why."""


def is_possible() -> bool:
    """Whether vLLM is installed."""
    return importlib.util.find_spec("vllm") is not None


def measure_apart(*, quick: bool) -> list[Registration]:
    """Measure in a new process.

    Raises:
        RegistrationError: it failed, or took too long.
    """
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-m", "vllm_mc2.bench.registration", str(write_fd), "quick" if quick else "full"]
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", **os.environ}
    with os.fdopen(read_fd, "rb") as result:
        try:
            done = subprocess.run(
                command,
                env=environment,
                pass_fds=[write_fd],
                capture_output=True,
                text=True,
                timeout=IMPORT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RegistrationError(f"vLLM's block pool: no result in {IMPORT_SECONDS:.0f} s") from error
        finally:
            os.close(write_fd)
        data = result.read()
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise RegistrationError(f"vLLM's block pool: {lines[-1][:200]}")
    return msgspec.json.decode(data, type=list[Registration])


def measure(*, quick: bool) -> list[Registration]:
    """Measure here; imports vLLM."""
    from vllm.v1.core.block_pool import BlockPool

    from vllm_mc2.connector.borrowed import BorrowedBlocks, Loan

    block_pool = BlockPool(_POOL_BLOCKS, enable_caching=True, hash_block_size=BLOCK_TOKENS)
    released: list[Loan] = []
    borrowed = BorrowedBlocks(block_pool, BLOCK_TOKENS, released.append)

    def once(num_blocks: int, repeat: int) -> tuple[int, int]:
        hashes = [os.urandom(32) for _ in range(num_blocks)]
        block_ids = tuple(range(_FIRST_WINDOW_BLOCK, _FIRST_WINDOW_BLOCK + num_blocks))
        loan = Loan("0" * 32, (0, repeat), num_blocks * BLOCK_TOKENS, block_ids, {"request"})
        begin = time.monotonic_ns()
        if not borrowed.attach(loan, hashes):
            raise RegistrationError("a fresh block was refused")
        attached = time.monotonic_ns()
        loan.users.clear()
        borrowed.end(loan)
        ended = time.monotonic_ns()
        if released.pop() is not loan or len(borrowed):
            raise RegistrationError("a loan did not end")
        return attached - begin, ended - attached

    results = []
    for num_blocks in NUM_BLOCKS:
        once(num_blocks, 0)
        gc.collect()
        gc.freeze()
        gc.disable()
        samples = [once(num_blocks, repeat) for repeat in range(REPEATS[quick])]
        gc.enable()
        attach, end = ([sample[side] / num_blocks / 1e3 for sample in samples] for side in (0, 1))
        results.append(Registration(num_blocks, spread(attach), spread(end)))
    return results


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "wb") as out:
        out.write(msgspec.json.encode(measure(quick=sys.argv[2] == "quick")))
