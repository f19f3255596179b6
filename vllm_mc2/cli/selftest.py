"""``vllm-mc2 selftest``: the data path between two processes on this machine's devices."""

import sys

import msgspec

from vllm_mc2.errors import DeviceError
from vllm_mc2.findings import Finding, render

PASSED, FAILED, NO_DEVICE = 0, 1, 3


def run(devices: tuple[int, int] | None, *, as_json: bool) -> int:
    """Run every point; the exit code."""
    from vllm_mc2.ascend.acl import load_acl
    from vllm_mc2.ascend.selftest import SelfTest

    try:
        number = load_acl().num_devices()
    except (DeviceError, RuntimeError) as error:
        print(f"vllm-mc2 selftest: {error}", file=sys.stderr)
        return NO_DEVICE
    prefill, decode = devices or (0, min(1, number - 1))
    if not (0 <= prefill < number and 0 <= decode < number):
        print(f"vllm-mc2 selftest: devices {prefill} and {decode}, but there are {number}", file=sys.stderr)
        return NO_DEVICE
    findings: list[Finding] = []

    def report(finding: Finding) -> None:
        findings.append(finding)
        if not as_json:
            print(render([finding]), flush=True)

    is_good = SelfTest(prefill, decode, report).run()
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode())
    else:
        failed = sum(finding.state == "fail" for finding in findings)
        print(f"selftest: {'passed' if is_good else f'{failed} of {len(findings)} points failed'}")
    return PASSED if is_good else FAILED
