"""What ``doctor`` and ``selftest`` say, point by point."""

from typing import Literal

import msgspec

MIN_WIDTH = 24
"""So that lines that are printed one at a time stand in columns."""

State = Literal["pass", "fail", "warn", "info", "skip"]


class Finding(msgspec.Struct, frozen=True):
    """One point. ``info`` is a fact that is neither good nor bad; ``skip`` could not be looked at, and says why."""

    name: str
    state: State
    detail: str
    advice: str = ""
    """What to do about it."""


def render(findings: list[Finding]) -> str:
    """One line for each point, and one more where there is advice."""
    width = max((len(finding.name) for finding in findings), default=0)
    width = max(width, MIN_WIDTH)
    lines = []
    for finding in findings:
        detail = " ".join(finding.detail.split())
        lines.append(f"{finding.state.upper():4}  {finding.name:{width}}  {detail}")
        if finding.advice:
            lines.append(f"{'':6}{'':{width}}  -> {finding.advice}")
    return "\n".join(lines)
