"""A store beside the project's connector, as ``MultiConnector`` combines them.

It has what another engine's tensors hold, and hands no handshake on.
"""

from __future__ import annotations

from typing import Any

import loopback_connector
from loopback_connector import LoopbackConnector

HAS_IT = "store_has_it"
"""In a request's params: the store offers the whole prompt."""


class StoreConnector(LoopbackConnector):
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        if not (request.kv_transfer_params or {}).get(HAS_IT):
            return 0, False
        # The last token is computed in any case.
        return request.num_prompt_tokens - 1 - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if params.pop(HAS_IT, False) and num_external_tokens:
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        return False, None

    def get_handshake_metadata(self) -> None:
        return None

    def _poll(self) -> tuple[set[str], set[str], set[str]]:
        _, received, failed = super()._poll()
        return set(), received, failed


def filled_from(engine: Any) -> None:
    """The store has the blocks of this engine."""
    engine_id = engine.core.vllm_config.kv_transfer_config.engine_id
    for worker in engine.workers:
        loopback_connector._tensors[engine_id, worker.rank] = worker.kv_caches
        loopback_connector._released[engine_id, worker.rank] = set()
