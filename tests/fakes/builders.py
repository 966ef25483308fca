"""Small values that many tests need, with every field given a sensible default."""

from __future__ import annotations

from typing import Any

import msgspec

from vllm_llmdd_connector.control.fingerprint import Fingerprint
from vllm_llmdd_connector.control.messages import (
    PROTOCOL_VERSION,
    Admitted,
    Gone,
    Grant,
    Queued,
    Welcome,
    WorkerEndpoint,
)
from vllm_llmdd_connector.layout.kv_layout import GroupGeometry, PartGeometry
from vllm_llmdd_connector.params import Appointment, Ticket, prompt_hash, response_params

SECRET = "0123456789abcdef"
INSTANCE = "feedfacefeedface"


def make_endpoint(**changes: Any) -> WorkerEndpoint:
    fields = {"cluster_id": 0xA, "host": "127.0.0.1", "engine_port": 4001, "control_port": 4002}
    return WorkerEndpoint(**{**fields, **changes})


def make_geometry(**changes: Any) -> GroupGeometry:
    part = PartGeometry(
        dtype="bfloat16", shape=(1, 2, 16, 64), strides=(1024, 64, 1), block_len=4096
    )
    fields = {
        "kind": "FullAttentionSpec",
        "block_size": 16,
        "layers": ("layer0", "layer1"),
        "parts": (part,),
    }
    return GroupGeometry(**{**fields, **changes})


def make_fingerprint(**changes: Any) -> Fingerprint:
    fields = {
        "protocol_version": PROTOCOL_VERSION,
        "model": "tiny",
        "model_config": "c0ffee",
        "dtype": "bfloat16",
        "cache_dtype": "auto",
        "tensor_parallel_size": 1,
        "speculative": "none",
        "groups": (make_geometry(),),
        "kv_format": "CPU_ATTN/vec",
    }
    return Fingerprint(**{**fields, **changes})


def make_model_facts() -> dict[str, Any]:
    """What ``model_facts`` reads from a configuration for ``make_fingerprint``."""
    fields = msgspec.structs.asdict(make_fingerprint())
    others = {"protocol_version", "groups", "kv_format", "integrity"}
    return {name: value for name, value in fields.items() if name not in others}


def make_ticket(prompt: list[int] | None = None, **changes: Any) -> Ticket:
    """The ticket of ``prompt``, by default of 40 tokens."""
    prompt = list(range(40)) if prompt is None else prompt
    fields = {
        "host": "127.0.0.1",
        "port": 4000,
        "instance": INSTANCE,
        "transfer_id": "cmpl-p",
        "production": 1,
        "secret": SECRET,
        "num_tokens": len(prompt),
        "prompt_hash": prompt_hash(prompt, None, ()),
    }
    return Ticket(**{**fields, **changes})


def make_appointment(prompt: list[int] | None = None, **changes: Any) -> Appointment:
    """What D asks a P that has still to compute ``prompt``, by default of 40 tokens."""
    prompt = list(range(40)) if prompt is None else prompt
    fields = {
        "host": "127.0.0.1",
        "port": 4000,
        "transfer_id": "transfer",
        "num_tokens": len(prompt),
        "prompt_hash": prompt_hash(prompt, None, ()),
    }
    return Appointment(**{**fields, **changes})


def decode_params(ticket: Ticket | None = None, **changes: Any) -> dict[str, Any]:
    """What the proxy hands to D; ``changes`` go to the ticket."""
    ticket = ticket or make_ticket(**changes)
    return response_params(ticket, "engine-p", [[1, 2, 3]])


def concurrent_params(**changes: Any) -> dict[str, Any]:
    """What a proxy sends to D together with P's leg."""
    fields = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "transfer",
        "remote_host": "127.0.0.1",
        "remote_port": 4000,
    }
    return {**fields, **changes}


def make_welcome(session: int = 5, **changes: Any) -> Welcome:
    fields = {
        "session": session,
        "instance": INSTANCE,
        "workers": (make_endpoint(),),
        "lease_s": 30.0,
    }
    return Welcome(**{**fields, **changes})


def make_grant(
    claim_id: int, block_ids: tuple[tuple[int, ...], ...] = ((7, 8, 9),), **changes: Any
) -> Grant:
    fields = {"production": 1, "secret": SECRET}
    return Grant(claim_id=claim_id, block_ids=block_ids, **{**fields, **changes})


def make_queued(claim_id: int) -> Queued:
    return Queued(claim_id=claim_id)


def make_admitted(claim_id: int) -> Admitted:
    return Admitted(claim_id=claim_id)


def make_gone(claim_id: int) -> Gone:
    return Gone(claim_id=claim_id, reason="released")
