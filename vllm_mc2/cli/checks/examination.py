"""All of doctor's findings, in the order in which they are shown."""

from pathlib import Path

from vllm_mc2.ascend.doctor import ascend_findings
from vllm_mc2.cli.checks.huge_pages import huge_page_findings
from vllm_mc2.cli.checks.kernel import kernel_findings
from vllm_mc2.cli.checks.memory import memory_findings
from vllm_mc2.cli.checks.network import network_findings, parse_peer
from vllm_mc2.cli.checks.settings import Wanted, read_settings
from vllm_mc2.cli.checks.sockets import socket_findings
from vllm_mc2.cli.checks.software import software_findings
from vllm_mc2.findings import Finding

MAX_CONFIG_BYTES = 1 << 20


class UsageProblemError(ValueError):
    """The command line itself is wrong; nothing was looked at."""


def examine(config: str | None, socket_dir: str | None, peer: str | None, secret_file: str | None) -> list[Finding]:
    """Look at everything; takes seconds, most of them for importing vLLM. The arguments are the command line's.

    Raises:
        UsageProblemError: there is no such file, or ``peer`` is no ``HOST:PORT``.
    """
    address = parse_peer(peer) if peer is not None else None
    if peer is not None and address is None:
        raise UsageProblemError(f"--peer {peer}: expected HOST:PORT, or [ADDRESS]:PORT with IPv6")
    wanted, findings = Wanted(), []
    if config is not None:
        wanted, finding = read_settings(_text_of(config))
        findings.append(finding)
    findings += kernel_findings()
    findings += memory_findings(wanted)
    findings += huge_page_findings(wanted.config.huge_pages)
    findings += software_findings()
    findings += socket_findings(socket_dir, wanted.config)
    findings += network_findings(wanted.config, address, secret_file)
    findings += ascend_findings()
    return findings


def _text_of(config: str) -> str:
    if not config.startswith("@"):
        return config
    path = Path(config[1:]).expanduser()
    try:
        with path.open("rb") as file:
            return file.read(MAX_CONFIG_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageProblemError(f"--config {config}: {error}") from error
