"""The demo's client reads every form in which vLLM gives tokens and logprobs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from client import RequestError, Token, ask, read_metrics

COMPLETION = {
    "text": "ab",
    "logprobs": {
        "tokens": ["token_id:1", "token_id:2"],
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"token_id:1": -0.5, "token_id:7": -1.5}, {"x": -0.25, "y": -2.0}],
    },
}
TOKENS = [Token("token_id:1", -0.5, (-0.5, -1.5)), Token("token_id:2", -2.0, (-0.25, -2.0))]


def _chat(key: str) -> dict[str, Any]:
    content = [
        {
            "token": token.name,
            "logprob": token.logprob,
            "top_logprobs": [{"token": "t", "logprob": value} for value in reversed(token.top)],
        }
        for token in TOKENS
    ]
    return {key: {"content": "ab"}, "logprobs": {"content": content}}


def _events(*objects: Any) -> bytes:
    lines = [f"data: {json.dumps(item)}\n\n" for item in objects]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


@contextmanager
def _serving(data: bytes, status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Answer every request with `data`; give the address and the list of bodies received."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            bodies.append(json.loads(self.rfile.read(length)))
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", bodies
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("path", "choice"),
    [("/v1/completions", COMPLETION), ("/v1/chat/completions", _chat("message"))],
)
def test_whole_answer_is_read(path: str, choice: dict[str, Any]) -> None:
    answer = {"choices": [choice], "usage": {"prompt_tokens": 5}}
    with _serving(json.dumps(answer).encode()) as (url, _):
        reply = ask(url, path, {"prompt": "x"}, "id")
    assert (reply.text, reply.tokens, reply.prompt_tokens) == ("ab", TOKENS, 5)
    assert reply.first_token_s is None


@pytest.mark.parametrize(
    ("path", "choice"),
    [("/v1/completions", COMPLETION), ("/v1/chat/completions", _chat("delta"))],
)
def test_stream_is_put_together(path: str, choice: dict[str, Any]) -> None:
    role = {"choices": [{"delta": {"role": "assistant"}, "logprobs": None}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 5}}
    data = _events(role, {"choices": [choice]}, {"choices": [choice]}, usage)
    with _serving(data) as (url, bodies):
        reply = ask(url, path, {"prompt": "x", "stream": True}, "id")
    assert (reply.text, reply.tokens, reply.prompt_tokens) == ("abab", TOKENS * 2, 5)
    assert reply.first_token_s is not None
    assert bodies[0]["stream_options"] == {"include_usage": True}


def test_logprobs_are_asked_for_in_each_apis_way() -> None:
    with _serving(b'{"choices": []}') as (url, bodies):
        ask(url, "/v1/completions", {}, "id")
        ask(url, "/v1/chat/completions", {}, "id")
    assert bodies[0]["logprobs"] == 2
    assert (bodies[1]["logprobs"], bodies[1]["top_logprobs"]) == (True, 2)


def test_error_status_carries_the_servers_words() -> None:
    refusal = _serving(b"prompt too long", status=400)
    with refusal as (url, _), pytest.raises(RequestError, match="400: prompt too long"):
        ask(url, "/v1/completions", {}, "id")


def test_error_inside_a_stream_is_an_error() -> None:
    data = _events({"choices": [COMPLETION]}, {"error": {"message": "broke off"}})
    with _serving(data) as (url, _), pytest.raises(RequestError, match="broke off"):
        ask(url, "/v1/completions", {"stream": True}, "id")


def test_metrics_are_summed_over_engines() -> None:
    text = b'# HELP a b\na_total{engine="0"} 1.5\na_total{engine="1",x="{}"} 2e1\nplain 3\n'
    with _serving(text) as (url, _):
        assert read_metrics(url) == {"a_total": 21.5, "plain": 3.0}
