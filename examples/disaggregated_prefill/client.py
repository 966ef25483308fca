"""A small client for the demo and the tests: one request, its tokens with logprobs, its times.

Standard library only and blocking, so that what is measured is the servers. Tokens are compared by
id (`return_tokens_as_token_ids`), because two tokens may be shown as the same text.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]

_TIMEOUT_S = 300.0


class RequestError(Exception):
    """A server answered with an error status; the text is its answer."""


@dataclass(frozen=True)
class Token:
    """A generated token. `top` holds the best alternatives' logprobs, best first."""

    name: str
    logprob: float
    top: tuple[float, ...]


@dataclass
class Reply:
    """An answer's first choice. `first_token_s` is None when the answer came in one piece."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    prompt_tokens: int = 0
    first_token_s: float | None = None
    total_s: float = 0.0


def ask(url: str, path: str, body: Body, request_id: str) -> Reply:
    """Send a request that asks for two logprobs per token, and read the whole answer."""
    wanted = {**body, "return_tokens_as_token_ids": True, **_logprobs_of(path)}
    if wanted.get("stream"):
        wanted["stream_options"] = {"include_usage": True}
    reply = Reply()
    start = time.perf_counter()
    for part in _answers(url + path, wanted, request_id):
        _add(reply, part)
        if reply.first_token_s is None and reply.tokens and wanted.get("stream"):
            reply.first_token_s = time.perf_counter() - start
    reply.total_s = time.perf_counter() - start
    return reply


def tokenize(url: str, model: str, text: str) -> list[int]:
    answer = next(_answers(f"{url}/tokenize", {"model": model, "prompt": text}, "tokenize"))
    return [int(token) for token in answer["tokens"]]


def read_metrics(url: str) -> dict[str, float]:
    """Return /metrics as name → value, summed over labels (engines)."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    values: dict[str, float] = {}
    for name, value in re.findall(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)", text, re.MULTILINE):
        values[name] = values.get(name, 0.0) + float(value)
    return values


def _logprobs_of(path: str) -> Body:
    if path.endswith("/chat/completions"):
        return {"logprobs": True, "top_logprobs": 2}
    return {"logprobs": 2}


def _answers(url: str, body: Body, request_id: str) -> Iterator[Body]:
    """Yield the answer's JSON objects: one, or one per event of a stream."""
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            if not body.get("stream"):
                yield json.loads(answer.read())
                return
            for line in answer:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    yield _checked(json.loads(data))
    except urllib.error.HTTPError as error:
        with error:
            raise RequestError(f"{url} answered {error.code}: {error.read().decode()}") from error


def _checked(part: Body) -> Body:
    """A stream that fails halfway says so in an event: its status was sent long before."""
    if "error" in part:
        raise RequestError(f"the stream ended in an error: {part['error']}")
    return part


def _add(reply: Reply, part: Body) -> None:
    usage = part.get("usage") or {}
    reply.prompt_tokens = usage.get("prompt_tokens") or reply.prompt_tokens
    for choice in part.get("choices", []):
        message = choice.get("message") or choice.get("delta") or {}
        reply.text += choice.get("text") or message.get("content") or ""
        reply.tokens += _tokens_of(choice.get("logprobs") or {})


def _tokens_of(logprobs: Body) -> list[Token]:
    """Read the chat form (a list of objects) or the completion form (parallel lists)."""
    if "content" in logprobs:
        return [
            Token(
                item["token"], item["logprob"], _ranked(x["logprob"] for x in item["top_logprobs"])
            )
            for item in logprobs["content"] or []
        ]
    return [
        Token(name, logprob, _ranked((top or {}).values()))
        for name, logprob, top in zip(
            logprobs.get("tokens") or [],
            logprobs.get("token_logprobs") or [],
            logprobs.get("top_logprobs") or [],
            strict=True,
        )
    ]


def _ranked(logprobs: Any) -> tuple[float, ...]:
    return tuple(sorted(logprobs, reverse=True))
