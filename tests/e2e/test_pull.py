"""A decode that copies: tokens equal, blocks of its own, and prefill's blocks free again at once."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.conftest import Answer, Rig, prompt_of
from tests.e2e.test_tokens import assert_same

pytestmark = [pytest.mark.e2e]

BLOCK = 128
BLOCK_BYTES = 128 * 1024
LENGTHS = [1, 2, 127, 128, 129, 257, 1500]


def pull(rig: Rig, prompt: list[int], max_tokens: int = 12) -> Answer:
    """Both legs."""
    return rig.complete(rig.pull_decode.url, prompt, max_tokens, kv_transfer_params=rig.ticket(prompt))


def assert_pulled(answer: Answer, length: int) -> None:
    report = answer.report
    assert (report["way"], report["reason"]) == ("pull", "mode")
    assert report["kv_bytes_copied"] == -(-(length - 1) // BLOCK) * BLOCK_BYTES
    assert report["blocks_attached"] == report["kv_bytes_not_copied"] == 0


@pytest.mark.parametrize("length", LENGTHS)
def test_alone(rig: Rig, length: int) -> None:
    prompt = prompt_of(length, seed=length + 5000)
    answer = pull(rig, prompt)
    assert answer.tokens == rig.expected(prompt).tokens
    assert_pulled(answer, length)
    rig.assert_clean()


def test_eight_at_once(rig: Rig) -> None:
    prompts = [prompt_of(100 + 90 * i, seed=7000 + i) for i in range(8)]
    expected = [rig.expected(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: pull(rig, prompt), prompts))
    for prompt, answer, wanted in zip(prompts, answers, expected, strict=True):
        assert_pulled(answer, len(prompt))
        assert_same(answer, wanted)
    rig.assert_clean()


def test_the_same_prompt_twice_copies_only_what_is_not_cached(rig: Rig) -> None:
    prompt = prompt_of(640, seed=8000)
    assert pull(rig, prompt).tokens == rig.expected(prompt).tokens
    again = pull(rig, prompt)
    assert again.tokens == rig.expected(prompt).tokens
    assert again.report["kv_bytes_copied"] <= BLOCK_BYTES
    rig.assert_clean()


def test_prefill_is_free_while_decode_goes_on(rig: Rig) -> None:
    prompt = prompt_of(1000, seed=8001)
    expected = rig.expected(prompt, 400)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(pull, rig, prompt, 400)
        while not answer.done():
            rig.complete(rig.prefill.url, [11, 12], 2)
            running = rig.metric(rig.pull_decode, "vllm:num_requests_running")
            lent = rig.metric(rig.prefill, "vllm:kv_cache_usage_perc")
            if running and not lent:
                break
        assert not answer.done(), "prefill's blocks were taken only after the answer was complete"
        assert answer.result().tokens == expected.tokens
    rig.assert_clean()


def test_counters_tell(rig: Rig) -> None:
    before = [
        rig.metric(rig.pull_decode, "vllm:mc2_handoffs_total", way="pull", reason="mode"),
        rig.metric(rig.pull_decode, "vllm:mc2_kv_bytes_copied_total"),
    ]
    prompt = prompt_of(300, seed=8002)
    pull(rig, prompt)
    rig.tick()
    after = [
        rig.metric(rig.pull_decode, "vllm:mc2_handoffs_total", way="pull", reason="mode"),
        rig.metric(rig.pull_decode, "vllm:mc2_kv_bytes_copied_total"),
    ]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 3 * BLOCK_BYTES]
