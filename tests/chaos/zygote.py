"""The zygote: imports vLLM once (8 s), then forks an engine process in milliseconds whenever it is told to.

It has one thread, opens no session and makes no pool, so a forked engine starts as if it had imported everything itself.
"""

import gc
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.processes import Pipe, Zygote

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}


def use_package(directory: str) -> None:
    """Take ``vllm_mc2`` from a directory instead of the installed one; the editable finder would win over ``sys.path``."""
    sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
    sys.path.insert(0, directory)
    import vllm_mc2

    assert str(vllm_mc2.__file__).startswith(directory), vllm_mc2.__file__


def warm_up(model: Path) -> None:
    """Import everything that engines import late, and fill vLLM's caches; a decode starts no thread and makes no socket."""
    import torch

    torch.set_num_threads(1)
    from tests.chaos import engine
    from tests.connector import rig

    with tempfile.TemporaryDirectory() as directory:
        warm = rig.RigEngine(model, Path(directory) / "s", "kv_consumer", extra={"window_pool_factor": 8})
        warm.add("warm", [1, 2, 3], None, max_tokens=2)
        warm.run()
        warm.close()
    engine.check_points()
    del warm
    gc.collect()
    gc.freeze()


def main() -> None:
    """``python -m tests.chaos.zygote FD MODEL [PACKAGE]``."""
    os.environ.update(SETTINGS)
    model = Path(sys.argv[2])

    def become(spec: dict[str, Any], pipe_fd: int) -> int:
        from tests.chaos.engine import serve

        return serve(Pipe.of(pipe_fd), model, spec)

    zygote = Zygote(int(sys.argv[1]), become)
    if len(sys.argv) > 3:
        use_package(sys.argv[3])
    warm_up(model)
    zygote.run()


if __name__ == "__main__":
    main()
