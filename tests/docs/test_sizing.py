"""The worked examples of ``docs/operations.md`` are what the formulas and the code give."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.docs.pages import ROOT
from vllm_mc2.config import MC2Config
from vllm_mc2.layout import make_plan
from vllm_mc2.leases import affordable_slots

TEXT = (ROOT / "docs" / "operations.md").read_text()
PROSE = " ".join(TEXT.split())
GIB = 1 << 30
BLOCK_TOKENS = 128
TYPE_BYTES = {"float32": 4, "bfloat16": 2}
# The example's prefill: 128 KiB a token.
BLOCK_BYTES = 128 * 1024 * BLOCK_TOKENS
NUM_BLOCKS = 16 * GIB // BLOCK_BYTES
MAX_MODEL_LEN = 8192


def table(name: str) -> str:
    match = re.search(rf"<!-- {name}: begin.*?-->\n(.*?)<!-- {name}: end -->", TEXT, re.DOTALL)
    assert match is not None
    return match[1]


def prefill_of_the_example(tmp_path: Path) -> Any:
    from vllm_mc2.connector.metrics import MC2Stats
    from vllm_mc2.connector.prefill import PrefillHalf

    pool: Any = SimpleNamespace(blocks=range(NUM_BLOCKS))
    directory = tmp_path / "s"
    directory.mkdir(mode=0o700)
    return PrefillHalf(
        MC2Config(), "engine", directory, (), pool, BLOCK_TOKENS, (None,), MAX_MODEL_LEN, MC2Stats()
    )  # fmt: skip


def test_memory_per_token() -> None:
    rows = re.findall(
        r"^\| (\S+) \| (\d+) x (\d+) x (\d+), (\w+) \| (\d+) KiB \| ([\d.]+) MiB \| ([\d,]+) \|$",
        table("sizing"),
        re.MULTILINE,
    )
    assert len(rows) == 3
    for _, layers, heads, size, kind, kib, mib, tokens in rows:
        token_bytes = int(layers) * 2 * int(heads) * int(size) * TYPE_BYTES[kind]
        assert token_bytes == int(kib) * 1024
        assert f"{token_bytes * BLOCK_TOKENS / 2**20:.1f}" == mib
        assert f"{GIB // token_bytes:,}" == tokens


def test_how_much_is_lent(tmp_path: Path) -> None:
    half = prefill_of_the_example(tmp_path)
    try:
        assert re.findall(r"^\| up to (\d+) blocks", table("lending"), re.MULTILINE) == [
            str(half._max_lent),
            str(half._max_pinned),
        ]
    finally:
        half.close()
    assert f"{NUM_BLOCKS:,} blocks, of which vLLM keeps one" in PROSE
    assert f"a request may need {MAX_MODEL_LEN // BLOCK_TOKENS} of them" in PROSE
    assert "2 x 10 x 32 = 640" in PROSE and -(-4000 // BLOCK_TOKENS) == 32 and half._max_lent >= 640
    assert half._max_lent < 3 * 10 * 32 == 960


def test_slots_and_window() -> None:
    assert f"65,536 blocks a request: {affordable_slots(1024, 65536)} slots" in PROSE
    assert affordable_slots(1024, MAX_MODEL_LEN // BLOCK_TOKENS) == 1024
    small = make_plan([("layer", BLOCK_BYTES)], 4 * GIB // BLOCK_BYTES, None)
    assert small.num_window * BLOCK_BYTES == 256 * GIB
    assert "with the default, 16 of 16 GiB each" in PROSE and small.num_window // NUM_BLOCKS == 16
    large = make_plan([("layer", BLOCK_BYTES)], 64 * GIB // BLOCK_BYTES, None)
    assert large.num_window * BLOCK_BYTES == 8 * 64 * GIB
