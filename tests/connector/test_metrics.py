"""Metrics: what vLLM's own loggers make of them, from real schedulers, with every kind of outcome, and when nobody steps."""

import copy
import logging
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from tests.connector.rig import MakeEngine, RigEngine, assert_clean, prefill, step_until_running
from tests.support.fake_model import expected_tokens, prompt_of
from tests.support.waiting import wait_until
from vllm_mc2.connector import gauges
from vllm_mc2.connector.gauges import EngineGauges
from vllm_mc2.connector.metrics import BUCKETS, HISTOGRAMS, PULL_REASONS, REJECT_REASONS, MC2Stats

ROOT = Path(__file__).resolve().parents[2]
Pair = tuple[RigEngine, RigEngine]
GAUGES = [*gauges.TEXTS]
PROMPT = prompt_of(100)


class Front:
    """vLLM's front end, as to metrics: its Prometheus logger and its log line, fed by engines 0, 1, ... of this process."""

    def __init__(self, *engines: RigEngine) -> None:
        self.logger = PrometheusStatLogger(engines[-1].config, engine_indexes=list(range(len(engines))))
        self.logging = KVConnectorLogging(engines[-1].config.kv_transfer_config)
        self.num_stats = 0
        for index, engine in enumerate(engines):
            self._listen(engine, index)

    def _listen(self, engine: RigEngine, index: int) -> None:
        update = engine.scheduler.update_from_output

        def record(*args: Any) -> Any:
            outputs = update(*args)
            for batch in outputs.values():
                stats = batch.scheduler_stats
                if stats is not None:
                    # As it comes over the wire between the processes.
                    stats.kv_connector_stats = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.kv_connector_stats))
                    self.logger.record(stats, None, engine_idx=index)
                    if stats.kv_connector_stats:
                        self.num_stats += 1
                        self.logging.observe(stats.kv_connector_stats)
            return outputs

        engine.scheduler.update_from_output = record  # type: ignore[method-assign]

    def observe(self, data: dict[str, float], engine_index: int = 0) -> None:
        """What an engine says, without the engine."""
        self.logger.kv_connector_prom.observe(data, engine_index)

    def scrape(self) -> "Scrape":
        """What Prometheus reads, a new answer of each engine in it."""
        with mock.patch.object(gauges, "FRESH_SECONDS", 0.0):
            return Scrape(generate_latest(REGISTRY).decode())

    def line(self) -> str:
        """The periodic log line."""
        lines: list[str] = []
        self.logging.log(log_fn=lambda text, *args: lines.append(text % args))
        return lines[0] if lines else ""


class Scrape:
    """One answer of ``/metrics``."""

    def __init__(self, text: str) -> None:
        self.samples = [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith("vllm:mc2_")
        ]

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples with these labels; there must be some."""
        values = [
            value
            for sample, its_labels, value in self.samples
            if sample == f"vllm:mc2_{name}" and labels.items() <= its_labels.items()
        ]
        assert values, (name, labels)
        return sum(values)

    def gauges(self) -> dict[str, float]:
        """All that are not 0, by name and labels."""
        names = {f"vllm:mc2_{name}" for name in GAUGES}
        return {
            " ".join([name.removeprefix("vllm:mc2_"), *(v for k, v in labels.items() if k not in {"engine", "model_name"})])
            : value
            for name, labels, value in self.samples
            if name in names and value
        }  # fmt: skip


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever answers here is in this process, however busy the machine is."""
    monkeypatch.setattr(gauges, "ANSWER_SECONDS", 60.0)


@pytest.fixture
def make_front() -> Iterator[Callable[..., Front]]:
    yield Front
    unregister_vllm_metrics()


MakeFront = Callable[..., Front]


# --- counters ---


