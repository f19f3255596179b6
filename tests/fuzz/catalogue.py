"""All targets in Python. A worker imports the module of its own only."""

import importlib

from tests.fuzz.target import Target

MODULES = {
    "messages": ("protocol", "mail", "layout"),
    "reports": ("report",),
    "requests": ("digest", "ticket", "config", "foreign"),
    "frames": ("frame", "buffer", "stream", "greeting"),
    "tensors": ("mailbox",),
}
NAMES = tuple(name for names in MODULES.values() for name in names)


def load(name: str) -> Target:
    """The target of this name.

    Raises:
        KeyError: there is none.
    """
    for module, names in MODULES.items():
        if name in names:
            found = {target.name: target for target in importlib.import_module(f"tests.fuzz.{module}").TARGETS}
            assert set(found) == set(names), "MODULES and TARGETS disagree"
            return found[name]
    raise KeyError(name)
