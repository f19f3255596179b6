"""What ``doctor`` and ``selftest`` say, point by point."""

from typing import Literal

import msgspec

MIN_WIDTH = 24
"""So that lines that are printed one at a time stand in columns."""

State = Literal["pass", "fail", "warn", "info", "skip"]
Value = int | float | str | bool | None | list[str]


class Finding(msgspec.Struct, frozen=True):
    """One point. ``info`` is a fact that is neither good nor bad; ``skip`` could not be looked at, and says why."""

    name: str
    state: State
    detail: str
    advice: str = ""
    """What to do about it."""
    values: dict[str, Value] = {}
    """What ``detail`` says, for programs: numbers as they were read, with their unit in the name."""


def render(findings: list[Finding]) -> str:
    """One line for each point, and one more where there is advice. Texts may come from other processes."""
    width = max((len(finding.name) for finding in findings), default=0)
    width = max(width, MIN_WIDTH)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state.upper():4}  {_clean(finding.name):{width}}  {_clean(finding.detail)}")
        if finding.advice:
            lines.append(f"{'':6}{'':{width}}  -> {_clean(finding.advice)}")
    return "\n".join(lines)


def _clean(text: str) -> str:
    """On one line, and without what a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))
