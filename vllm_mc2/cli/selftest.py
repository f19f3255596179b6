"""``vllm-mc2 selftest``: the data path between two processes on this machine's devices."""

import argparse
import contextlib
import sys

from vllm_mc2.cli.exits import NEGATIVE, OK, UNUSABLE, epilog

_DESCRIPTION = """\
Runs the data path of a hand-over between processes of its own: share, map, copy by random block tables and compare, stop in
order, kill either side. Needs no vLLM and no model, and a few hundred MiB of each NPU.
"""

_EXAMPLES = """\
examples:
  vllm-mc2 selftest --device npu                   NPUs 0 and 1
  vllm-mc2 selftest --device npu --npus 4,5
  vllm-mc2 selftest --device npu --json > selftest.json
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``selftest``."""
    parser = commands.add_parser(
        "selftest",
        help="try the data path between two processes on real devices",
        description=_DESCRIPTION,
        epilog=epilog(_EXAMPLES, ok="every point passed", negative="one failed", unusable="there is no such device"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["npu"], required=True, help="what to try it on")
    parser.add_argument(
        "--npus",
        metavar="P,D",
        type=_two_devices,
        help="prefill's and decode's (default 0,1, or 0,0 where there is one)",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON array at the end")
    parser.set_defaults(run=run)


def _two_devices(text: str) -> tuple[int, int]:
    try:
        prefill, decode = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected two numbers with a comma between them, got {text}") from None
    return prefill, decode


def run(args: argparse.Namespace) -> int:
    """Run every point; the exit code."""
    from vllm_mc2.ascend.acl import load_acl
    from vllm_mc2.ascend.selftest import SelfTest
    from vllm_mc2.cli.output import print_json, results_only
    from vllm_mc2.errors import DeviceError
    from vllm_mc2.findings import Finding, render

    try:
        number = load_acl().num_devices()
    except (DeviceError, RuntimeError) as error:
        print(f"vllm-mc2 selftest: {error}", file=sys.stderr)
        return UNUSABLE
    prefill, decode = args.npus or (0, min(1, number - 1))
    if not (0 <= prefill < number and 0 <= decode < number):
        print(f"vllm-mc2 selftest: devices {prefill} and {decode}, but there are {number}", file=sys.stderr)
        return UNUSABLE
    findings: list[Finding] = []

    def report(finding: Finding) -> None:
        findings.append(finding)
        if not args.json:
            print(render([finding]), flush=True)

    # With --json everything else, as what torch_npu says when it is imported, goes to standard error.
    with results_only() if args.json else contextlib.nullcontext():
        is_good = SelfTest(prefill, decode, report).run()
    if args.json:
        print_json(findings)
    else:
        failed = sum(finding.state == "fail" for finding in findings)
        print(f"selftest: {'passed' if is_good else f'{failed} of {len(findings)} points failed'}")
    return OK if is_good else NEGATIVE
