"""The command ``vllm-mc2``. Each subcommand has a module with its ``add_parser``; what is heavy is imported when it runs, so
that ``--help`` costs nothing. Exit codes are in ``exits``.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

import vllm_mc2
from vllm_mc2.cli import bench, config, doctor, inspect, selftest
from vllm_mc2.cli.exits import INTERRUPTED, OK

_DESCRIPTION = """\
Tools for vllm-mc2, the vLLM connector in which decode uses prefill's KV cache in place.
"""

_EPILOG = """\
from nothing to a running pair:
  vllm-mc2 doctor                                    is everything here that it needs?
  vllm serve MODEL --port 8100 --kv-transfer-config "$(vllm-mc2 config --role prefill)"
  vllm serve MODEL --port 8200 --kv-transfer-config "$(vllm-mc2 config --role decode)"
  vllm-mc2 inspect --watch                           what the engines do

Every command has --help with examples. Results go to standard output, everything else to standard error.

exit codes of every command: 0 yes, 1 the answer is no (nobody there, something is wrong), 2 wrong usage,
3 the socket directory or the device cannot be used, 130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit code."""
    args = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        code = run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever reads has had enough (`| head`); the interpreter must not complain about it while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-mc2",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vllm-mc2 {vllm_mc2.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (config, doctor, inspect, selftest, bench):
        command.add_parser(commands)
    return parser