def test_d26_one_of_each_is_counted_apart(
    make_engine: MakeEngine, make_front: MakeFront, caplog: pytest.LogCaptureFixture
) -> None:
    """Success, expiry, refused handshake, dead peer, abort: a counter each, and at most one warning for each."""
    producer = make_engine("kv_producer", extra={"offer_timeout_seconds": 0.05})
    dying = make_engine("kv_producer")
    consumer = make_engine("kv_consumer")
    front = make_front(producer, dying, consumer)
    caplog.clear()
    caplog.set_level(logging.INFO, logger="vllm.mc2")

    def warnings_of(*modules: str) -> list[str]:
        names = {f"vllm.mc2.{module}" for module in modules}
        return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING and each.name in names]

    def of_decode() -> list[str]:
        return warnings_of("decode", "peers", "pulling", "worker", "deathwatch")

    # An abort while prefill is just being met: the one that may be seen waiting.
    consumer.add("abort", PROMPT, prefill(dying, "abort", PROMPT))
    consumer.abort("abort")
    consumer.run()
    # Success.
    consumer.add("good", PROMPT, prefill(dying, "good", PROMPT))
    consumer.run()
    assert of_decode() == []
    # A dead peer.
    ticket = prefill(dying, "late", PROMPT)
    dying.close()
    consumer.add("late", PROMPT, ticket)
    consumer.run()
    assert len(of_decode()) == 1
    # A refused handshake, twice: the second time there is nothing new to say.
    consumer.worker._worker._fingerprint["dtype"] = "something else"
    for name in ("refused", "again"):
        consumer.add(name, PROMPT, prefill(producer, name, PROMPT))
        consumer.run()
    # Expiry, of these two and of one more.
    prefill(producer, "expired", PROMPT)
    time.sleep(0.1)
    producer.step()
    assert len(of_decode()) == 2
    assert len(warnings_of("fingerprint")) == 1  # prefill's own, of the refusal
    expired = warnings_of("prefill", "session")
    assert all("was not claimed in time" in text for text in expired)
    scrape = front.scrape()
    handoffs = {
        (labels["way"], labels["reason"]): value
        for name, labels, value in scrape.samples
        if name == "vllm:mc2_handoffs_total" and value
    }
    assert handoffs.pop(("unfinished", "waiting")) == 1
    late = handoffs.pop(("recompute", "peer_gone"), 0) + handoffs.pop(("recompute", "peer_unreachable"), 0)
    assert late == 1
    assert handoffs == {("attach", ""): 1, ("recompute", "peer_refused"): 2}
    assert scrape.value("leases_ended_total", engine="0", reason="expired") == len(expired) == 3
    assert scrape.value("leases_published_total", engine="0") == 3
    assert scrape.value("blocks_attached_total", engine="2") == 6
    assert scrape.value("kv_bytes_not_copied_total", engine="2") > 0
    assert scrape.value("kv_bytes_copied_total") == 0
    assert scrape.gauges().keys() <= {"peers failed"}


def test_everything_is_there_from_the_start(pair: Pair, make_front: MakeFront) -> None:
    """A counter that begins at 1 has never grown, as far as an alert can see. And nobody is asked before there is anything."""
    front = make_front(*pair)
    with mock.patch.object(gauges, "ask") as asked:
        scrape = front.scrape()
    asked.assert_not_called()
    names = {name for name, _, _ in scrape.samples}
    assert {f"vllm:mc2_{name}_total" for name in ("handoffs", "kv_bytes_not_copied", "leases_published")} <= names
    assert {f"vllm:mc2_{name}_bucket" for name in HISTOGRAMS} <= names
    assert {f"vllm:mc2_{name}" for name in GAUGES} <= names
    assert all(value == 0 for name, _, value in scrape.samples if not name.endswith("_created"))


def test_labels_are_of_the_fixed_sets(make_engine: MakeEngine, make_front: MakeFront) -> None:
    """No request id, no peer's word: what is not known is ``other``. The sets are those of the documentation, in which another
    test looks for every reason in the code.
    """
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", (ROOT / "docs" / "how-it-works.md").read_text(), re.MULTILINE)
    documented = {reason for row in rows for reason in re.findall(r"`(\w+)`", row)}
    assert documented == {*PULL_REASONS, *REJECT_REASONS}
    consumer = make_engine("kv_consumer")
    front = make_front(consumer)
    before = len(front.scrape().samples)
    for index in range(50):
        front.observe(
            {f"handoffs|attach|r{index}": 1, f"handoffs|w{index}|x": 1, f"leases_ended|r{index}": 1, f"new{index}": 1}
        )
    scrape = front.scrape()
    assert scrape.value("handoffs_total", way="attach", reason="other") == 50
    assert scrape.value("handoffs_total", way="other", reason="other") == 50
    assert scrape.value("leases_ended_total", reason="other") == 50
    assert len(scrape.samples) <= before + 2 * 3  # with _created


