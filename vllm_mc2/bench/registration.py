"""What entering borrowed blocks into vLLM's scheduler costs: the connector's own code on vLLM's real block pool.

Runs in a process of its own, ``python -m vllm_mc2.bench.registration FD``: importing vLLM takes seconds and a lot of memory,
which nothing else of the benchmark needs. The process says on that descriptor when it is ready, waits for a line on its
standard input, and writes its result; at the end of its input it ends.
"""

import gc
import importlib.util
import os
import select
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

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


class Apart:
    """The process that measures. It imports vLLM from the start, and then sleeps until it is asked. A context manager."""

    def __init__(self, *, quick: bool) -> None:
        read_fd, write_fd = os.pipe()
        self._log = os.memfd_create("mc2-bench-log", os.MFD_CLOEXEC)
        command = [sys.executable, "-m", "vllm_mc2.bench.registration", str(write_fd), "quick" if quick else "full"]
        try:
            self._process = subprocess.Popen(
                command,
                env={"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", **os.environ},
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[write_fd],
            )
        finally:
            os.close(write_fd)
        self._result = os.fdopen(read_fd, "rb", buffering=0)
        self._is_ready = False

    def await_ready(self) -> None:
        """Until it has imported vLLM, and uses no processor any more.

        Raises:
            RegistrationError: it ended instead, or takes too long.
        """
        if not self._is_ready:
            self._read_line()
            self._is_ready = True

    def measure(self) -> list[Registration]:
        """The result; the process ends.

        Raises:
            RegistrationError: it failed, or took too long.
        """
        self.await_ready()
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._read_line(), type=list[Registration])

    def _read_line(self) -> bytes:
        deadline = time.monotonic() + IMPORT_SECONDS
        data = b""
        while not data.endswith(b"\n"):
            if not select.select([self._result], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise RegistrationError(f"vLLM's block pool: no answer in {IMPORT_SECONDS:.0f} s")
            more = self._result.read(1 << 16)
            if not more:
                raise RegistrationError(f"vLLM's block pool: {self._last_words()}")
            data += more
        return data

    def _last_words(self) -> str:
        lines = os.pread(self._log, 1 << 20, 0).decode(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "its process has ended"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._result.close()
        os.close(self._log)


def measure(*, quick: bool) -> list[Registration]:
    """Measure here; imports vLLM if nobody has."""
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


def main(result_fd: int, *, quick: bool) -> None:
    """What the process does."""
    import vllm.v1.core.block_pool  # noqa: F401

    import vllm_mc2.connector.borrowed  # noqa: F401

    with os.fdopen(result_fd, "wb", buffering=0) as result:
        result.write(b"ready\n")
        if sys.stdin.readline():
            result.write(msgspec.json.encode(measure(quick=quick)) + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), quick=sys.argv[2] == "quick")
