"""``vllm-mc2 doctor``: what is true of this machine, what is wrong with it, and what to do. It looks with ``checks``."""

import argparse
import sys

from vllm_mc2.cli.exits import NEGATIVE, OK, USAGE, epilog

_DESCRIPTION = """\
Says what there is on this machine, which way a KV cache would be handed over and why, what is wrong, and what to do about it.
It tries what an engine needs on a few MiB of memory, asks the engines in the socket directory, and leaves nothing behind.
On Ascend it asks CANN and the driver, and shares a few MiB of one NPU to see how that goes.
"""

_EXAMPLES = """\
examples:
  vllm-mc2 doctor
  vllm-mc2 doctor --json | jq -r '.[] | select(.state == "fail") | .advice'
  vllm-mc2 doctor --json | jq '.[] | select(.name == "memory").values.available_bytes'
  vllm-mc2 doctor --config "$(vllm-mc2 config --role prefill --set huge_pages=require)"
                                          would an engine with these settings run here?
  vllm-mc2 doctor --config @kv.json       the same, out of a file
  vllm-mc2 doctor --peer 10.0.0.1:14000 --secret-file ~/mc2-secret
                                          on decode's host: does that prefill let us in?

how to read it:
  PASS  tried, and it works      WARN  works, but look at it      INFO  a fact, neither good nor bad
  FAIL  does not work, and "->" says what to do                   SKIP  could not be looked at
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``doctor``."""
    parser = commands.add_parser(
        "doctor",
        help="say what there is on this machine, and what is wrong with it",
        description=_DESCRIPTION,
        epilog=epilog(_EXAMPLES, ok="nothing is wrong", negative="something is"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--socket-dir", metavar="DIR", help="the engines' socket_dir, if it is set")
    parser.add_argument(
        "--config",
        metavar="JSON|@FILE",
        help="what an engine gets as --kv-transfer-config: is it right, and does this machine have what it needs",
    )
    parser.add_argument(
        "--peer", metavar="HOST:PORT", help="a prefill on another host, at its tcp_address: can it be talked to"
    )
    parser.add_argument(
        "--secret-file", metavar="FILE", help="the hosts' secret for --peer (default: --config's, else MC2_TCP_SECRET)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON array")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the findings; the exit code."""
    from vllm_mc2.cli.checks.examination import UsageProblemError, examine
    from vllm_mc2.cli.output import print_json, results_only
    from vllm_mc2.findings import render

    try:
        with results_only():
            findings = examine(args.config, args.socket_dir, args.peer, args.secret_file)
    except UsageProblemError as error:
        print(f"vllm-mc2 doctor: {error}", file=sys.stderr)
        return USAGE
    num_failed, num_warned = (sum(finding.state == state for finding in findings) for state in ("fail", "warn"))
    if args.json:
        print_json(findings)
    else:
        print(render(findings))
        failed = f"{num_failed} of {len(findings)} points failed" if num_failed else "nothing failed"
        print(f"doctor: {failed}{f', {num_warned} to look at' if num_warned else ''}")
    return NEGATIVE if num_failed else OK