def test_two_ranks_count_once(make_engine: MakeEngine, make_front: MakeFront) -> None:
    """vLLM's own aggregator puts two workers' answers together; each has done its part of the same hand-offs."""
    producer = make_engine("kv_producer")
    consumer = make_engine("kv_consumer", extra={"mode": "pull"})
    update, aggregator = consumer.scheduler.update_from_output, KVOutputAggregator.from_connector(consumer.connector, 2)
    num_reports: list[int] = []

    def update_from_two(output: Any, result: Any) -> Any:
        twin = copy.copy(result)
        twin.kv_connector_output = copy.deepcopy(result.kv_connector_output)
        num_reports.append(len(twin.kv_connector_output.finished_recving or ()))
        return update(output, aggregator.aggregate([result, twin]))

    consumer.scheduler.update_from_output = update_from_two  # type: ignore[method-assign]
    front = make_front(producer, consumer)
    started = time.monotonic()
    for index in range(3):
        prompt = prompt_of(100, seed=index)
        consumer.add(f"r{index}", prompt, prefill(producer, f"r{index}", prompt))
        consumer.run()
        assert consumer.finished[f"r{index}"][0] == expected_tokens(prompt, 4)
    elapsed = time.monotonic() - started
    assert sum(num_reports) == 3  # each rank
    producer.step()
    scrape = front.scrape()
    assert scrape.value("handoffs_total", way="pull", reason="mode") == 3
    assert scrape.value("kv_bytes_copied_total") == 3 * 7 * consumer.connector._decode._bytes_per_block  # type: ignore[union-attr]
    for name, count in (("handoff_seconds", 3), ("pull_seconds", 3), ("map_seconds", 1)):
        assert scrape.value(f"{name}_count", engine="1") == count
        assert 0 < scrape.value(f"{name}_sum", engine="1") <= elapsed  # they came one after the other
    assert scrape.value("leases_ended_total", reason="released") == 3
    assert_clean(producer, consumer)


def test_a_ticket_that_is_aborted_while_it_is_copied_is_counted_once(
    make_engine: MakeEngine, make_front: MakeFront
) -> None:
    producer = make_engine("kv_producer")
    consumer = make_engine("kv_consumer", extra={"mode": "pull"})
    front = make_front(producer, consumer)
    consumer.add("r", PROMPT, prefill(producer, "r", PROMPT))
    decode: Any = consumer.connector._decode
    while decode._handoffs["r"].state.value != "pulling":
        consumer.step()
    consumer.abort("r")
    wait_until(lambda: consumer.step() >= 0 and not decode._ended_pulling)
    consumer.step()
    handoffs = [v for name, labels, v in front.scrape().samples if name == "vllm:mc2_handoffs_total" and v]
    assert handoffs == [1]
    assert front.scrape().value("handoffs_total", way="pull") == 1  # the bytes were copied


def test_connections_that_are_turned_away(pair: Pair, make_front: MakeFront) -> None:
    producer, _ = pair
    front = make_front(*pair)
    path = producer.connector._prefill._server.path  # type: ignore[union-attr]
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            sock.settimeout(60)
            assert sock.recv(100) == b""
    prefill(producer, "r", PROMPT)
    assert front.scrape().value("connections_rejected_total", engine="0") == 3
    prefill(producer, "s", PROMPT)
    assert front.scrape().value("connections_rejected_total", engine="0") == 3


def test_cached_tokens_are_those_of_prefill(pair: Pair) -> None:
    """VLLM's front end reports what the ticket says that prefill had cached, instead of decode's own hits, which are the blocks
    in place: it must be in the ticket's parameters, unchanged.
    """
    producer, consumer = pair
    for index, cached in enumerate([0, 96, 96]):
        ticket = prefill(producer, f"r{index}", PROMPT)
        assert ticket["remote_prefill_cached_tokens"] == cached
        consumer.add(f"r{index}", PROMPT, ticket)
        consumer.run()
        assert consumer.num_computed_prompt_tokens[f"r{index}"] == 1


