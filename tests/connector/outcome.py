"""What becomes of a request: one that is handed over, and one whose ticket cannot be used."""

from typing import Any

from vllm.v1.engine import FinishReason

from tests.connector.rig import RigEngine
from tests.support.fake_model import expected_tokens


def finish(consumer: RigEngine, request_id: str, policy: str, prompt: list[int]) -> dict[str, Any]:
    """Run to the end; the request is computed here or failed, as the policy says."""
    consumer.run()
    tokens, reason, answer = consumer.finished[request_id]
    if policy == "recompute":
        assert tokens == expected_tokens(prompt, 4)
        assert consumer.num_computed_prompt_tokens[request_id] == len(prompt)
    else:
        assert reason is FinishReason.ERROR
        assert tokens == []
        # vLLM sends no params with an error: the counters tell.
        (key,) = [key for key in consumer.stats if key.startswith("handoffs|failed|")]
        answer = {"mc2": {"way": "failed", "reason": key.split("|")[2], "blocks_attached": 0}}
    assert answer is not None
    report: dict[str, Any] = answer["mc2"]
    assert report["way"] == {"recompute": "recompute", "fail": "failed"}[policy]
    assert report["blocks_attached"] == 0
    return report


def report_of(consumer: RigEngine, request_id: str, prompt: list[int], max_tokens: int = 4) -> dict[str, Any]:
    """Run to the end; checks the tokens."""
    consumer.run()
    tokens, _, answer = consumer.finished[request_id]
    assert tokens == expected_tokens(prompt, max_tokens)
    assert answer is not None
    report: dict[str, Any] = answer["mc2"]
    return report


def num_leases(producer: RigEngine) -> int:
    """Those that have not ended."""
    half: Any = producer.connector._prefill
    half.reap()
    return len(half.book)
