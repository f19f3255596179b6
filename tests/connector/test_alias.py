"""vllm-mc2 under the name that Dynamo insists on: vLLM finds it, it hands over, and it says what it is."""

import copy
import importlib.util
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from prometheus_client import Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.structured_output import StructuredOutputManager

from tests.connector.outcome import finish
from tests.connector.rig import MakeEngine, RigEngine, assert_clean, prefill
from tests.proxy.recipes import commands
from tests.support.fake_model import expected_tokens, prompt_of
from tests.unpacked import unpack_wheel
from vllm_mc2.connector import MC2Connector, aliases
from vllm_mc2.connector.aliases import MC2ConnectorUnderNixlsName

ROOT = Path(__file__).resolve().parents[2]
DYNAMO = "ai-dynamo==1.6.1"
PROTOCOLS = "dynamo/vllm/kv_connector_protocols.py"
BORROWED = {"kv_connector": "NixlConnector", "kv_connector_module_path": "vllm_mc2.connector.aliases"}
PROMPT = prompt_of(70)
OF_NIXL: dict[str, Any] = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2, 3, 4, 5]], "remote_engine_id": "nixl-7",
    "remote_request_id": "cmpl-1-0", "remote_host": "192.0.2.9", "remote_port": 5600, "tp_size": 1, "dcp_size": 1, "pp_size": 1,
    "remote_num_tokens": 70, "transfer_mode": "pull",
}  # fmt: skip
"""What vLLM 0.32's NixlConnector answers on prefill (``nixl/pull_scheduler.py``)."""


@contextmanager
def borrowed_name() -> Iterator[None]:
    """The rig's engines are configured as the document says, instead of by our own name."""

    def config(**settings: Any) -> KVTransferConfig:
        return KVTransferConfig(**{**settings, **BORROWED})

    with mock.patch("tests.connector.rig.KVTransferConfig", config):
        yield


@pytest.fixture
def borrowed_pair(make_engine: MakeEngine) -> tuple[RigEngine, RigEngine]:
    with borrowed_name():
        return make_engine("kv_producer"), make_engine("kv_consumer")


def test_vllms_factory_finds_it_although_the_name_is_taken() -> None:
    config = KVTransferConfig(**BORROWED, kv_role="kv_producer")
    cls = KVConnectorFactory.get_connector_class(config)
    assert cls is MC2ConnectorUnderNixlsName and issubclass(cls, MC2Connector)
    assert cls.__name__ != "NixlConnector", "what vLLM logs at start"
    # Without the path it is the real one.
    real = KVConnectorFactory.get_connector_class(KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_producer"))
    assert not issubclass(real, MC2Connector)


def test_it_hands_over(borrowed_pair: tuple[RigEngine, RigEngine]) -> None:
    producer, consumer = borrowed_pair
    assert all(type(engine.connector) is MC2ConnectorUnderNixlsName for engine in borrowed_pair)
    for length in (5, 48, 100):
        prompt, name = prompt_of(length, seed=length), f"r{length}"
        consumer.add(name, prompt, prefill(producer, name, prompt), max_tokens=20)
        consumer.run()
        tokens, _, answer = consumer.finished[name]
        assert tokens == expected_tokens(prompt, 20)
        assert answer is not None and answer["mc2"]["way"] == "attach"
    assert consumer.stats["handoffs|attach|"] == 3
    assert_clean(producer, consumer)


@pytest.mark.parametrize("borrows", ["kv_producer", "kv_consumer"])
def test_the_name_is_nothing_that_peers_compare(make_engine: MakeEngine, borrows: str) -> None:
    engines = {}
    for role in ("kv_producer", "kv_consumer"):
        if role == borrows:
            with borrowed_name():
                engines[role] = make_engine(role)
        else:
            engines[role] = make_engine(role)
    consumer = engines["kv_consumer"]
    consumer.add("r", PROMPT, prefill(engines["kv_producer"], "p", PROMPT))
    consumer.run()
    assert consumer.finished["r"][0] == expected_tokens(PROMPT, 4)
    assert consumer.finished["r"][2]["mc2"]["way"] == "attach"  # type: ignore[index]
    assert_clean(*engines.values())


def test_it_says_at_start_what_it_is(make_engine: MakeEngine) -> None:
    with mock.patch.object(aliases.logger, "warning") as warning:
        make_engine("kv_producer")
        assert warning.call_args_list == []
        with borrowed_name():
            make_engine("kv_producer")
    (call,) = warning.call_args_list
    assert "vllm-mc2 under the borrowed name NixlConnector" in call.args[0] and "does not speak NIXL" in call.args[0]
    assert aliases.logger.name.startswith("vllm."), "or vLLM would not show it"
    assert aliases.logger.isEnabledFor(logging.WARNING)


def test_its_metrics_are_its_own(make_engine: MakeEngine) -> None:
    with borrowed_name():
        engine = make_engine("kv_consumer")
    made: list[str] = []

    def counter(name: str, **_: Any) -> mock.Mock:
        made.append(name)
        return mock.Mock()

    cls = KVConnectorFactory.get_connector_class(engine.config.kv_transfer_config)
    cls.build_prom_metrics(
        engine.config, {Counter: counter, Gauge: mock.Mock(), Histogram: mock.Mock()}, ["engine"], {}
    )
    assert made and all(name.startswith("vllm:mc2_") for name in made)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_ticket_of_a_real_nixl_connector_is_refused_by_its_name(make_engine: MakeEngine, policy: str) -> None:
    with borrowed_name():
        consumer = make_engine("kv_consumer", policy=policy)
    with mock.patch.object(aliases.logger, "warning") as warning:
        for number in range(3):
            prompt = prompt_of(70, seed=number)
            consumer.add(f"r{number}", prompt, dict(OF_NIXL))
            assert finish(consumer, f"r{number}", policy, prompt)["reason"] == "bad_ticket"
    (call,) = warning.call_args_list
    text = call.args[0] % call.args[1:]
    assert "real NixlConnector" in text and "nixl-7" in text and "192.0.2.9" in text and "5600" in text and "r0" in text
    assert_clean(consumer)


def test_what_a_client_makes_up_fills_no_log(make_engine: MakeEngine) -> None:
    with borrowed_name():
        consumer = make_engine("kv_consumer")
    hostile: list[Any] = [{"x": []}, 2**63, None, "\n" * 10_000, *(f"engine {number}" for number in range(20))]
    with mock.patch.object(aliases.logger, "warning") as warning:
        for number, value in enumerate(hostile):
            prompt = prompt_of(5, seed=number)
            made_up = {"remote_engine_id": value, "remote_host": f"{value}"[:300] if number > 2 else value}
            consumer.add(f"r{number}", prompt, {**OF_NIXL, **made_up})
            assert finish(consumer, f"r{number}", "recompute", prompt)["reason"] == "bad_ticket"
    texts = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    assert len(texts) == aliases._MAX_STRANGERS
    assert all(len(text) < 1500 and "\n" not in text for text in texts)
    assert_clean(consumer)


def test_a_real_nixl_connector_ends_on_our_ticket(make_engine: MakeEngine, tiny_model: Path) -> None:
    """Why the document says never to mix them. Its scheduler half is real and needs no NIXL; that engine has nothing of ours."""
    ticket = prefill(make_engine("kv_producer"), "p", PROMPT)
    plain = RigEngine(tiny_model, None, None)
    config = copy.copy(plain.config)
    config.kv_transfer_config = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_consumer")
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=plain.scheduler.kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=plain.block_size,
    )
    try:
        assert type(scheduler.get_kv_connector()) is NixlConnector
        scheduler.add_request(plain.request("r", PROMPT, ticket))
        with pytest.raises(AssertionError):
            scheduler.schedule()
    finally:
        scheduler.shutdown()
        plain.close()


