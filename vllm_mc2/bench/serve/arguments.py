"""The command line of ``vllm-mc2 bench serve``. Imports nothing that its ``--help`` does not need."""

from __future__ import annotations

import argparse
import os
import sys
from argparse import _SubParsersAction
from pathlib import Path

from vllm_mc2.bench.json_option import json_file
from vllm_mc2.bench.serve.settings import SYSTEMS, Settings

_DESCRIPTION = """\
Measures hand-offs from prefill to decode with real vLLM servers on this host: vllm-mc2, the copying connectors that are
installed, two servers without any hand-off, and a single server whose own cache holds all but the last token, which no
hand-off can beat. Everything runs on the CPU backend in float32, greedily, and every answer is compared with the single
server's. All servers stay up, but only those of the system that is measured may run; the others are stopped meanwhile.
"""

_EPILOG = """\
examples:
  vllm-mc2 bench serve --fat --quick                      a first look, some minutes
  vllm-mc2 bench serve --fat --output-dir build/bench     the random model with 64 KiB of KV per token, and charts
  vllm-mc2 bench serve --model DIR --lengths 256,1024 --json result.json
  vllm-mc2 bench serve --fat --systems single,none,mc2    without peers
  vllm-mc2 bench serve --fat --quick --json - | jq .ttft  figures to standard output, the report to standard error
  PYTHONPATH=/opt/peers vllm-mc2 bench serve --fat        peers (NIXL, Mooncake) that are installed elsewhere

systems:
  single    one server: nothing cached, a prefix hit of whole blocks, and the floor: all but one token cached
  none      two servers without a connector: decode computes the prompt again
  mc2       vllm-mc2
  nixl      vLLM's NixlConnector; needs the package nixl
  mooncake  vLLM's MooncakeConnector over TCP; needs the package mooncake-transfer-engine-non-cuda and libibverbs
  example   vLLM's ExampleConnector: files in shared memory
A system that cannot be started, or whose requests fail, is left out, and the report says why.

how to read it:
  decode TTFT   from prefill's answer to decode's first token: what the hand-off costs
  both legs     from the request to the first token, prefill included
  floor         the same computing as an ideal hand-off leaves to decode, one token
  ITL           time between two tokens of an answer, after the first
On a machine with few cores, put a folder with a sitecustomize on PYTHONPATH that makes os.sched_yield sleep: vLLM's
servers busy-wait with it and starve each other. The report says whether it was replaced; it is for all systems alike.

exit codes: 0 measured, also if a check is not met or a system was left out, 1 nothing could be measured, 2 wrong usage,
130 interrupted; all servers are stopped in any case, and what was measured until then is printed and written
"""

QUICK = Settings(lengths=(1024,), repeats=1, concurrency=(1, 4))


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``serve`` to the subcommands of ``vllm-mc2 bench``."""
    defaults = Settings()
    parser = commands.add_parser(
        "serve",
        help="measure hand-offs with real vLLM servers",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", metavar="DIR", action="append", default=[], help="a model folder; may be given several times"
    )
    parser.add_argument(
        "--fat", action="store_true", help="a random model with 64 KiB of KV per token, made when it is needed"
    )
    parser.add_argument(
        "--lengths",
        metavar="N,N,...",
        type=_numbers,
        help=f"prompt lengths in tokens, rounded up to whole blocks of 128 (default {_joined(defaults.lengths)})",
    )
    parser.add_argument(
        "--fat-lengths", metavar="N,N,...", type=_numbers, help="the same for the random model (default: --lengths)"
    )
    parser.add_argument(
        "--repeats", metavar="N", type=_positive, help=f"prompts of each length (default {defaults.repeats})"
    )
    parser.add_argument(
        "--systems",
        metavar="NAME,...",
        type=_systems,
        default=SYSTEMS,
        help=f"what to compare (default {_joined(SYSTEMS)})",
    )
    parser.add_argument(
        "--concurrency",
        metavar="N,N,...",
        type=_numbers,
        help=f"requests at once in the throughput runs (default {_joined(defaults.concurrency)})",
    )
    parser.add_argument("--quick", action="store_true", help="1024 tokens, 1 repeat, 1 and 4 requests at once")
    parser.add_argument(
        "--kv-gib",
        metavar="GIB",
        type=_gib,
        help="KV cache of each server in GiB (default: what the lengths and the concurrency need)",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write everything to FILE; - for standard output"
    )
    parser.add_argument(
        "--output-dir", metavar="DIR", type=Path, help="write charts to DIR, and keep logs and the random model there"
    )
    parser.set_defaults(run=lambda args: _run(parser, args))


def settings_of(args: argparse.Namespace) -> Settings:
    """What the parsed arguments ask for; what was not given comes from the defaults, or from ``--quick``."""
    base = QUICK if args.quick else Settings()
    return Settings(
        models=tuple(args.model),
        fat=args.fat,
        lengths=args.lengths or base.lengths,
        fat_lengths=args.fat_lengths or (),
        repeats=args.repeats or base.repeats,
        systems=args.systems,
        concurrency=args.concurrency or base.concurrency,
        kv_gib=args.kv_gib,
    )


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    settings = settings_of(args)
    if not settings.fat and not settings.models:
        parser.error("nothing to measure: give --fat, or --model DIR, or both")
    for model in settings.models:
        if not (Path(model) / "config.json").is_file():
            parser.error(f"--model {model}: no config.json there; it must be a model folder")
    if args.json is not None and not os.access(args.json.absolute().parent, os.W_OK | os.X_OK):
        parser.error(f"--json {args.json}: {args.json.absolute().parent} is not a directory, or cannot be written to")
    if args.output_dir is not None and args.output_dir.exists() and not os.access(args.output_dir, os.W_OK | os.X_OK):
        parser.error(f"--output-dir {args.output_dir}: cannot be written to")
    try:
        from vllm_mc2.bench.serve.command import run
    except ModuleNotFoundError as error:
        print(f'vllm-mc2 bench serve: {error}; pip install "vllm-mc2[bench,vllm]"', file=sys.stderr)
        return 1
    with json_file(args.json) as json_path:
        return run(settings, json_path=json_path, output_dir=args.output_dir)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return number


def _gib(text: str) -> float:
    try:
        gib = float(text)
    except ValueError:
        gib = 0.0
    if not 0.0 < gib <= 1024.0:
        raise argparse.ArgumentTypeError(f"expected a number of GiB above 0, got {text!r}")
    return gib


def _systems(text: str) -> tuple[str, ...]:
    names = text.split(",")
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no system {unknown[0]!r}; known are {_joined(SYSTEMS)}")
    return tuple(name for name in SYSTEMS if name in names)


def _joined(values: tuple[object, ...]) -> str:
    return ",".join(str(value) for value in values)