# --- histograms ---


def test_a_histogram_keeps_each_value_in_its_bucket_and_the_sum(make_engine: MakeEngine, make_front: MakeFront) -> None:
    consumer = make_engine("kv_consumer")
    front = make_front(consumer)
    values = [0.0, *BUCKETS, *(math.nextafter(bound, 100) for bound in BUCKETS), 0.0003, 0.0004, 0.0004, 1e3]
    own = Histogram("own", "What prometheus_client makes of the values.", buckets=BUCKETS, registry=None)
    halves = [MC2Stats(), MC2Stats()]
    for index, value in enumerate(values):
        own.observe(value)
        halves[index % 2].observe("pull_seconds", value)
    front.observe(halves[0].aggregate(halves[1]).data)
    mine = {labels["le"]: v for name, labels, v in front.scrape().samples if name == "vllm:mc2_pull_seconds_bucket"}
    [family] = own.collect()
    assert mine == {sample.labels["le"]: sample.value for sample in family.samples if sample.name == "own_bucket"}
    assert front.scrape().value("pull_seconds_sum") == pytest.approx(sum(values))


def test_what_travels_does_not_grow_with_what_happened() -> None:
    stats = MC2Stats()
    for index in range(20_000):
        for name in HISTOGRAMS:
            stats.observe(name, index * 1e-3)
    assert len(stats.data) <= 2 * len(HISTOGRAMS) * (len(BUCKETS) + 1)
    assert stats.total("map_seconds") == 20_000
    assert len(msgspec.msgpack.encode(stats.to_dict())) < 5_000


# --- gauges ---


def test_an_offer_that_expires_while_prefill_sleeps(make_engine: MakeEngine, make_front: MakeFront) -> None:
    producer = make_engine("kv_producer", extra={"offer_timeout_seconds": 4.0})  # to be seen in, on a busy machine too
    front = make_front(producer)
    for index in range(2):  # the same prompt: one set of blocks under two leases
        prefill(producer, f"r{index}", PROMPT)
    num_steps, num_stats = producer.num_steps, front.num_stats
    assert front.scrape().gauges() == {"leases offered": 2, "lent_blocks": 8, "lent_share": pytest.approx(8 / 63)}
    wait_until(lambda: front.scrape().gauges() == {})
    assert (producer.num_steps, front.num_stats) == (num_steps, num_stats)  # nobody woke it
    assert producer.connector._prefill.num_lent_blocks == 8  # type: ignore[union-attr]
    producer.step()
    assert_clean(producer)


def test_what_is_lent_is_counted_without_what_is_over(make_engine: MakeEngine, make_front: MakeFront) -> None:
    """Two leases over common blocks, of which one is over and not taken back yet."""
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer")
    front = make_front(producer, consumer)
    long, short = prompt_of(150, seed=3), prompt_of(70, seed=3)
    prefill(producer, "short", short)
    ticket = prefill(producer, "long", long)
    assert front.scrape().value("lent_blocks") == 11  # 4 full ones in common, a tail, and 6 more
    consumer.add("long", long, ticket)
    consumer.run()
    assert front.scrape().value("lent_blocks") == 5
    assert front.scrape().value("leases", state="offered") == 1
    assert front.scrape().value("leases", state="held") == 0


def test_both_sides_during_a_hand_off(pair: Pair, make_front: MakeFront) -> None:
    producer, consumer = pair
    front = make_front(*pair)
    consumer.add("r", PROMPT, prefill(producer, "r", PROMPT), max_tokens=20)
    step_until_running(consumer, "r")
    assert front.scrape().gauges() == {
        "leases held": 1, "lent_blocks": 7, "lent_share": pytest.approx(7 / 63), "decodes": 1,
        "peers ready": 1, "loans": 1, "borrowed_blocks": 6, "requests_with_ticket": 1,
    }  # fmt: skip
    consumer.run()
    assert front.scrape().gauges() == {"decodes": 1, "peers ready": 1}  # prefill has not stepped since


