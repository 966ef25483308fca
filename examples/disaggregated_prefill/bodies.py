"""What each server is sent: the two request bodies, made from the client's. Pure functions.

P gets the client's request cut down to one token, D the client's own; `kv_transfer_params` in each
says how they find each other.

- Pull: P is asked to keep the prompt's KV cache. Its answer names the blocks, and D gets that
  object untouched.
- Push: both get one transfer id, and D the address of P's control channel.
- Decode first: D gets the URL at which it asks for a prefill. What it posts there is P's object.
"""

from __future__ import annotations

from typing import Any

Body = dict[str, Any]
Address = tuple[str, int]

ASK_PREFILL: Body = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""P's `kv_transfer_params`: another server will decode, and nothing is known yet of where from."""

EXPECT_PREFILL: Body = {"do_remote_prefill": True, "do_remote_decode": False}


def ask_push(transfer_id: str) -> Body:
    """P's `kv_transfer_params` when D is sent its leg at the same time."""
    return {**ASK_PREFILL, "transfer_id": transfer_id}


def expect_push(transfer_id: str, control: Address) -> Body:
    """D's `kv_transfer_params` when P is sent its leg at the same time; `control` is P's."""
    return {
        **EXPECT_PREFILL,
        "remote_host": control[0],
        "remote_port": control[1],
        "transfer_id": transfer_id,
    }


def ask_for_prefill_at(metaserver: str) -> Body:
    """D's `kv_transfer_params` when it is to ask for its prefill itself."""
    return {**EXPECT_PREFILL, "metaserver": metaserver}


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


def reason_to_pull(body: Body) -> str | None:
    """Say why D must not be sent its leg before P has answered, or None when it may.

    In these cases D makes several requests of one body, all with the same transfer id or URL, while
    P computes one prompt once. Those of another prompt must wait until P has told them so, and one
    that comes after the transfer has ended waits in vain, until its deadline for P's first answer.
    With a pull each of them knows at once: P's object says which prompt it is for.
    """
    if _is_above_one(body.get("n")) or _is_above_one(body.get("best_of")):
        return "several answers"
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list):
        return "several prompts"
    return None


def prefill_body(body: Body, params: Body = ASK_PREFILL) -> Body:
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
    leg["kv_transfer_params"] = dict(params)
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
