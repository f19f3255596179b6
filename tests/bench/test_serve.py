"""``vllm-mc2 bench serve`` without servers: arguments, sizes, checks, report."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from vllm_mc2.bench.serve.arguments import add_parser, settings_of
from vllm_mc2.bench.serve.bench import Model, Sizes
from vllm_mc2.bench.serve.checks import checks
from vllm_mc2.bench.serve.client import Answer
from vllm_mc2.bench.serve.report import render
from vllm_mc2.bench.serve.results import (
    COLD,
    FLOOR,
    HIT,
    CheckRow,
    HandoffRow,
    IdleRow,
    LeftOut,
    MemoryRow,
    Results,
    SystemInfo,
    ThroughputRow,
    TtftRow,
)
from vllm_mc2.bench.serve.rounds import Rounds
from vllm_mc2.bench.serve.settings import SYSTEMS, Settings
from vllm_mc2.bench.stats import spread

ROOT = Path(__file__).resolve().parents[2]
FAT = "fat-llama"


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vllm-mc2 bench")
    add_parser(parser.add_subparsers(required=True))
    return parser.parse_args(["serve", *argv])


# The command line.


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--lengths", "256,x"], "'x'"),
        (["--lengths", "0"], "above 0"),
        (["--repeats", "-1"], "above 0"),
        (["--systems", "mc2,nonsense"], "nonsense"),
        (["--concurrency", ""], "above 0"),
        (["--kv-gib", "nan"], "GiB"),
        (["--kv-gib", "0"], "GiB"),
        (["--nonsense"], "nonsense"),
    ],
)
def test_wrong_arguments_end_with_2_and_say_what_is_wrong(argv, words, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--fat", *argv)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "give --fat, or --model"),
        (["--model", "/nowhere"], "/nowhere: no config.json"),
        (["--fat", "--json", "/nowhere/file.json"], "not a directory"),
    ],
)
def test_wrong_paths_end_with_2_before_anything_starts(argv, words, capsys) -> None:
    args = parse(*argv)
    with pytest.raises(SystemExit) as ended:
        args.run(args)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_settings_come_from_the_arguments_then_from_quick_then_from_the_defaults() -> None:
    assert settings_of(parse("--fat")) == Settings(fat=True)
    quick = settings_of(parse("--fat", "--quick", "--repeats", "3"))
    assert (quick.lengths, quick.repeats) == ((1024,), 3)
    full = settings_of(parse("--fat", "--lengths", "512,256,512", "--fat-lengths", "1024", "--systems", "nixl,mc2"))
    assert full.lengths_of(fat=False) == (256, 512)
    assert full.lengths_of(fat=True) == (1024,)
    assert full.systems == ("mc2", "nixl")


def test_help_teaches_and_imports_nothing_heavy(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--help")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*SYSTEMS, "exit codes", "examples:", "PYTHONPATH"))
    code = "import sys, vllm_mc2.bench.serve.arguments; print([m for m in %r if m in sys.modules])"
    heavy = ("vllm", "torch", "httpx", "matplotlib", "numpy")
    found = subprocess.run(
        [sys.executable, "-c", code % (heavy,)], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    assert found.stdout.strip() == "[]"


# What is made of the samples.


def row(system: str, decode_ms: float | None, *, prefill_ms: float | None = None, itl_ms: float | None = None,
        length: int = 4097, model: str = FAT, equal: bool | None = True, group: int = 0) -> TtftRow:  # fmt: skip
    def times(middle: float | None) -> object:
        return None if middle is None else spread([middle * 0.9e-3, middle * 1e-3, middle * 1.2e-3])

    return TtftRow(
        model=model,
        group=group,
        system=system,
        prompt_tokens=length,
        prefill=times(prefill_ms),
        decode_ttft=times(decode_ms),
        ttft=times((decode_ms or 0) + (prefill_ms or 0) or 9000),
        itl=times(itl_ms),
        tokens_equal=equal,
    )


def synthetic(**mc2: object) -> Results:
    ours = {"decode_ms": 50.0, "prefill_ms": 9000.0, "itl_ms": 40.0, **mc2}
    rows = [
        row(COLD, None, itl_ms=40, equal=None),
        row(FLOOR, 45),
        row(HIT, 500, equal=None),
        row("none", 9000, prefill_ms=9000, itl_ms=40),
        row("mc2", ours.pop("decode_ms"), **ours),
        row("nixl", 240, prefill_ms=15000, itl_ms=50),
        row("mc2", 30, prefill_ms=1000, itl_ms=20, length=257),
        row("none", 900, prefill_ms=1000, itl_ms=20, length=257),
    ]
    return Results(machine={"cpu": "some"}, settings=Settings(fat=True), ttft=rows)


def verdicts(results: Results) -> dict[str, bool]:
    return {check.name: check.ok for check in checks(results, FAT)}


def test_ratios_that_were_measured_turn_by_turn_count_more_than_medians() -> None:
    results = synthetic(itl_ms=45.0, prefill_ms=12000.0)
    assert not verdicts(results)["ITL over that without hand-off, 4097 tokens"]
    ours = next(index for index, row in enumerate(results.ttft) if row.system == "mc2" and row.prompt_tokens == 4097)
    ratios = {"itl_over_none": spread([1.0, 1.05, 1.3]), "prefill_over_none": spread([0.9, 1.2, 1.3])}
    results.ttft[ours] = msgspec.structs.replace(results.ttft[ours], **ratios)
    found = verdicts(results)
    assert found["ITL over that without hand-off, 4097 tokens"]
    assert not found["prefill leg over that without hand-off, 4097 tokens"]


def test_ours_and_the_pair_without_hand_off_have_their_turns_side_by_side() -> None:
    fleet = SimpleNamespace(systems=dict.fromkeys(SYSTEMS))
    rounds = Rounds(fleet, SimpleNamespace(), model=FAT, group=0, vocabulary=100, seed=1)  # type: ignore[arg-type]
    first = set()
    for repeat in range(20):
        order = rounds._order(repeat, 1024)
        assert sorted(order) == sorted({*SYSTEMS, FLOOR} - {COLD})
        distance = order.index("none") - order.index("mc2")
        assert abs(distance) == 1
        first.add(distance)
    assert first == {-1, 1}


def test_checks_on_a_good_run() -> None:
    results = synthetic()
    results.idle_cpu = [
        IdleRow(model=FAT, group=0, system=name, cores=cores, seconds=10)
        for name, cores in (("none", 0.010), ("mc2", 0.012), ("nixl", 1.4))
    ]
    found = verdicts(results)
    assert all(found.values())
    assert [name for name in found if "floor" in name] == ["decode TTFT over the floor, 4097 tokens"]
    assert "decode TTFT over nixl's, 4097 tokens" in found
    assert "decode TTFT over mooncake's, 4097 tokens" not in found
    assert {"prefill leg over that without hand-off, 257 tokens", "ITL over that without hand-off, 4097 tokens"} <= set(
        found
    )
    assert any(name.startswith("idle CPU") for name in found)


@pytest.mark.parametrize(
    ("mc2", "name"),
    [
        ({"decode_ms": 55.0}, "decode TTFT over the floor, 4097 tokens"),
        ({"decode_ms": 241.0}, "decode TTFT over nixl's, 4097 tokens"),
        ({"prefill_ms": 10000.0}, "prefill leg over that without hand-off, 4097 tokens"),
        ({"itl_ms": 45.0}, "ITL over that without hand-off, 4097 tokens"),
        ({"equal": False}, "mc2: answers that differ from the single server's, 4097 tokens"),
    ],
)
def test_checks_notice(mc2, name) -> None:
    found = [check for check in checks(synthetic(**mc2), FAT) if check.name == name]
    assert [check.ok for check in found if not check.ok] == [False]


def test_checks_compare_within_a_group_only_and_the_floor_only_with_the_fat_model() -> None:
    results = synthetic()
    results.ttft = [
        row(FLOOR, 45),
        row("mc2", 50, prefill_ms=9000, itl_ms=40),
        row("mooncake", 45, prefill_ms=9000, itl_ms=40, group=1),
        row(FLOOR, 10, model="other"),
        row("mc2", 50, prefill_ms=9000, itl_ms=40, model="other"),
    ]
    assert sorted(name for name in verdicts(results) if "decode TTFT" in name) == [
        "decode TTFT over the floor, 4097 tokens"
    ]


def test_idle_cpu_is_allowed_the_stated_noise_and_no_more() -> None:
    def with_cores(cores: float) -> bool:
        results = synthetic()
        results.idle_cpu = [
            IdleRow(model=FAT, group=0, system=name, cores=used, seconds=10)
            for name, used in (("none", 0.01), ("mc2", cores))
        ]
        return all(verdicts(results).values())

    assert with_cores(0.0149)
    assert not with_cores(0.0151)


def full() -> Results:
    results = synthetic()
    where = {"model": FAT, "group": 0}
    results.notes = ["something in common"]
    results.systems = [SystemInfo("mc2", "vllm-mc2", "as it is")]
    results.throughput = [
        ThroughputRow(**where, system="mc2", concurrency=4, prompt_tokens=513, num_requests=8, output_tokens_per_second=50.0,
                      requests_per_second=1.5, mean_ttft=0.9, mean_decode_ttft=0.1)
    ]  # fmt: skip
    results.idle_cpu = [IdleRow(**where, system="mc2", cores=0.01, seconds=10.0)]
    results.memory = [
        MemoryRow(**where, system="mc2", prompt_tokens=1025, num_requests=4, kv_bytes=4 << 26, before_bytes=3 << 30,
                  holding_bytes=(3 << 30) + (9 << 20), prefill_kv_bytes=4 << 26, decode_kv_bytes=1 << 20)
    ]  # fmt: skip
    results.handoffs = [
        HandoffRow(**where, attached=9, not_attached=0, kv_bytes_not_copied=123456789, seconds_per_handoff=2e-4)
    ]
    results.checks = [CheckRow.of(check) for check in checks(results, FAT)]
    results.left_out = [LeftOut(FAT, "mooncake", "mooncake-prefill ended with status 1")]
    return results


def test_the_report_says_everything() -> None:
    text = render(full())
    for words in (
        "fat-llama, prompts of 4097 tokens", "floor: all but one token cached", "NixlConnector", "9,000 (8,280-10,440)",
        "something in common", "123,456,789", "mooncake-prefill ended with status 1", "ok", "at most", "minutes",
    ):  # fmt: skip
        assert words in text
    assert "NOT met" not in text
    bad = full()
    bad.checks = [CheckRow.of(check) for check in checks(synthetic(equal=False), FAT)]
    assert "NOT met" in render(bad)


def test_an_empty_report_is_no_error() -> None:
    assert "took" in render(Results(machine={}, settings=Settings()))


def test_json_and_back() -> None:
    results = full()
    data = msgspec.json.encode(results)
    assert msgspec.json.decode(data, type=Results) == results
    assert set(json.loads(data)) >= {
        "machine", "settings", "systems", "ttft", "throughput", "idle_cpu", "memory", "checks", "left_out",
    }  # fmt: skip
    assert {"name", "model", "limit", "measured", "unit", "ok"} == set(json.loads(data)["checks"][0])


def test_charts_are_drawn_for_whatever_there_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from vllm_mc2.bench.serve.charts import draw

    paths = draw(full(), tmp_path)
    assert sorted(path.name for path in paths) == sorted(
        f"{chart}-{FAT}.{kind}" for chart in ("decode-ttft", "itl", "throughput") for kind in ("png", "svg")
    )
    assert all(path.stat().st_size > 1000 for path in paths)


def test_time_between_tokens_is_not_fooled_by_tokens_that_are_read_together() -> None:
    steady = [1.0 + 0.04 * index for index in range(33)]
    assert Answer(0.0, times=steady).itl_seconds == pytest.approx(0.04)
    in_pairs = [steady[index + index % 2] for index in range(32)] + steady[32:]
    assert Answer(0.0, times=in_pairs).itl_seconds == pytest.approx(0.04)
    stalled = steady[:10] + [time + 1.0 for time in steady[10:]]
    assert Answer(0.0, times=stalled).itl_seconds == pytest.approx(0.04)


def write_config(folder: Path, **more: int) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"num_hidden_layers": 4, "num_attention_heads": 16, "head_dim": 128, "vocab_size": 2048,
              "max_position_embeddings": 8192, **more}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_sizes_leave_room_for_what_is_lent(tmp_path: Path) -> None:
    model = Model.read(write_config(tmp_path / "m"), is_fat=True)
    assert model.kv_bytes_per_token == 64 << 10
    sizes = Sizes.of(Settings(fat=True, lengths=(1000, 4096), concurrency=(8,)), model)
    assert sizes.lengths == (1024, 4096)
    assert (sizes.load_length, sizes.hold_length, sizes.max_model_len) == (512, 1024, 4224)
    tokens = sizes.kv_bytes // model.kv_bytes_per_token
    lent = 8 * 640
    assert lent <= 0.75 * tokens
    assert lent + sizes.max_model_len <= tokens
    assert Sizes.of(Settings(fat=True, kv_gib=1.0), model).kv_bytes == 1 << 30
    small = Model.read(write_config(tmp_path / "m", max_position_embeddings=2048), is_fat=False)
    with pytest.raises(ValueError, match="2048 tokens at most"):
        Sizes.of(Settings(), small)
