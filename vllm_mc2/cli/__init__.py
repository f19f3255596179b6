"""The command ``vllm-mc2``. A subcommand's code is imported when it runs, so that ``--help`` costs nothing.

Exit codes: 0 something was found or done, 1 nobody is there or nothing could be measured, 2 wrong usage, 3 the socket
directory cannot be used.
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
    add_bench(commands)
    return parser


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
