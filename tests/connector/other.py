"""Another connector, to stand beside ours in a ``MultiConnector``: brings tokens for the requests it is told to."""

from collections.abc import Callable
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA


class OtherConnector(KVConnectorBase_V1, SupportsHMA):
    """``brings``: request id -> number of tokens; ``load(request_id, block_ids, first, last)`` writes their KV."""

    brings: ClassVar[dict[str, int]] = {}
    load: ClassVar[Callable[[str, list[int], int, int], None]]
    chosen: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """As many as it is told to, beyond what is cached."""
        return max(0, self.brings.get(request.request_id, 0) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Writes at once: the rig's scheduler and worker are one process."""
        self.chosen.append((request.request_id, num_external_tokens))
        if num_external_tokens:
            end = self.brings[request.request_id]
            block_ids = [block.block_id for block in blocks.blocks[0]]
            type(self).load(request.request_id, block_ids, end - num_external_tokens, end)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing to say."""
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Nothing to keep."""
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Done already."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Done already."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Saves nothing."""

    def wait_for_save(self) -> None:
        """Saves nothing."""