def test_a_decode_that_dies_while_prefill_sleeps(make_engine: MakeEngine, make_front: MakeFront) -> None:
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer")
    front = make_front(producer, consumer)
    consumer.add("r", PROMPT, prefill(producer, "r", PROMPT), max_tokens=20)
    step_until_running(consumer, "r")
    num_steps = producer.num_steps
    consumer.connector._decode.close()  # type: ignore[union-attr]
    wait_until(lambda: front.scrape().value("leases", state="held") == 0)
    assert front.scrape().value("lent_share") == 0
    assert producer.num_steps == num_steps
    producer.step()
    assert front.scrape().value("leases_ended_total", reason="peer_gone") == 1


def test_memory_of_a_dead_prefill(make_engine: MakeEngine, make_front: MakeFront) -> None:
    """Shown while it is mapped, and gone with the last loan, although decode falls asleep then."""
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer")
    front = make_front(producer, consumer)
    consumer.add("r", PROMPT, prefill(producer, "r", PROMPT), max_tokens=20)
    step_until_running(consumer, "r")
    pool_bytes = producer.worker.get_handshake_metadata().pool.pool_bytes
    assert front.scrape().value("dead_peer_bytes") == 0
    producer.close()
    scrape = front.scrape()
    assert scrape.value("peers", state="gone") == scrape.value("loans") == 1
    assert scrape.value("dead_peer_bytes") == pool_bytes > 0
    assert scrape.value("leases", engine="0") == 0  # nobody is there
    consumer.run()
    num_steps = consumer.num_steps
    wait_until(lambda: front.scrape().gauges() == {})
    assert consumer.num_steps == num_steps


def test_one_reading_asks_each_engine_once(pair: Pair, make_front: MakeFront) -> None:
    producer, consumer = pair
    make_front(*pair)
    consumer.add("r", PROMPT, prefill(producer, "r", PROMPT))
    consumer.run()
    with mock.patch.object(gauges, "ask", wraps=gauges.ask) as asked, mock.patch.object(gauges, "FRESH_SECONDS", 600.0):
        for _ in range(5):
            generate_latest(REGISTRY)
        assert asked.call_count == 2


