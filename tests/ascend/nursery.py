"""A warm process out of which engine processes are forked: importing vLLM 0.23 and torch_npu takes longer than most tests.

    python -m tests.ascend.nursery FD

It touches neither a device nor the simulator, so that an engine starts as if it had imported everything itself. A child is told
its ``program``, and the ``arguments`` and ``environment`` of that.
"""

import os
import sys

from tests.support.processes import Message, Zygote


def become(spec: Message, engine_fd: int) -> None:
    from tests.ascend import engine, rank_side

    os.environ.clear()
    os.environ.update(spec["environment"])
    program = {"engine": engine.main, "rank_side": rank_side.main}[spec["program"]]
    program([str(engine_fd), *spec["arguments"]])


def main() -> None:
    zygote = Zygote(int(sys.argv[1]), become)
    import torch

    torch.set_num_threads(1)
    import tests.ascend.engine
    import tests.ascend.rank_side  # noqa: F401

    zygote.run()


if __name__ == "__main__":
    main()
