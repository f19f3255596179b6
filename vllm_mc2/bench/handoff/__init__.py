"""``vllm-mc2 bench handoff``: how fast a KV cache changes hands, in place and by copying.

The command (``run``) starts worker processes (``fleet``, ``worker``) and asks them for one turn after the other
(``messages``). ``ours``, ``copies`` and ``peers`` are the ways; ``results``, ``tables`` and ``charts`` are what becomes of it.
"""
