"""``python -m tests.fuzz``: every decoder, for as many inputs as are asked for. Exit code 1 when one of them failed."""

import argparse
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz import native
from tests.fuzz.campaign import ROOT, Result, python_command, run_target
from tests.fuzz.catalogue import NAMES, load

FOLDER = ROOT / "build" / "fuzz"


def main() -> int:
    """All of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--runs", type=int, default=20_000, help="inputs for each target")
    parser.add_argument(
        "--target", action="append", choices=[*NAMES, *native.NAMES], help="only this one; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="targets at a time")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for logs, the corpus and what failed")
    parser.add_argument("--list", action="store_true", help="the targets, and run nothing")
    parser.add_argument("--replay", type=Path, help="run this one input of --target")
    arguments = parser.parse_args()
    names = arguments.target or [*NAMES, *native.NAMES]
    if arguments.list:
        for name in names:
            print(f"{name:16} {load(name).what if name in NAMES else native.WHAT[name]}")
        return 0
    if set(names) & set(native.NAMES):
        native.build()
    folder = arguments.folder.resolve()
    if arguments.replay is not None:
        if len(names) != 1:
            parser.error("--replay needs one --target")
        command = _command(names[0], folder, has_corpus=False)
        result = run_target(names[0], command, folder, [str(arguments.replay.resolve())])
        print((folder / f"{names[0]}.log").read_text(errors="replace")[-6000:])
        return 0 if result.status == 0 else 1

    def run(name: str) -> Result:
        options = [f"-runs={arguments.runs}", f"-seed={arguments.seed}"]
        result = run_target(name, _command(name, folder), folder, options)
        print(result, flush=True)
        for path in result.failures:
            command = ["python", "-m", "tests.fuzz", "--target", name, "--replay", str(path)]
            print(f"    {path}\n    again: {shlex.join(command)}", flush=True)
        return result

    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(run, names))
    failed = [result.name for result in results if not result.is_good]
    num_inputs = sum(each.num_inputs for each in results)
    print(
        f"fuzz: seed {arguments.seed}, {len(results)} targets, {num_inputs:,} inputs; failed: {', '.join(failed) or 'none'}"
    )
    return 1 if failed else 0


def _command(name: str, folder: Path, *, has_corpus: bool = True) -> list[str]:
    return python_command(name, folder) if name in NAMES else native.command(name, folder, has_corpus=has_corpus)


if __name__ == "__main__":
    sys.exit(main())
