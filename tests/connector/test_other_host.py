"""Prefill and decode that share no directory: control by TCP, blocks by Mooncake, over the loopback interface."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from tests.connector.outcome import finish, num_leases, report_of
from tests.connector.rig import MakeEngine, RigEngine, assert_clean, prefill
from tests.network.conftest import needs_mooncake
from tests.network.relay import Relay
from tests.support.fake_model import expected_tokens, prompt_of
from tests.support.ports import own_ports
from tests.support.waiting import wait_until
from vllm_mc2.connector import compat
from vllm_mc2.errors import ConfigError, TransportError
from vllm_mc2.network.secret import address_proof
from vllm_mc2.network.transport import Piece, Reader
from vllm_mc2.ticket import TICKET_KEY, TcpAddress

pytestmark = needs_mooncake
SECRET = "0123456789abcdef0123456789abcdef"
OTHER_SECRET = "fedcba9876543210fedcba9876543210"
ADDRESS_VARIABLE = "MC2_TEST_ADDRESS"
FAR: dict[str, Any] = {"tcp_secret": SECRET, "tcp_timeout_seconds": 3.0}


@pytest.fixture
def producer(make_engine: MakeEngine) -> RigEngine:
    return make_engine("kv_producer", extra={**FAR, "tcp_address": os.environ.get(ADDRESS_VARIABLE, "127.0.0.1")})


@pytest.fixture
def make_consumer(make_engine: MakeEngine, tmp_path: Path) -> Callable[..., RigEngine]:
    def make(policy: str = "recompute", **extra: Any) -> RigEngine:
        return make_engine("kv_consumer", policy=policy, extra={**FAR, "socket_dir": str(tmp_path / "d"), **extra})

    return make


@pytest.fixture
def consumer(make_consumer: Callable[..., RigEngine]) -> RigEngine:
    return make_consumer()


@pytest.fixture(params=["recompute", "fail"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def through(relay: Relay, ticket: dict[str, Any]) -> dict[str, Any]:
    """The same ticket with the relay's address, proven as prefill would."""
    address = TcpAddress("127.0.0.1", relay.port)
    inner = ticket[TICKET_KEY]
    proof = address_proof(SECRET.encode(), inner["incarnation"], address)
    return {**ticket, "remote_port": relay.port, TICKET_KEY: {**inner, "address_proof": proof}}


@pytest.fixture
def relay(producer: RigEngine) -> Iterator[Relay]:
    half: Any = producer.connector._prefill
    with Relay(half._address) as relay:
        yield relay


def sources(consumer: RigEngine) -> dict[int, Any]:
    worker: Any = consumer.worker._worker
    return dict(worker._network.puller._sources)


class Meddling:
    """A reader with something done before and after each read."""

    def __init__(self, inner: Reader, before: Callable[[], None], after: Callable[[], None]) -> None:
        self.inner, self.before, self.after = inner, before, after

    def read(self, pieces: Sequence[Piece]) -> None:
        self.before()
        self.inner.read(pieces)
        self.after()

    def close(self) -> None:
        self.inner.close()


def nothing() -> None:
    pass


def meddle(consumer: RigEngine, before: Callable[[], None] = nothing, after: Callable[[], None] = nothing) -> None:
    """With the reads of the only peer."""
    (source,) = sources(consumer).values()
    source._parts = [part._replace(reader=Meddling(part.reader, before, after)) for part in source._parts]


def hand_over(producer: RigEngine, consumer: RigEngine, name: str, seed: int = 0) -> dict[str, Any]:
    prompt = prompt_of(50, seed=seed)
    consumer.add(name, prompt, prefill(producer, name, prompt))
    return report_of(consumer, name, prompt)


@pytest.mark.parametrize("length", [1, 2, 16, 17, 33, 200])
def test_decode_gets_the_right_tokens_and_computes_one(producer: RigEngine, consumer: RigEngine, length: int) -> None:
    prompt = prompt_of(length)
    consumer.add("r", prompt, prefill(producer, "r", prompt), max_tokens=20)
    report = report_of(consumer, "r", prompt, 20)
    assert (report["way"], report["reason"]) == ("pull", "other_host")
    assert consumer.num_computed_prompt_tokens["r"] == 1
    assert consumer.stats["handoffs|pull|other_host"] == 1
    assert_clean(producer, consumer)


