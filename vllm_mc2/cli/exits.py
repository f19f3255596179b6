"""Exit codes, the same for every subcommand, and what ``--help`` says of them. Documented in ``docs/cli.md``."""

OK = 0
"""Something was found, measured or made, or nothing is wrong."""

NEGATIVE = 1
"""The command ran, and the answer is no: nobody is there, something is wrong, a point failed, nothing could be measured."""

USAGE = 2
"""Wrong usage: nothing was looked at. Also argparse's own."""

UNUSABLE = 3
"""What was to be looked at cannot be: the socket directory, or the device."""

INTERRUPTED = 130
"""Ctrl-C, where that is not the usual end."""


def epilog(examples: str, **meanings: str) -> str:
    """The end of a ``--help``: examples, and the exit codes with what they mean for this command."""
    names = {"ok": OK, "negative": NEGATIVE, "usage": USAGE, "unusable": UNUSABLE, "interrupted": INTERRUPTED}
    codes = ", ".join(f"{names[name]} {meaning}" for name, meaning in {**meanings, "usage": "wrong usage"}.items())
    return f"{examples.strip()}\n\nexit codes: {codes}\n"
