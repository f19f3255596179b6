"""``vllm-mc2 bench``: what a hand-over costs here, beside what others need for it. The benchmarks are in ``vllm_mc2.bench``."""

import argparse

from vllm_mc2.bench.handoff.arguments import add_parser as add_handoff
from vllm_mc2.bench.serve.arguments import add_parser as add_serve
from vllm_mc2.cli.exits import epilog

_BENCH = """\
Measures, on this machine, in one run and side by side. "handoff" needs no model and no vLLM: two processes, and KV caches of
16 MiB to 8 GiB. "serve" starts real vLLM servers and takes much longer.

Both need: pip install "vllm-mc2[bench]"
"""

_EXAMPLES = """\
examples:
  vllm-mc2 bench handoff --quick          a minute
  vllm-mc2 bench handoff --help           what is compared, and how to read it
  vllm-mc2 bench serve --fat --quick      a first look with real servers, some minutes
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``bench`` and what is below it."""
    bench = commands.add_parser(
        "bench",
        help="measure hand-overs and servers on this machine, beside copying ones",
        description=_BENCH,
        epilog=epilog(_EXAMPLES, ok="measured", negative="nothing could be measured", interrupted="interrupted"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    add_handoff(kinds)
    add_serve(kinds)
