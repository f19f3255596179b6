"""What ``vllm-mc2 bench serve`` does with its settings: run, print, write, and clean up whatever happens."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType

import msgspec

from vllm_mc2.bench.machine import describe_machine
from vllm_mc2.bench.serve.bench import Model, Sizes, run_model
from vllm_mc2.bench.serve.charts import draw
from vllm_mc2.bench.serve.checks import checks
from vllm_mc2.bench.serve.fleet import Say
from vllm_mc2.bench.serve.models import FAT, fat_model
from vllm_mc2.bench.serve.report import render
from vllm_mc2.bench.serve.results import CheckRow, Results
from vllm_mc2.bench.serve.settings import Settings

DONE, NOTHING, INTERRUPTED = 0, 1, 130


def run(settings: Settings, *, json_path: Path | None, output_dir: Path | None) -> int:
    """The whole command; its exit code."""
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"bench serve {time.monotonic() - started:6.0f} s: {text}", file=sys.stderr, flush=True)

    results = Results(machine=describe_machine(), settings=settings, notes=_notes())
    code = DONE
    with _work_folder(output_dir) as folder, _interrupts():
        try:
            if not _measure(settings, results, folder, say):
                code = NOTHING
        except KeyboardInterrupt:
            say("interrupted; all servers are stopped, what was measured until then follows")
            code = INTERRUPTED
        results.checks = [CheckRow.of(check) for check in checks(results, FAT)]
        results.seconds = time.monotonic() - started
        _publish(results, json_path, output_dir, say)
    if code == DONE and not results.ttft:
        code = NOTHING
    return code


def _measure(settings: Settings, results: Results, folder: Path, say: Say) -> bool:
    """False if a model cannot be used at all."""
    try:
        models = [Model.read(Path(path).absolute(), is_fat=False) for path in settings.models]
        if settings.fat:
            say("making the random model (once)" if not (folder / FAT).exists() else "the random model is there")
            models.insert(0, Model.read(fat_model(folder), is_fat=True))
        sizes = [Sizes.of(settings, model) for model in models]
    except (OSError, KeyError, ValueError, ImportError) as error:
        say(f"a model cannot be used: {error!r}")
        return False
    for model, size in zip(models, sizes, strict=True):
        run_model(settings, model, size, results, folder / "logs" / model.name, say)
    return True


def _notes() -> list[str]:
    """What all systems had in common and a reader must know."""
    replaced = isinstance(os.sched_yield, FunctionType)
    return [
        "all servers: --enforce-eager, one compute thread, no pinning (threads that pin themselves are freed), prefix caching on",
        "client and servers on the same cores; both legs sent by the client, no proxy; a connection for each request",
        "the processes of all systems but the one measured are stopped (SIGSTOP)",
        "os.sched_yield is "
        + ("replaced in this process and, by PYTHONPATH, in all servers alike" if replaced else "the kernel's own"),
    ]


def _publish(results: Results, json_path: Path | None, output_dir: Path | None, say: Say) -> None:
    # First what is kept: whoever reads the report through a pipe may have had enough of it.
    if json_path is not None:
        draft = json_path.with_name(f"{json_path.name}.new")
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
        draft.replace(json_path)
        say(f"wrote {json_path}")
    if output_dir is not None and (results.ttft or results.throughput):
        try:
            paths = draw(results, output_dir)
        except ImportError as error:
            say(f"no charts: {error}")
        else:
            say(f"wrote {len(paths)} charts to {output_dir}")
    print(render(results), flush=True)


@contextmanager
def _work_folder(output_dir: Path | None) -> Iterator[Path]:
    """Where logs and the random model go: below the output folder, which keeps them, or a temporary one."""
    if output_dir is not None:
        output_dir.mkdir(parents=True, exist_ok=True)
        yield output_dir.absolute()
        return
    folder = Path(tempfile.mkdtemp(prefix="mc2-bench-serve-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _interrupts() -> Iterator[None]:
    """The first of these signals ends the measuring; later ones must not keep servers from being stopped."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(_signal: int, _frame: object) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    # Also SIGINT: a shell that starts this in the background sets it to be ignored.
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
