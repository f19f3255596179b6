"""``vllm-mc2 doctor``: what there is on this machine, and what would be done with it."""

import importlib.metadata
import os
import platform
import sys
from pathlib import Path

import msgspec

from vllm_mc2.ascend.doctor import ascend_findings
from vllm_mc2.channel import prepare_socket_dir
from vllm_mc2.config import MC2Config
from vllm_mc2.errors import ConfigError
from vllm_mc2.findings import Finding, render

WELL, UNWELL = 0, 1
MIN_KERNEL = (5, 6)
"""pidfd_open and F_SEAL_FUTURE_WRITE."""


def run(socket_dir: str | None, *, as_json: bool) -> int:
    """Print the findings; the exit code."""
    findings = [_kernel(), *_vllm(), _socket_directory(socket_dir), *ascend_findings()]
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode())
    else:
        print(render(findings))
    return UNWELL if any(finding.state == "fail" for finding in findings) else WELL


def _kernel() -> Finding:
    release = platform.release()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdecimal())
    text = f"Linux {release}, {platform.machine()}, Python {platform.python_version()}"
    if sys.platform != "linux" or numbers < MIN_KERNEL:
        return Finding("kernel", "fail", text, f"Linux {'.'.join(map(str, MIN_KERNEL))} or later is needed")
    return Finding("kernel", "pass", text)


def _vllm() -> list[Finding]:
    try:
        version = importlib.metadata.version("vllm")
        from vllm_mc2.connector.compat import check_contract
    except (importlib.metadata.PackageNotFoundError, ImportError) as error:
        return [Finding("vLLM", "info", f"not here: {error}", 'pip install "vllm-mc2[vllm]"')]
    missing = check_contract()
    if missing:
        return [
            Finding("vLLM", "pass", version),
            Finding("in place", "info", f"blocks are copied with this vLLM, which lacks {', '.join(missing)}"),
        ]
    return [
        Finding("vLLM", "pass", version),
        Finding("in place", "pass", "this vLLM has all that attach needs on host memory"),
    ]


def _socket_directory(socket_dir: str | None) -> Finding:
    try:
        path = MC2Config(socket_dir=socket_dir and str(Path(socket_dir).expanduser().absolute())).resolve_socket_dir()
        if not path.exists():
            return Finding("socket directory", "info", f"{path} does not exist yet; the first engine makes it")
        prepare_socket_dir(path)  # which is there, so that this only looks
    except ConfigError as error:
        return Finding("socket directory", "fail", str(error))
    return Finding("socket directory", "pass", f"{path}, of uid {os.geteuid()}")
