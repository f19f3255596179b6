"""Proof that the fuzzers find bugs: copies of the package with one each, and after how many inputs it is found.

``python -m tests.fuzz.mutants [NAME ...]``; exit code 1 when a bug is not found. With ``--native`` also bugs in C++, each of
which takes a build.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import vllm_mc2
import vllm_mc2._native
from tests.fuzz.campaign import ROOT, python_command, run_target
from tests.fuzz.native import fuzzer_archive

RUNS = 50_000
NATIVE_RUNS = 200_000


class Mutant(NamedTuple):
    """A bug: ``old`` in ``file`` becomes ``new``; ``target`` is to find it."""

    target: str
    file: str
    old: str
    new: str


MUTANTS = {
    "a pool's regions may end behind it": Mutant(
        "protocol", "layout.py", "        if end > self.pool_bytes:\n", "        if end > 2 * self.pool_bytes:\n"
    ),
    "regions may overlap": Mutant("layout", "layout.py", "region.offset_bytes < end or ", ""),
    "a tensor may leave its pool": Mutant(
        "mail", "tensors/messages.py", " or self.offset_bytes + self.span_bytes > pool_bytes", ""
    ),
    "half of a surrogate pair ends the scheduler's hook": Mutant(
        "ticket", "ticket.py", "msgspec.ValidationError, UnicodeError, ", "msgspec.ValidationError, "
    ),
    "invalid UTF-8 ends a session with another error": Mutant(
        "protocol",
        "protocol.py",
        "(msgspec.MsgspecError, UnicodeDecodeError, RecursionError)",
        "(msgspec.ValidationError, RecursionError)",
    ),
    "descriptors of a refused frame stay open": Mutant(
        "frame",
        "channel.py",
        "        except BaseException:\n            close_all(fds)\n            raise\n        return message, fds",
        "        except BaseException:\n            raise\n        return message, fds",
    ),
    "a lost descriptor is not noticed": Mutant("frame", "channel.py", "flags & _CTRUNC or ", ""),
    "a frame may have any length": Mutant(
        "buffer", "channel.py", "    if size > max_bytes:\n", "    if size > 1 << 31:\n"
    ),
    "a frame's tag is not looked at": Mutant(
        "stream",
        "network/stream.py",
        "if not hmac.compare_digest(tag, frame_tag(self._receive_key, self._num_received, payload)):",
        "if False:",
    ),
    "a frame may be repeated": Mutant("stream", "network/stream.py", "            self._num_received += 1\n", ""),
    "inspect prints what a terminal obeys": Mutant(
        "report", "cli/tables.py", 'character if character.isprintable() else "?"', "character"
    ),
    "a decoder opens what a setting names": Mutant(
        "ticket",
        "ticket.py",
        "    raw = params.get(TICKET_KEY)\n",
        "    raw = params.get(TICKET_KEY)\n    open('/dev/null').close()\n",
    ),
}
NATIVE = {
    "more blocks than a slot takes": Mutant(
        "reader", "lease/claimant.cpp", "if (num_blocks > max_blocks_) {", "if (num_blocks > 4 * max_blocks_) {"
    ),
    "a slot that is none": Mutant("reader", "lease/claimant.cpp", "slot >= entries_.size()", "slot > entries_.size()"),
    "a header that is believed": Mutant(
        "open",
        "lease/segment.cpp",
        '    require_equal("file size", file.num_bytes, geometry.total_bytes);\n',
        "",
    ),
    "a ledger ends other decodes' claims": Mutant(
        "table", "lease/layout.h", "claims > releases ? claims - releases : 0U", "claims - releases"
    ),
}


def changed(mutant: Mutant, text: str) -> str:
    """The text with the bug.

    Raises:
        ValueError: the code has changed, and the list here has not.
    """
    if mutant.old not in text:
        raise ValueError(f"{mutant.file} has no more: {mutant.old}")
    return text.replace(mutant.old, mutant.new)


def run_mutant(name: str, mutant: Mutant) -> bool:
    """Whether the target finds it; prints how."""
    with tempfile.TemporaryDirectory() as directory:
        source, copy = Path(str(vllm_mc2.__file__)).parent, Path(directory) / "vllm_mc2"
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(str(vllm_mc2._native.__file__), copy)
        path = copy / mutant.file
        path.write_text(changed(mutant, path.read_text()))
        os.environ["MC2_FUZZ_PACKAGE"] = directory
        try:
            return _report(name, mutant, python_command(mutant.target, Path(directory)), Path(directory), RUNS)
        finally:
            del os.environ["MC2_FUZZ_PACKAGE"]


def run_native_mutant(name: str, mutant: Mutant) -> bool:
    """The same in C++."""
    with tempfile.TemporaryDirectory() as directory:
        source, copy = ROOT / "csrc", Path(directory) / "csrc"
        shutil.copytree(source, copy)
        path = copy / mutant.file
        path.write_text(changed(mutant, path.read_text()))
        files = [*copy.glob("lease/*.cpp"), *copy.glob("memory/*.cpp"), *copy.glob("tests/fuzz_[cln]*.cpp")]
        flags = [
            "-std=c++20",
            "-g",
            "-O1",
            "-fsanitize=address,undefined",
            "-fno-sanitize-recover=all",
            "-fsanitize-coverage=trace-pc,trace-cmp",
        ]
        binary = Path(directory) / "fuzz"
        link = [str(fuzzer_archive()), "-Wl,--wrap=__sanitizer_cov_trace_pc", "-pthread", "-o", str(binary)]
        subprocess.run([os.environ.get("CXX", "c++"), *flags, f"-I{copy}", *map(str, files), *link], check=True)
        command = [str(binary), mutant.target, f"-artifact_prefix={directory}/{mutant.target}-", "-max_len=512"]
        return _report(name, mutant, command, Path(directory), NATIVE_RUNS)


def _report(name: str, mutant: Mutant, command: list[str], folder: Path, runs: int) -> bool:
    result = run_target(mutant.target, command, folder, [f"-runs={runs}", "-seed=1", "-print_final_stats=1"])
    log = (folder / f"{mutant.target}.log").read_text(errors="replace")
    signs = ("Error:", "fuzz:", "ERROR: AddressSanitizer", "runtime error")
    why = next((line.strip()[:150] for line in log.splitlines() if any(sign in line for sign in signs)), "")
    is_found = bool(result.failures)
    print(
        f"{'found' if is_found else 'MISSED'} by {mutant.target} after {result.num_inputs:,} inputs: {name}: {why}",
        flush=True,
    )
    return is_found


def main() -> int:
    """The exit code."""
    words = [word for word in sys.argv[1:] if word != "--native"]

    def is_chosen(name: str) -> bool:
        return not words or any(word in name for word in words)

    found = [run_mutant(name, MUTANTS[name]) for name in MUTANTS if is_chosen(name)]
    if "--native" in sys.argv:
        found += [run_native_mutant(name, NATIVE[name]) for name in NATIVE if is_chosen(name)]
    return 0 if found and all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