def test_the_lease_ends_while_the_request_goes_on(producer: RigEngine, consumer: RigEngine) -> None:
    prompt = prompt_of(70)
    consumer.add("r", prompt, prefill(producer, "r", prompt), max_tokens=100)
    assert num_leases(producer) == 1
    while not consumer._outputs.get("r"):
        consumer.step()
    wait_until(lambda: num_leases(producer) == 0)
    report_of(consumer, "r", prompt, 100)
    assert_clean(producer, consumer)


@pytest.mark.parametrize("window", [20, 64])
def test_groups_with_windows(make_engine: MakeEngine, tmp_path: Path, window: int) -> None:
    near, far = {**FAR, "tcp_address": "127.0.0.1"}, {**FAR, "socket_dir": str(tmp_path / "d")}
    producer = make_engine("kv_producer", window=window, num_blocks=160, extra=near)
    consumer = make_engine("kv_consumer", window=window, num_blocks=160, extra=far)
    for length in (10, 100, 200):
        prompt = prompt_of(length, seed=length)
        consumer.add(f"r{length}", prompt, prefill(producer, f"r{length}", prompt), max_tokens=20)
        consumer.run()
        assert consumer.finished[f"r{length}"][0] == expected_tokens(prompt, 20, window)
        assert consumer.finished[f"r{length}"][2]["mc2"]["reason"] == "other_host"  # type: ignore[index]
        assert consumer.num_computed_prompt_tokens[f"r{length}"] == 1
    wait_until(lambda: num_leases(producer) == 0)
    assert_clean(producer, consumer)


def test_many_at_once(producer: RigEngine, consumer: RigEngine) -> None:
    prompts = [prompt_of(20 + 7 * number, seed=number) for number in range(8)]
    for number, prompt in enumerate(prompts):
        consumer.add(f"r{number}", prompt, prefill(producer, f"r{number}", prompt))
    for number, prompt in enumerate(prompts):
        assert report_of(consumer, f"r{number}", prompt)["way"] == "pull"
    wait_until(lambda: num_leases(producer) == 0)
    assert_clean(producer, consumer)


def test_one_ticket_for_several_requests(producer: RigEngine, consumer: RigEngine) -> None:
    prompt = prompt_of(60)
    ticket = prefill(producer, "r", prompt)
    for number in range(3):
        consumer.add(f"r{number}", prompt, ticket)
    for number in range(3):
        assert report_of(consumer, f"r{number}", prompt)["way"] in {"pull", "recompute"}
    assert consumer.finished["r0"][2]["mc2"]["way"] == "pull"  # type: ignore[index]
    wait_until(lambda: num_leases(producer) == 0)
    assert_clean(producer, consumer)


def test_another_prompt_than_the_tickets(
    producer: RigEngine, make_consumer: Callable[..., RigEngine], policy: str
) -> None:
    consumer = make_consumer(policy)
    ticket = prefill(producer, "r", prompt_of(60))
    other = prompt_of(60, seed=1)
    consumer.add("r", other, ticket)
    assert finish(consumer, "r", policy, other)["reason"] == "prompt_mismatch"
    assert num_leases(producer) == 1  # a look has ended nothing
    consumer.add("again", prompt_of(60), ticket)
    consumer.run()
    assert consumer.finished["again"][0] == expected_tokens(prompt_of(60), 4)
    wait_until(lambda: num_leases(producer) == 0)


def test_a_request_that_is_aborted_while_it_waits(producer: RigEngine, consumer: RigEngine) -> None:
    """Its lease is declined, not left to the offer timeout."""
    prompt = prompt_of(60)
    consumer.add("r", prompt, prefill(producer, "r", prompt))
    consumer.step()
    consumer.abort("r")
    connector: Any = consumer.connector

    def is_over() -> bool:
        if connector.has_pending_push_work():
            consumer.step()
        return num_leases(producer) == 0 and not connector.has_pending_push_work()

    wait_until(is_over)
    assert_clean(producer, consumer)