def test_its_statistics_as_a_child_of_a_multi_connector() -> None:
    """vLLM looks them up by the name of the child's class, on their way to the front end."""
    name = MC2ConnectorUnderNixlsName.__name__
    stats = MultiConnector.build_kv_connector_stats({name: {"handoffs|attach|": 1}})
    assert stats is not None and stats.data[name].data == {"handoffs|attach|": 1}


# --- Dynamo ---


@pytest.fixture(scope="module")
def dynamo() -> Any:
    """Its module that knows the connectors' protocols; the rest of its worker needs its runtime, and was read only."""
    target = ROOT / "build" / "routers" / DYNAMO.replace("==", "-")
    path = unpack_wheel(DYNAMO, target, lambda name: name == PROTOCOLS) / PROTOCOLS
    spec = importlib.util.spec_from_file_location("dynamo_kv_connector_protocols", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_dynamo_does_not_take_our_own_name(dynamo: Any, make_engine: MakeEngine) -> None:
    with pytest.raises(ValueError, match="Unsupported kv_connector='MC2Connector'"):
        dynamo.make_kv_connector_protocol(make_engine("kv_producer").config)


def test_dynamos_prefill_and_decode_legs(dynamo: Any, borrowed_pair: tuple[RigEngine, RigEngine]) -> None:
    """What its two handlers put into a request's parameters, with what its own code makes of prefill's answer in between."""
    producer, consumer = borrowed_pair
    protocol = dynamo.make_kv_connector_protocol(producer.config)
    assert type(protocol).__name__ == "NixlConnectorProtocol"
    producer.add("p", PROMPT, dict(protocol.prefill_request_kv_transfer_params()), max_tokens=1)
    producer.run()
    answer = mock.Mock(kv_transfer_params=producer.finished["p"][2])
    # It goes to decode as JSON.
    params = json.loads(json.dumps(protocol.decode_request_kv_transfer_params(answer)))
    consumer.add("d", PROMPT, params)
    consumer.run()
    assert consumer.finished["d"][0] == expected_tokens(PROMPT, 4)
    assert consumer.finished["d"][2]["mc2"]["way"] == "attach"  # type: ignore[index]
    assert_clean(producer, consumer)


def test_the_configuration_of_the_document_is_the_one_that_is_tested_here() -> None:
    servers = {words[words.index("--disaggregation-mode") + 1]: words for words in commands("Dynamo") if len(words) > 4}
    configs = {mode: json.loads(words[words.index("--kv-transfer-config") + 1]) for mode, words in servers.items()}
    assert configs == {
        "prefill": {**BORROWED, "kv_role": "kv_producer"},
        "decode": {"kv_connector": "MC2Connector", "kv_role": "kv_consumer"},
    }
