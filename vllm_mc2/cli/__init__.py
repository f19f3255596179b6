"""The command ``vllm-mc2``. A subcommand's code is imported when it runs, so that ``--help`` costs nothing.

Exit codes: 0 something was found or done, 1 nobody is there, nothing could be measured or something is not well, 2 wrong usage,
3 the socket directory or the device cannot be used.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from vllm_mc2.cli.bench import add_parser as add_bench

MIN_WATCH_SECONDS = 0.1
MAX_WATCH_SECONDS = 3600.0

_INSPECT = """\
Shows the engines of this user on this host: their pools, the leases that prefill has given out and who holds them, the
window and the peers of decode. It only looks: no engine waits for it, and nothing changes because of it.
"""

_INSPECT_EXAMPLES = """\
examples:
  vllm-mc2 inspect                        once, as a table
  vllm-mc2 inspect --watch                again every second, until Ctrl-C
  vllm-mc2 inspect --json | jq '.engines[] | {role, lent_blocks, num_leases}'
  vllm-mc2 inspect --socket-dir /run/mc2  where "socket_dir" is set in kv_connector_extra_config

how to read a lease:
  offered    its ticket is out, no decode has claimed it yet
  held       decodes with these process ids read its blocks; REFS is 1 (prefill's own) and 1 for each claim
  released, expired, peer_gone
             over; an idle prefill takes the blocks back in its next step

exit codes: 0 somebody answered, 1 nobody is there, 2 wrong usage, 3 the directory cannot be used
"""

_DOCTOR = """\
Says what there is on this machine, which way a KV cache would be handed over and why, and what to do where something is
missing. On Ascend it asks CANN and the driver, and shares a few MiB of one NPU to see how that goes.
"""

_DOCTOR_EXAMPLES = """\
examples:
  vllm-mc2 doctor
  vllm-mc2 doctor --json | jq -r '.[] | select(.state == "fail") | .advice'

exit codes: 0 nothing is wrong, 1 something is, 2 wrong usage
"""

_SELFTEST = """\
Runs the data path of a hand-over between processes of its own: share, map, copy by random block tables and compare, stop in
order, kill either side. Needs no vLLM and no model, and a few hundred MiB of each NPU.
"""

_SELFTEST_EXAMPLES = """\
examples:
  vllm-mc2 selftest --device npu                   NPUs 0 and 1
  vllm-mc2 selftest --device npu --npus 4,5
  vllm-mc2 selftest --device npu --json > selftest.json

exit codes: 0 every point passed, 1 one failed, 2 wrong usage, 3 there is no such device
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit code."""
    args = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        code = run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever reads has had enough (`| head`); the interpreter must not complain about it while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm-mc2", description="Tools for vllm-mc2.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    inspect = commands.add_parser(
        "inspect",
        help="show running engines, their pools, leases, peers and windows",
        description=_INSPECT,
        epilog=_INSPECT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inspect.add_argument(
        "--socket-dir",
        metavar="DIR",
        help="the engines' socket_dir (default: $XDG_RUNTIME_DIR/vllm-mc2, or /tmp/vllm-mc2-UID without one)",
    )
    output = inspect.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print everything as one JSON object")
    output.add_argument(
        "--watch",
        metavar="SECONDS",
        type=_watch_seconds,
        nargs="?",
        const=1.0,
        help="show the table again every SECONDS (default 1) until Ctrl-C",
    )
    inspect.add_argument(
        "--rows",
        metavar="N",
        type=_num_rows,
        default=20,
        help="leases to show per engine, the oldest first (default 20)",
    )
    inspect.set_defaults(run=_run_inspect)
    _add_doctor(commands)
    _add_selftest(commands)
    add_bench(commands)
    return parser


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    doctor = commands.add_parser(
        "doctor",
        help="say what there is on this machine, and what is wrong with it",
        description=_DOCTOR,
        epilog=_DOCTOR_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_argument("--socket-dir", metavar="DIR", help="the engines' socket_dir, if it is set")
    doctor.add_argument("--json", action="store_true", help="print the findings as a JSON array")
    doctor.set_defaults(run=_run_doctor)


def _add_selftest(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    selftest = commands.add_parser(
        "selftest",
        help="try the data path between two processes on real devices",
        description=_SELFTEST,
        epilog=_SELFTEST_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    selftest.add_argument("--device", choices=["npu"], required=True, help="what to try it on")
    selftest.add_argument(
        "--npus",
        metavar="P,D",
        type=_two_devices,
        help="prefill's and decode's (default 0,1, or 0,0 where there is one)",
    )
    selftest.add_argument("--json", action="store_true", help="print the findings as a JSON array at the end")
    selftest.set_defaults(run=_run_selftest)


def _two_devices(text: str) -> tuple[int, int]:
    try:
        prefill, decode = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected two numbers with a comma between them, got {text}") from None
    return prefill, decode


def _watch_seconds(text: str) -> float:
    seconds = float(text)
    if not MIN_WATCH_SECONDS <= seconds <= MAX_WATCH_SECONDS:
        raise argparse.ArgumentTypeError(f"expected {MIN_WATCH_SECONDS} to {MAX_WATCH_SECONDS:.0f} seconds, got {text}")
    return seconds


def _num_rows(text: str) -> int:
    rows = int(text)
    if rows < 0:
        raise argparse.ArgumentTypeError(f"expected a number of leases, got {text}")
    return rows


def _run_inspect(args: argparse.Namespace) -> int:
    from vllm_mc2.cli.inspect import run

    return run(args.socket_dir, as_json=args.json, watch_seconds=args.watch, num_rows=args.rows)


def _run_doctor(args: argparse.Namespace) -> int:
    from vllm_mc2.cli.doctor import run

    return run(args.socket_dir, as_json=args.json)


def _run_selftest(args: argparse.Namespace) -> int:
    from vllm_mc2.cli.selftest import run

    return run(args.npus, as_json=args.json)
