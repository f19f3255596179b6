"""One target in a process of its own, driven by libFuzzer (atheris). Started by ``python -m tests.fuzz``.

``python -m tests.fuzz.worker TARGET FOLDER [libFuzzer's options]``: with a file among the options, that one input is run.
"""

import json
import os
import resource
import sys
import zlib
from pathlib import Path

import atheris

NUM_FEATURES = 8192
ADDRESS_SPACE_BYTES = 12 << 30
"""What a decoder allocates for a lie of a peer ends here, not in the machine. torch and libFuzzer reserve some of it."""


def main() -> None:
    """Runs until libFuzzer has enough, which ends the process."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    package = os.environ.get("MC2_FUZZ_PACKAGE")
    if package is not None:  # a copy with a bug in it: tests.fuzz.mutants
        sys.meta_path[:] = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
        sys.path.insert(0, package)
    with atheris.instrument_imports(include=["vllm_mc2"]):
        from tests.fuzz.catalogue import load

        target = load(name)
    from tests.fuzz.mutate import TreeMutator
    from tests.fuzz.target import Watch

    seeds = target.seeds()
    findings = sorted((Path(__file__).parent / "corpus" / name).glob("*")) if package is None else []
    corpus = folder / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate([*seeds, *(path.read_bytes() for path in findings)]):
        (corpus / f"seed-{number:03}").write_bytes(seed)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, resource.RLIM_INFINITY))
    # msgspec is C and shows the fuzzer nothing: what a target answers stands in for the branches in it.
    features = [atheris._reserve_counter() for _ in range(NUM_FEATURES)]
    tally: dict[str, int] = {}
    watch = Watch(target.may_open)
    target.run(seeds[0])  # what is made or imported once is made and imported here
    done = 0

    def test(data: bytes) -> None:
        nonlocal done
        answer = watch.run(target, data)
        atheris._trace_branch(features[zlib.crc32(answer.encode("utf-8", "replace")) % NUM_FEATURES])
        if len(tally) < 4096 or answer in tally:
            tally[answer] = tally.get(answer, 0) + 1
        done += 1
        if done % 1000 == 0:
            (folder / f"{name}.json").write_text(json.dumps({"inputs": done, "answers": tally}))

    options = [
        sys.argv[0],
        f"-max_len={target.max_bytes}",
        f"-artifact_prefix={folder}/{name}-",
        f"-mutate_depth={5 if target.form is None else 1}",  # the mutator of trees makes several changes by itself
        "-timeout=60",
        "-rss_limit_mb=4096",
        "-print_final_stats=1",
        *sys.argv[3:],
    ]
    if not any(Path(option).is_file() for option in sys.argv[3:]):
        options.append(str(corpus))
    mutator = None if target.form is None else TreeMutator(target.form, seeds, _change_bytes)
    if mutator is None:
        atheris.Setup(options, test)
    else:
        atheris.Setup(options, test, custom_mutator=mutator)
    atheris.Fuzz()


def _change_bytes(data: bytes, max_size: int) -> bytes:
    changed: bytes = atheris.Mutate(data, max_size)  # looked up late: libFuzzer puts its own there
    return changed


if __name__ == "__main__":
    main()
