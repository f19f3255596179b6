"""``examples/tensor_api.py``: what a stranger runs first."""

import os
import re
import subprocess
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace

import torch

from examples import tensor_api
from tests.support.family import family

ROOT = Path(__file__).resolve().parents[2]


def run(command: list[str], cwd: Path, temporary: Path) -> str:
    """What it says; it leaves neither files nor processes."""
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run(
        family(command), cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert list(temporary.iterdir()) == []
    return done.stdout


def test_it_ends_well_and_says_so(directory: Path) -> None:
    """Run as a module; it starts its other half as a script."""
    output = run([sys.executable, "-W", "error", "-m", "examples.tensor_api"], ROOT, directory)
    lines = output.splitlines()
    assert lines[-1] == "equal"
    rows = [re.split(r"\s{2,}", line) for line in lines[1:4]]
    assert [row[0] for row in rows] == ["paged", "paged", "contiguous"]
    assert [row[5] for row in rows] == ["by block, in place", "torch's, gathered", "torch's, in place"]
    for row in rows:
        assert (
            int(row[1].replace(",", "")) >= 4 * 2 * 1000 * 2 * 32 * 4
        )  # layers, K and V, tokens, heads, size, float32
        assert int(row[2]) < 64 and float(row[6]) <= 1e-5
    assert "prefill was killed; what was mapped is still there" in output
    assert "request 'late' was not mapped" in output


def test_it_notices_what_is_not_equal() -> None:
    """A single key of a thousand in one layer is enough."""
    reference, cache = tensor_api.Reference(), tensor_api.compute_cache()
    blocks = -(-tensor_api.TOKENS // tensor_api.BLOCK_SIZE)

    def paged(tensor: torch.Tensor) -> torch.Tensor:
        missing = blocks * tensor_api.BLOCK_SIZE - tensor_api.TOKENS
        padding = torch.zeros(missing, *tensor.shape[1:])
        return torch.cat([tensor, padding]).view(blocks, tensor_api.BLOCK_SIZE, *tensor.shape[1:])

    def compare() -> list[float]:
        """As if it were mapped, in both forms."""
        whole = SimpleNamespace(is_paged=False, layers=dict(enumerate(cache)))
        ids = torch.arange(blocks, dtype=torch.int32)
        pages = {layer: [paged(tensor) for tensor in tensors] for layer, tensors in enumerate(cache)}
        in_blocks = SimpleNamespace(
            is_paged=True, layers=pages, block_ids=ids, block_table=memoryview(array("i", range(blocks)))
        )
        return [difference for kv in (whole, in_blocks) for difference in reference.compare(kv).values()]  # type: ignore[arg-type]

    assert max(compare()) <= tensor_api.TOLERANCE
    cache[2][0][777] += 0.5
    assert min(compare()) > tensor_api.TOLERANCE
