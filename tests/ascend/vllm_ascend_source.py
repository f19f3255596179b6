"""The real vllm-ascend: its source package, unpacked, never installed and never built."""

from pathlib import Path

from tests.sources import unpack_source

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.23.0.post1"
NAME = f"vllm_ascend-{VERSION}"
SHA256 = "a3b9f4a5dd7aa50c37e03d1f35937c4ae5aeacc49b734cac74d59ce5757738e1"


def source() -> Path:
    """The folder with ``vllm_ascend``, ``examples`` and ``setup.py``; downloaded when it is not there.

    Raises:
        RuntimeError: the file is not the one that the tests were written for, or the index does not have it.
    """
    target = ROOT / "build" / "ascend" / "source"
    return unpack_source("vllm-ascend", f"{NAME}.tar.gz", SHA256, target, lambda name: True) / NAME
