"""The command line of ``vllm-mc2 bench handoff``. Light: what it needs is imported when it runs."""

import argparse
from pathlib import Path

from vllm_mc2.bench.handoff.cases import GIB, MIN_BYTES, SINGLES, WAYS, human_bytes
from vllm_mc2.bench.json_option import json_file

_HELP = """\
Measures how long it takes until a decode process can use the KV cache of a prefill process on the same host: with vllm-mc2,
which hands over the block table and leaves the KV where it is, and with everything that copies. Two real processes, the
tensor API, no vLLM server and no model; all ways in one run, turn by turn, after everything is connected and warm.
"""

_EXAMPLES = """\
ways (--ways):
  mc2        publish a lease, claim it, map the block table; KV is read in place
  mc2_sleep  the same, but decode sleeps until prefill's message wakes it up; mc2 looks for the message all the time
  memcpy     one copy out of memory that is mapped already, by the fastest means: no copying transport can be faster
  two_copy   into shared memory and out of it, both copies overlapping
  tcp        through a loopback connection
  nixl, mooncake
             one-sided reads with descriptors of 256 KiB, where these libraries are installed

examples:
  vllm-mc2 bench handoff --quick                     a minute: a few sizes, few repeats
  vllm-mc2 bench handoff --json handoff.json --output-dir charts
                                                     everything, in six to ten minutes
  vllm-mc2 bench handoff --ways mc2,memcpy           only what is needed for the ratio
  vllm-mc2 bench handoff --max-bytes 512MiB          on a small host
  vllm-mc2 bench handoff --quick --no-charts --json - | jq '.results[] | {way, kv_bytes, median_us}'
                                                     figures to standard output, the tables to standard error

how to read it:
  times are medians until the receiver can use all requests of a line; "300x" is that many times ours
  a "Goal" that is NOT met is a finding, not a failure: close other programs, and run it again
  memory: three times the largest case, four with nixl or mooncake; what does not fit is left out, and said

exit codes: 0 measured (whatever the result), 1 a process of the benchmark died, 2 wrong usage, 130 interrupted
"""

_UNITS = {"": 1, "b": 1, "k": 10, "kib": 10, "m": 20, "mib": 20, "g": 30, "gib": 30}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``handoff`` to the subcommands of ``bench``."""
    parser = commands.add_parser(
        "handoff",
        help="time from prefill's last token until decode can use the KV, against ways that copy it",
        description=_HELP,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats: done in a minute")
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write every figure there as one JSON object; - for standard output"
    )
    parser.add_argument(
        "--output-dir",
        metavar="DIR",
        type=Path,
        default=Path(),
        help="where handoff.svg and handoff.png go (default: here)",
    )
    parser.add_argument("--no-charts", action="store_true", help="draw nothing")
    parser.add_argument(
        "--ways", metavar="LIST", type=_ways, default=WAYS, help=f"what to compare (default {','.join(WAYS)})"
    )
    parser.add_argument(
        "--max-bytes",
        metavar="N",
        type=_num_bytes,
        default=1024 * GIB,
        help=f"no more KV than this at once, with KiB, MiB or GiB behind it; at least {human_bytes(MIN_BYTES)}",
    )
    parser.add_argument(
        "--repeats",
        metavar="N",
        type=_num_repeats,
        help="repeats of each case (default: between 15 and 100, fewer for large ones)",
    )
    parser.set_defaults(run=_run)


def _ways(text: str) -> tuple[str, ...]:
    chosen = [way.strip() for way in text.split(",")]
    unknown = [way for way in chosen if way not in WAYS]
    if unknown or len(set(chosen)) != len(chosen):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(WAYS)}, each once, got {text!r}")
    return tuple(way for way in WAYS if way in chosen)


def _num_bytes(text: str) -> int:
    number = text.rstrip("BbIiKkMmGg ")
    unit = text[len(number) :].strip().lower()
    if not number.isdigit() or unit not in _UNITS:
        raise argparse.ArgumentTypeError(f"expected a number of bytes like 512MiB or 2GiB, got {text!r}")
    num_bytes = int(number) * (_UNITS[unit] if unit in {"", "b"} else 1 << _UNITS[unit])
    if num_bytes < MIN_BYTES:
        raise argparse.ArgumentTypeError(f"expected at least {human_bytes(SINGLES[0])}, got {text!r}")
    return num_bytes


def _num_repeats(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"expected 1 to 10000 repeats, got {text!r}")
    return int(text)


def _run(args: argparse.Namespace) -> int:
    from vllm_mc2.bench.handoff.run import Options, run

    with json_file(args.json) as json_path:
        return run(
            Options(
                ways=args.ways,
                quick=args.quick,
                max_bytes=args.max_bytes,
                repeats=args.repeats,
                json_path=json_path,
                output_dir=args.output_dir,
                charts=not args.no_charts,
            )
        )
