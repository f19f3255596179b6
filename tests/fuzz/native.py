"""Targets in C++, over the core's own classes, under AddressSanitizer and UndefinedBehaviorSanitizer."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from tests.fuzz.campaign import ROOT
from tests.support.locking import alone

WHAT = {
    "native-open": "LeaseReader: segments that somebody else made",
    "native-reader": "Claimant: an index table that prefill changes while decode reads it",
    "native-table": "LeaseTable: ledgers that a decode writes anything into",
    "native-copy": "AddressRange, PartMap and BlockCopier with a peer's numbers",
}
NAMES = tuple(WHAT)
BINARY = ROOT / "build" / "fuzz-native" / "csrc" / "tests" / "fuzz_native"


def fuzzer_archive() -> Path:
    """LLVM's libFuzzer as atheris brings it, so that GCC is enough.

    Raises:
        FileNotFoundError: atheris is not installed, or is another version.
    """
    spec = importlib.util.find_spec("atheris")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("atheris is not installed")
    path = Path(spec.origin).parents[1] / "libclang_rt.fuzzer_no_main.a"
    if not path.exists():
        raise FileNotFoundError(f"this atheris has no {path.name}")
    return path


def build() -> None:
    """Build the fuzzer, unless it is there and nothing has changed."""
    with alone(BINARY.parents[2]):
        _build()


def _build() -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in (
        ["cmake", "--preset", "fuzz", f"-DMC2_FUZZER_ARCHIVE={fuzzer_archive()}"],
        ["cmake", "--build", "--preset", "fuzz"],
    ):
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


def command(name: str, folder: Path, *, has_corpus: bool = True) -> list[str]:
    """Of a target in C++. Without a corpus it runs the file that is named among the options."""
    corpus = folder / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    options = [
        f"-artifact_prefix={folder}/{name}-",
        "-max_len=2048",
        "-timeout=60",
        "-rss_limit_mb=4096",
        "-print_final_stats=1",
    ]
    return [str(BINARY), name.removeprefix("native-"), *options, *([str(corpus)] if has_corpus else [])]