@pytest.mark.parametrize("how", ["silent", "garbage", "another version"])
def test_an_engine_that_does_not_answer_holds_nobody_up(
    make_engine: MakeEngine, make_front: MakeFront, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Not a number then; the next reading does not even try. Once nobody listens any more, there is nothing."""
    producer = make_engine("kv_producer")
    front = make_front(producer)
    name = "ab" * 16
    path = tmp_path / "s" / f"{name[:16]}.sock"
    if how == "another version":
        prefill(producer, "r", PROMPT)
        assert front.scrape().value("leases", state="offered") == 1
        with mock.patch.object(gauges, "PROTOCOL_VERSION", 99):
            assert math.isnan(front.scrape().value("leases"))
        return
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(10)
        front.observe({f"engine|{name}": 1})
        if how == "garbage":

            def answer() -> None:
                with listener.accept()[0] as sock:
                    sock.sendall(b"\xff" * 64)

            answerer = threading.Thread(target=answer)
            answerer.start()
            assert math.isnan(front.scrape().value("leases"))
            answerer.join(timeout=60)
        else:
            monkeypatch.setattr(gauges, "ANSWER_SECONDS", 0.25)
            monkeypatch.setattr(gauges, "PATIENCE_SECONDS", 3600.0)
            assert math.isnan(front.scrape().value("leases"))
            assert math.isnan(front.scrape().value("lent_share"))
            listener.setblocking(False)
            listener.accept()[0].close()
            with pytest.raises(BlockingIOError):
                listener.accept()  # two readings, one question
    path.unlink()
    with mock.patch.object(gauges, "PATIENCE_SECONDS", 0.0):
        front.observe({f"engine|{'cd' * 16}": 1})
        assert front.scrape().gauges() == {}


class OthersGauge:
    """A gauge of somebody else's, such as Ray's: it can be set and nothing else."""

    made: dict[tuple[str, ...], "OthersGauge"]

    def __init__(self, name: str, documentation: str, labelnames: list[str], multiprocess_mode: str) -> None:
        self.name = name
        self.values: dict[tuple[object, ...], float] = {}
        type(self).made[name,] = self

    def labels(self, *labels: object) -> Any:
        return mock.Mock(set=lambda value: self.values.update({labels: value}), spec=["set"])


def test_gauges_that_can_only_be_set(make_engine: MakeEngine, tmp_path: Path) -> None:
    """They are set from a thread until all is 0 again; then that sleeps."""
    producer = make_engine("kv_producer", extra={"offer_timeout_seconds": 4.0})  # to be seen in, on a busy machine too
    OthersGauge.made = {}
    types: dict[type[Any], type[Any]] = {Gauge: OthersGauge, Counter: Counter, Histogram: Histogram}
    with mock.patch.multiple(gauges, REFRESH_SECONDS=0.01, FRESH_SECONDS=0.0):
        theirs = EngineGauges(tmp_path / "s", types, ["engine"], {0: ["0"]})
        leases = OthersGauge.made["vllm:mc2_leases",].values
        assert leases == {("0", "offered"): 0, ("0", "held"): 0}
        prefill(producer, "r", PROMPT)
        theirs.meet(0, producer.connector._inspector.socket_id)  # type: ignore[union-attr]
        wait_until(lambda: leases["0", "offered"] == 1)
        wait_until(lambda: leases["0", "offered"] == 0)
        with mock.patch.object(gauges, "ask") as asked:
            time.sleep(0.2)
        assert asked.call_count <= 1
    producer.step()


SEVERAL_SERVERS = """
import sys, types
from pathlib import Path
import vllm_mc2
package = types.ModuleType("vllm_mc2.connector")  # the real one imports vLLM, which takes long and is not needed here
package.__path__ = [str(Path(vllm_mc2.__file__).parent / "connector")]
sys.modules["vllm_mc2.connector"] = package
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess
from vllm_mc2.connector import gauges
gauges.REFRESH_SECONDS = gauges.FRESH_SECONDS = 0.01
types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
mine = gauges.EngineGauges(Path(sys.argv[1]), types, ["engine"], {0: ["0"]})
mine.meet(0, sys.argv[2])
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print("ready", flush=True)
for _ in sys.stdin:
    text = generate_latest(registry).decode()
    print([line for line in text.splitlines() if line.startswith("vllm:mc2_leases{")], flush=True)
"""


def test_several_api_servers(make_engine: MakeEngine, tmp_path: Path) -> None:
    """prometheus_client's multi-process mode, where values lie in files: they too come back to 0 while the engine sleeps."""
    producer = make_engine("kv_producer", extra={"offer_timeout_seconds": 600.0})
    ticket = prefill(producer, "r", PROMPT)
    files = tmp_path / "files"
    files.mkdir()
    command = [sys.executable, "-c", SEVERAL_SERVERS, str(tmp_path / "s"), producer.connector._inspector.socket_id]  # type: ignore[union-attr]
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(files)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def offered() -> str:
            process.stdin.write("\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            [line] = re.findall(r'vllm:mc2_leases\{engine="0",state="offered"\} ([\d.]+)', process.stdout.readline())  # type: ignore[union-attr]
            return str(line)

        while process.stdout.readline() != "ready\n":
            assert process.poll() is None
        wait_until(lambda: offered() == "1.0")
        consumer = make_engine("kv_consumer")
        consumer.add("r", PROMPT, ticket)
        consumer.run()
        wait_until(lambda: offered() == "0.0")
        process.stdin.close()
    producer.step()


# --- the log line ---


def test_the_log_line(make_engine: MakeEngine, make_front: MakeFront) -> None:
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer")
    front = make_front(producer, consumer)
    for index in range(3):
        prompt = prompt_of(100, seed=index)
        consumer.add(f"r{index}", prompt, prefill(producer, f"r{index}", prompt))
        consumer.run()
    consumer.add("bad", PROMPT, {"do_remote_prefill": True})
    consumer.run()
    producer.step()
    line = front.line()
    assert re.fullmatch(
        r"KV Transfer metrics: hand-offs in place=3, hand-offs computed here \(bad_ticket\)=1, KV not copied MiB=0\.\d, "
        r"mean hand-off ms=[\d.]+, mean map ms=[\d.]+, leases published=3, leases released=3",
        line,
    ), line
    assert front.line() == ""
