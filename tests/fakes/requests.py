"""vLLM's ``Request`` as far as the connector looks at it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any


def make_request(
    request_id: str,
    prompt: Sequence[int] | None,
    params: dict[str, Any] | None = None,
    *,
    status: str = "RUNNING",
    lora_name: str | None = None,
    media: Sequence[tuple[str, str, int, int]] = (),
    prompt_embeds: object = None,
    abort_immediately: bool = False,
    max_tokens: int = 1,
) -> Any:
    """``media`` items are modality, identifier, offset and length."""
    return SimpleNamespace(
        request_id=request_id,
        prompt_token_ids=None if prompt is None else list(prompt),
        num_prompt_tokens=0 if prompt is None else len(prompt),
        prompt_embeds=prompt_embeds,
        kv_transfer_params=params,
        status=SimpleNamespace(name=status),
        lora_request=SimpleNamespace(lora_name=lora_name) if lora_name else None,
        mm_features=[
            SimpleNamespace(
                modality=modality,
                identifier=identifier,
                mm_position=SimpleNamespace(offset=offset, length=length),
            )
            for modality, identifier, offset, length in media
        ],
        abort_immediately=abort_immediately,
        max_tokens=max_tokens,
        num_preemptions=0,
    )
