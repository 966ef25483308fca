"""What each server is sent: the two request bodies, made from the client's. Pure functions.

The flow is prefill first. P gets the client's request cut down to one token and is asked to keep
the prompt's KV cache; its answer names the blocks in `kv_transfer_params`, and D gets the
client's own request with that object, untouched, beside it.
"""

from __future__ import annotations

from typing import Any

Body = dict[str, Any]

ASK_PREFILL: Body = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""P's `kv_transfer_params`: another server will decode, and nothing is known yet of where from."""


def without_client_params(body: Body) -> tuple[Body, bool]:
    """Return the body without `kv_transfer_params`, and whether the client had sent any.

    The object tells a server whose memory to read. Only the proxy may say that: a client could
    otherwise name any host, or another client's blocks.
    """
    cleaned = {key: value for key, value in body.items() if key != "kv_transfer_params"}
    return cleaned, body.get("kv_transfer_params") is not None


def reason_to_skip_prefill(body: Body) -> str | None:
    """Say why P's work could not be used by D, or None when it can.

    D computes the whole prompt itself in these cases, so a prefill on P would only hold blocks
    there.
    """
    if body.get("prompt_logprobs") is not None:
        return "prompt_logprobs need the whole forward pass on D"
    if body.get("echo") and body.get("logprobs") is not None:
        return "echo with logprobs needs the whole forward pass on D"
    if body.get("prompt_embeds") is not None:
        return "prompt_embeds have no token ids that P and D could compare"
    if body.get("use_beam_search"):
        return "beam search starts many requests from one prompt"
    return None


def prefill_body(body: Body) -> Body:
    """Return P's request: the same prompt, one token, one answer, not streamed."""
    leg = dict(body)
    leg["stream"] = False
    leg.pop("stream_options", None)
    leg["max_tokens"] = 1
    if leg.get("max_completion_tokens") is not None:
        leg["max_completion_tokens"] = 1
    if _is_above_one(leg.get("min_tokens")):
        leg["min_tokens"] = 1  # more than max_tokens is refused by vLLM
    _make_single(leg)
    leg["kv_transfer_params"] = dict(ASK_PREFILL)
    return leg


def decode_body(body: Body, params: Body | None) -> Body:
    """Return D's request: the client's own, with P's object beside it when P gave one."""
    return dict(body) if params is None else {**body, "kv_transfer_params": params}


def _make_single(leg: Body) -> None:
    """Let P compute one prompt once.

    For n answers vLLM would prefill n times and keep n sets of blocks; for a list of prompts it
    returns the first prompt's object only, and the others' blocks would be held until their lease
    ends. D gives that object to each of its own requests, takes it where the prompt is the same
    and computes the other prompts itself.
    """
    if _is_above_one(leg.get("n")):
        leg["n"] = 1
    leg.pop("best_of", None)
    prompt = leg.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        leg["prompt"] = prompt[0]


def _is_above_one(value: object) -> bool:
    return isinstance(value, int) and value > 1