def test_a_request_that_is_aborted_while_its_blocks_are_read(producer: RigEngine, consumer: RigEngine) -> None:
    hand_over(producer, consumer, "first")
    is_reading, go_on = threading.Event(), threading.Event()
    meddle(consumer, before=lambda: (is_reading.set(), go_on.wait(60), None)[2])
    prompt = prompt_of(60, seed=5)
    consumer.add("r", prompt, prefill(producer, "r", prompt))
    wait_until(lambda: consumer.step() >= 0 and is_reading.is_set())
    consumer.abort("r")
    assert num_leases(producer) == 1
    go_on.set()
    consumer.run()
    wait_until(
        lambda: (consumer.step() if consumer.connector.has_pending_push_work() else 0, num_leases(producer) == 0)[1]
    )
    assert_clean(producer, consumer)


# --- who may talk to whom ---


def test_a_decode_without_a_secret(make_consumer: Callable[..., RigEngine], producer: RigEngine, policy: str) -> None:
    consumer = make_consumer(policy, tcp_secret=None)
    prompt = prompt_of(40)
    consumer.add("r", prompt, prefill(producer, "r", prompt))
    assert finish(consumer, "r", policy, prompt)["reason"] == "peer_unreachable"


def test_a_prefill_without_a_secret_listens_to_nobody(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    producer = make_engine("kv_producer", extra={"tcp_address": "127.0.0.1"})
    ticket = prefill(producer, "r", prompt_of(40))
    assert (ticket["remote_host"], ticket["remote_port"]) == ("localhost", 0)
    assert ticket[TICKET_KEY].get("address_proof") is None


def test_another_secret(make_consumer: Callable[..., RigEngine], producer: RigEngine, policy: str) -> None:
    """Then the ticket's proof is another too, and decode does not even try."""
    consumer = make_consumer(policy, tcp_secret=OTHER_SECRET)
    prompt = prompt_of(40)
    consumer.add("r", prompt, prefill(producer, "r", prompt))
    assert finish(consumer, "r", policy, prompt)["reason"] == "peer_unreachable"
    assert producer.connector._prefill._network._server.num_rejected == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("forgery", ["another port", "another host", "no proof", "a guess"])
def test_decode_connects_only_to_what_a_ticket_proves(
    producer: RigEngine, consumer: RigEngine, relay: Relay, forgery: str
) -> None:
    prompt = prompt_of(40)
    ticket = prefill(producer, "r", prompt)
    good = through(relay, ticket)
    forged: dict[str, Any] = {
        "another port": {**ticket, "remote_port": relay.port},
        "another host": {**good, "remote_host": "localhost"},
        "no proof": {**good, TICKET_KEY: {**good[TICKET_KEY], "address_proof": None}},
        "a guess": {**good, TICKET_KEY: {**good[TICKET_KEY], "address_proof": "0" * 32}},
    }[forgery]
    consumer.add("r", prompt, forged)
    assert finish(consumer, "r", "recompute", prompt)["reason"] == "peer_unreachable"
    assert relay.num_connections == 0
    consumer.add("good", prompt, good)
    consumer.run()
    assert relay.num_connections > 0


@pytest.mark.parametrize("value", [None, 7, "", "x" * 300, ["10.0.0.1"], {"host": "x"}, True])
@pytest.mark.parametrize("field", ["remote_host", "remote_port"])
def test_addresses_of_any_kind_from_a_client(
    producer: RigEngine, consumer: RigEngine, field: str, value: object
) -> None:
    prompt = prompt_of(40)
    consumer.add("r", prompt, {**prefill(producer, "r", prompt), field: value})
    assert finish(consumer, "r", "recompute", prompt)["reason"] == "peer_unreachable"


def test_mode_attach_refuses_another_host(
    make_consumer: Callable[..., RigEngine], producer: RigEngine, policy: str
) -> None:
    consumer = make_consumer(policy, mode="attach")
    prompt = prompt_of(40)
    consumer.add("r", prompt, prefill(producer, "r", prompt))
    assert finish(consumer, "r", policy, prompt)["reason"] == "other_host"
    wait_until(lambda: num_leases(producer) <= 1)


@pytest.mark.parametrize("field", ["model", "dtype", "block_bytes", "attention"])
def test_what_differs_is_refused_by_name(
    producer: RigEngine, consumer: RigEngine, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker: Any = consumer.worker._worker
    worker._fingerprint[field] = "something else"
    prompt = prompt_of(40)
    consumer.add("r", prompt, prefill(producer, "r", prompt))
    if field == "block_bytes":  # of a rank, which may be of another size
        assert report_of(consumer, "r", prompt)["way"] == "pull"
    else:
        assert finish(consumer, "r", "recompute", prompt)["reason"] == "peer_refused"


def test_one_decode_with_a_prefill_here_and_one_elsewhere(
    make_engine: MakeEngine, producer: RigEngine, consumer: RigEngine, tmp_path: Path
) -> None:
    near = make_engine("kv_producer", extra={"socket_dir": str(tmp_path / "d")})
    prompts = [prompt_of(50, seed=1), prompt_of(50, seed=2)]
    consumer.add("near", prompts[0], prefill(near, "near", prompts[0]))
    consumer.add("far", prompts[1], prefill(producer, "far", prompts[1]))
    assert report_of(consumer, "near", prompts[0])["way"] == "attach"
    assert report_of(consumer, "far", prompts[1])["way"] == "pull"
    wait_until(lambda: num_leases(producer) == 0)
    assert_clean(near, producer, consumer)


def test_a_prefill_with_a_network_is_still_attached_to_on_its_own_host(
    make_engine: MakeEngine, producer: RigEngine
) -> None:
    consumer = make_engine("kv_consumer", extra=FAR)
    assert hand_over(producer, consumer, "r")["way"] == "attach"


def test_an_address_that_cannot_be_listened_on_stops_the_start(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="tcp_address"):
        make_engine("kv_producer", extra={**FAR, "tcp_address": "0.0.0.0"})


def test_data_parallel_ranks_have_neighbouring_ports(make_engine: MakeEngine, tmp_path: Path) -> None:
    with own_ports(1) as (free,), mock.patch.object(compat, "data_parallel_rank", return_value=1):
        port = free - 1
        producer = make_engine("kv_producer", extra={**FAR, "tcp_address": "127.0.0.1", "tcp_port": port})
        assert prefill(producer, "r", prompt_of(40))["remote_port"] == port + 1


@pytest.fixture
def own_port() -> Iterator[int]:
    with own_ports(1) as (port,):
        yield port


def test_a_prefill_that_restarts_on_its_port_is_another(
    make_engine: MakeEngine, consumer: RigEngine, own_port: int
) -> None:
    near = {**FAR, "tcp_address": "127.0.0.1", "tcp_port": own_port}
    first = make_engine("kv_producer", extra=near)
    hand_over(first, consumer, "first")
    prompt = prompt_of(60, seed=4)
    ticket = prefill(first, "old", prompt)
    first.close()
    second = make_engine("kv_producer", extra=near)
    consumer.add("old", prompt, ticket)
    reason = finish(consumer, "old", "recompute", prompt)["reason"]
    assert reason in {"peer_gone", "peer_refused", "peer_unreachable"}
    assert hand_over(second, consumer, "again", seed=9)["way"] == "pull"


# --- a cable that is cut ---


def meet(producer: RigEngine, consumer: RigEngine, relay: Relay) -> None:
    """A first hand-over, so that the session is open when the next one begins."""
    prompt = prompt_of(40, seed=1)
    consumer.add("first", prompt, through(relay, prefill(producer, "first", prompt)))
    assert report_of(consumer, "first", prompt)["way"] == "pull"
    consumer.stats.clear()


def lose_one_and_go_on(producer: RigEngine, consumer: RigEngine, relay: Relay, policy: str) -> None:
    """The next request's blocks do not count; prefill takes them back; with a whole cable all is as before."""
    prompt = prompt_of(40)
    consumer.add("r", prompt, through(relay, prefill(producer, "r", prompt)))
    assert finish(consumer, "r", policy, prompt)["reason"] == "pull_failed"
    wait_until(lambda: num_leases(producer) == 0)
    relay.mend()
    assert hand_over(producer, consumer, "again", seed=3)["way"] == "pull"
    assert_clean(producer, consumer)


def test_cut_before_the_first_word(
    producer: RigEngine, make_consumer: Callable[..., RigEngine], relay: Relay, policy: str
) -> None:
    consumer = make_consumer(policy, handshake_timeout_seconds=5.0)
    prompt = prompt_of(40)
    relay.cut()
    consumer.add("r", prompt, through(relay, prefill(producer, "r", prompt)))
    assert finish(consumer, "r", policy, prompt)["reason"] in {"peer_unreachable", "handshake_timeout"}
    relay.mend()
    assert hand_over(producer, consumer, "again", seed=3)["way"] == "pull"


def test_cut_while_the_claim_is_on_its_way(
    producer: RigEngine, make_consumer: Callable[..., RigEngine], relay: Relay, policy: str
) -> None:
    consumer = make_consumer(policy, handshake_timeout_seconds=5.0)
    meet(producer, consumer, relay)
    relay.cut()
    prompt = prompt_of(40)
    consumer.add("r", prompt, through(relay, prefill(producer, "r", prompt)))
    reason = finish(consumer, "r", policy, prompt)["reason"]
    assert reason in {"peer_gone", "peer_unreachable", "handshake_timeout"}
    relay.mend()
    assert num_leases(producer) == 1  # nobody has claimed it: it ends with its offer
    assert hand_over(producer, consumer, "again", seed=3)["way"] == "pull"


def test_cut_while_blocks_are_read(
    producer: RigEngine, make_consumer: Callable[..., RigEngine], relay: Relay, policy: str
) -> None:
    """Prefill takes its blocks back; decode believes nothing that came."""
    consumer = make_consumer(policy, handshake_timeout_seconds=5.0)
    meet(producer, consumer, relay)

    def cut() -> None:
        relay.cut()
        raise TransportError("the cable is cut")

    meddle(consumer, before=cut)
    lose_one_and_go_on(producer, consumer, relay, policy)


def test_cut_after_the_read_and_before_it_is_believed(
    producer: RigEngine, make_consumer: Callable[..., RigEngine], relay: Relay, policy: str
) -> None:
    """All bytes are here. But nobody can say whether prefill's blocks were still the same, so they do not count."""
    consumer = make_consumer(policy, handshake_timeout_seconds=5.0)
    meet(producer, consumer, relay)
    meddle(consumer, after=relay.cut)
    lose_one_and_go_on(producer, consumer, relay, policy)


def test_cut_before_the_release_arrives(producer: RigEngine, consumer: RigEngine, relay: Relay) -> None:
    """Prefill ends the lease by itself when decode is not heard of any more."""
    prompt = prompt_of(40)
    consumer.add("r", prompt, through(relay, prefill(producer, "r", prompt)), max_tokens=30)
    consumer.step()
    half: Any = consumer.connector._decode
    release = half._peers.give_back

    def cut_and_release(*args: Any) -> None:
        relay.cut()
        release(*args)

    half._loans._peers.give_back = cut_and_release
    assert report_of(consumer, "r", prompt, 30)["way"] == "pull"
    assert num_leases(producer) == 1
    wait_until(lambda: num_leases(producer) == 0)
    half._loans._peers.give_back = release
    relay.mend()
    assert_clean(producer, consumer)


def test_blocks_that_prefill_reuses_during_a_read_are_never_believed(
    producer: RigEngine, consumer: RigEngine, relay: Relay
) -> None:
    """The cut is over before the read is: prefill has taken its blocks back and filled them with another prompt."""
    meet(producer, consumer, relay)

    def lose_the_lease() -> None:
        relay.cut()
        wait_until(lambda: num_leases(producer) == 0)
        half: Any = producer.connector._prefill
        half._block_pool.reset_prefix_cache()
        for tensor in producer.kv.values():
            tensor.fill_(1.0)
        relay.mend()

    meddle(consumer, before=lose_the_lease)
    prompt = prompt_of(40)
    consumer.add("r", prompt, through(relay, prefill(producer, "r", prompt)))
    assert finish(consumer, "r", "recompute", prompt)["reason"] == "pull_failed"


@pytest.mark.parametrize(
    "error", [TransportError("not today"), RuntimeError("from somebody else's engine"), KeyError()]
)
def test_a_read_that_fails_ends_the_session_and_the_next_one_works(
    producer: RigEngine, consumer: RigEngine, error: Exception
) -> None:
    hand_over(producer, consumer, "first")
    (key,) = sources(consumer)

    def fail() -> None:
        raise error

    meddle(consumer, before=fail)
    prompt = prompt_of(60, seed=4)
    consumer.add("r", prompt, prefill(producer, "r", prompt))
    assert finish(consumer, "r", "recompute", prompt)["reason"] == "pull_failed"
    assert hand_over(producer, consumer, "again", seed=9)["way"] == "pull"
    assert key not in sources(consumer)
    wait_until(lambda: num_leases(producer) == 0)
    assert_clean(producer, consumer)


def footprint() -> tuple[int, int]:
    """Descriptors and threads of this process, which both engines run in."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.slow
def test_sessions_that_come_and_go_leave_nothing(producer: RigEngine, consumer: RigEngine, relay: Relay) -> None:
    seen: list[tuple[int, int]] = []
    peers: Any = consumer.connector._decode._peers  # type: ignore[union-attr]
    threads = "mc2-remote", "mc2-map", "mc2-connect"
    for number in range(6):
        prompt = prompt_of(40, seed=number)
        consumer.add(f"r{number}", prompt, through(relay, prefill(producer, f"r{number}", prompt)))
        assert report_of(consumer, f"r{number}", prompt)["way"] == "pull"
        relay.cut()
        wait_until(lambda: not list(peers) and not sources(consumer))
        relay.mend()
        wait_until(lambda: not any(thread.name in threads for thread in threading.enumerate()))
        relay.close_connections()
        wait_until(lambda: not decodes_of(producer))
        if number > 1:
            # The last sockets close on other threads.
            wait_until(lambda: all(now <= then for now, then in zip(footprint(), seen[1], strict=True)))
        seen.append(footprint())


def decodes_of(producer: RigEngine) -> dict[int, Any]:
    half: Any = producer.connector._prefill
    return {**half._ledgers, **half._onlookers}


def test_prefill_ends_while_decode_is_idle(producer: RigEngine, consumer: RigEngine) -> None:
    """An idle decode takes no step, and forgets the peer all the same."""
    hand_over(producer, consumer, "first")
    peers: Any = consumer.connector._decode._peers  # type: ignore[union-attr]
    assert len(list(peers)) == 1
    producer.close()
    wait_until(lambda: not list(peers) and not sources(consumer))


def test_the_ticket_has_one_size_and_no_secret(producer: RigEngine) -> None:
    sizes = set()
    for length in (1, 50, 400):
        ticket = prefill(producer, f"r{length}", prompt_of(length))
        del ticket["remote_prefill_cached_tokens"]  # vLLM's own
        sizes.add(len(msgspec.json.encode(ticket)))
        assert SECRET not in str(ticket)
    assert len(sizes) == 1


def test_inspect_shows_where_the_other_host_is(producer: RigEngine, consumer: RigEngine) -> None:
    hand_over(producer, consumer, "first")
    inspector: Any = consumer.connector._inspector
    (peer,) = inspector.report().peers
    listens_at = producer.connector._inspector.report().listens_at  # type: ignore[union-attr]
    assert listens_at.startswith("127.0.0.1:")
    assert (peer.address, peer.way, peer.way_reason, peer.pid) == (listens_at, "pull", "other_host", 0)
    report = producer.connector._inspector.report()  # type: ignore[union-attr]
    assert [(row.pid, row.engine_id) for row in report.decodes] == [(0, consumer.connector._engine_id())]


@pytest.mark.slow
@pytest.mark.parametrize("address", ["::1", "localhost"])
def test_ipv6_and_names(address: str) -> None:
    """In a process of its own, since Mooncake speaks one version of IP in each."""
    this, name = Path(__file__), "test_decode_gets_the_right_tokens_and_computes_one"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{this}::{name}"]
    environment = {**os.environ, ADDRESS_VARIABLE: address}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout
