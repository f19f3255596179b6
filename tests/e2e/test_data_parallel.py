"""Two data parallel engines and two API servers on either side: every ticket finds the engine that issued it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from examples.pair import Server, kv_transfer_config
from tests.e2e.conftest import LOG_DIR, Answer, Rig, prompt_of
from tests.support.servers import ready, vllm_server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def data_parallel(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Prefill and decode, four engines in all. With several API servers nobody sweeps the sockets of engines that vLLM kills at
    its end, but the next engine to start there: hence a directory of their own.
    """
    extra = {"socket_dir": str(tmp_path_factory.mktemp("dp") / "s"), "report_in_response": True}
    arguments = ["--data-parallel-size", "2", "--api-server-count", "2"]
    servers = [
        vllm_server(
            f"dp2-{role}",
            tiny_model,
            kv_config=kv_transfer_config(role, extra=extra, policy="fail"),
            arguments=arguments,
            log_dir=LOG_DIR,
        )
        for role in ("kv_producer", "kv_consumer")
    ]
    with ready(servers):
        yield servers[0], servers[1]


def test_d19_every_ticket_finds_its_engine(rig: Rig, data_parallel: tuple[Server, Server]) -> None:
    prefill, decode = data_parallel
    prompts = [prompt_of(100 + 40 * index, seed=11_000 + index) for index in range(12)]
    expected = [rig.expected(prompt) for prompt in prompts]

    def both_legs(prompt: list[int]) -> tuple[str, Answer]:
        ticket = rig.ticket(prompt, prefill)
        return ticket["remote_engine_id"], rig.complete(decode.url, prompt, kv_transfer_params=ticket)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(both_legs, prompts))
    # Each engine has a name of its own, and with four requests at once both get some.
    assert len({engine for engine, _ in answers}) == 2
    for (_, answer), wanted in zip(answers, expected, strict=True):
        assert answer.report["way"] == "attach"
        assert answer.logprobs == pytest.approx(wanted.logprobs, abs=1e-3) or answer.tokens == wanted.tokens
