"""``python -m tests.chaos``: real engine processes under seeded kills, stops, aborts and restarts.

The last line of the output is JSON; the exit code is 0 when nothing leaked, hung or was wrong.
"""

import argparse
import json
import random
import signal
import sys

from tests.chaos.zygote import use_package


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, which is printed")
    parser.add_argument("--only", type=int, default=None, help="run this round alone, with fresh engines")
    parser.add_argument("--repeat", type=int, default=1, help="with --only: how often")
    parser.add_argument("--max-failures", type=int, default=5, help="stop after so many failed rounds")
    parser.add_argument("--package", default=None, help="directory of another copy of vllm_mc2 to be tested")
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # so that the engines are ended, too
    rounds = range(options.rounds) if options.only is None else [options.only] * options.repeat

    def log(text: str) -> None:
        print(text, flush=True)

    if options.package is not None:
        use_package(options.package)
    from tests.chaos.runner import Runner  # imports vllm_mc2

    with Runner(seed, package=options.package, log=log, verbose=options.verbose) as runner:
        try:
            runner.run(rounds, options.max_failures)
        except KeyboardInterrupt:
            log("interrupted")
        for line in runner.summary():
            log(line)
    log(json.dumps(runner.tally.as_json()))
    return 0 if not runner.tally.problems else 1


if __name__ == "__main__":
    sys.exit(main())
