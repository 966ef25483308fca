"""Decode first between two real servers: D asks for its prefill, P pushes, or D goes on alone.

Both servers have keys: in this flow either dials the other.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import START_TIMEOUT_S, wait_until
from flow import (
    Answer,
    Pair,
    assert_equal_digests,
    assert_same_generation,
    digests,
    metrics,
    post,
)
from prompts import prompt_of
from servers import ProxySpec, Server, Servers

from vllm_llmdd_connector.control.keys import make_key_set

BLOCK_SIZE = 128
OPTIONS = {"first_contact_timeout_s": 20, "metaserver_timeout_s": 60}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(
    start_pair: Callable[..., Pair], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    keys_dir = tmp_path_factory.mktemp("keys")
    make_key_set(keys_dir)
    options = OPTIONS | {"keys_dir": str(keys_dir)}
    return start_pair(
        tiny_model,
        arguments=("--dtype", "float32", "--max-model-len", "2048"),
        prefill=options,
        decode=options,
        prefill_arguments=("--max-num-batched-tokens", "256"),
    )


@pytest.fixture(scope="module")
def proxy(pair: Pair, servers: Servers) -> Server:
    urls = ([pair.prefill_server.url], [pair.decode_server.url])
    spec = ProxySpec("proxy", *urls, arguments=("--flow", "decode-first"))
    started = servers.start(spec)
    servers.wait_ready(START_TIMEOUT_S)
    return started


def body_of(num_tokens: int, seed: int, **more: Any) -> Answer:
    return {"prompt": prompt_of(num_tokens, seed), "max_tokens": 6, "logprobs": 2, **more}


def num_blocks(num_tokens: int) -> int:
    """What D takes of a prompt; it computes the last token itself."""
    return -(-(num_tokens - 1) // BLOCK_SIZE)


def failures(server: Server) -> dict[str, float]:
    return {key: v for key, v in metrics(server).items() if key.startswith("failures") and v}


def transfers(pair: Pair) -> set[str]:
    """The transfer ids that D has received under; it draws them itself."""
    return {transfer_id for transfer_id, *_ in digests(pair.digest_dir, "recv")}


def check_transfers(pair: Pair, before: set[str], sizes: list[int]) -> None:
    """D has received exactly these prompts since, each whole and as P had it."""
    new = transfers(pair) - before
    received = digests(pair.digest_dir, "recv")
    counts = {
        transfer_id: len({key[3] for key in received if key[0] == transfer_id})
        for transfer_id in new
    }
    assert sorted(counts.values()) == sorted(num_blocks(size) for size in sizes)
    for transfer_id, count in counts.items():
        assert_equal_digests(pair.digest_dir, transfer_id, count)


@pytest.mark.parametrize("num_tokens", [5, 129, 257, 900])
def test_prompt_comes_by_push_and_the_text_is_a_single_servers(
    pair: Pair, proxy: Server, num_tokens: int
) -> None:
    body = body_of(num_tokens, num_tokens)
    before, sent = transfers(pair), pair.prefill_metrics().get("sent_requests", 0)
    got = post(proxy, body | {"model": str(pair.decode_server.spec.model)})
    # Also brings out what P had still to write and to count: an idle vLLM does neither.
    assert_same_generation(pair.reference(**body), got)
    check_transfers(pair, before, [num_tokens])
    wait_until(
        lambda: pair.prefill_metrics().get("sent_requests", 0) == sent + 1, "P counts one push"
    )
    assert failures(pair.decode_server) == failures(pair.prefill_server) == {}


def test_many_at_once(pair: Pair, proxy: Server) -> None:
    bodies = [body_of(300 + 10 * seed, 1000 + seed) for seed in range(6)]
    before = transfers(pair)
    model = {"model": str(pair.decode_server.spec.model)}
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: post(proxy, body | model), bodies))
    for body, answer in zip(bodies, answers, strict=True):
        assert_same_generation(pair.reference(**body), answer)
    check_transfers(pair, before, [len(body["prompt"]) for body in bodies])
    health = httpx.get(f"{proxy.url}/health").json()
    assert health["counters"]["prefills_failed"] == 0


class Batching:
    """A metaserver that sends a list of prompts to P when every D request has asked."""

    def __init__(self, pair: Pair, body: Answer) -> None:
        self._pair = pair
        self._body = body
        self._lock = threading.Lock()
        self._children: dict[str, Answer] = {}
        self._prefill: Future[Answer] = Future()

    def ask(self, params: Answer) -> int:
        with self._lock:
            self._children[params["request_id"]] = params
            is_last = len(self._children) == len(self._body["prompt"])
        if is_last:
            top = {**params, "batch_kv_transfer_params": self._children}
            leg = {"max_tokens": 1, "kv_transfer_params": top}
            self._prefill.set_result(post(self._pair.prefill_server, self._body | leg))
        self._prefill.result(timeout=120)
        return 200


@contextmanager
def metaserver(ask: Callable[[Answer], int]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(ask(body))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/metaserver"
        finally:
            server.shutdown()
            thread.join()


def ask_at(url: str) -> Answer:
    return {"do_remote_prefill": True, "do_remote_decode": False, "metaserver": url}


def test_each_prompt_of_a_list_gets_its_own_blocks(pair: Pair) -> None:
    sizes = [200, 300, 400]
    prompts = [prompt_of(size, 2000 + size) for size in sizes]
    body = {"prompt": prompts, "max_tokens": 6, "logprobs": 2}
    before = transfers(pair)
    with metaserver(Batching(pair, body).ask) as url:
        got = pair.decode(ask_at(url), **body)
    assert_same_generation_of_all(pair.reference(**body), got, len(sizes))
    check_transfers(pair, before, sizes)


def assert_same_generation_of_all(reference: Answer, got: Answer, count: int) -> None:
    assert len(got["choices"]) == count
    for index in range(count):
        assert_same_generation(reference, got, index)


@pytest.mark.parametrize("status", [404, 500])
def test_a_metaserver_that_refuses_is_a_local_prefill(pair: Pair, status: int) -> None:
    body = body_of(300, 3000 + status)
    before = failures(pair.decode_server).get("failures:metaserver", 0)
    with metaserver(lambda params: status) as url:
        got = pair.decode(ask_at(url), **body)
    assert_same_generation(pair.reference(**body), got)
    wait_until(
        lambda: failures(pair.decode_server).get("failures:metaserver", 0) == before + 1,
        "the failure is counted",
    )


def test_several_answers_are_computed_by_d_alone(pair: Pair) -> None:
    asked: list[Answer] = []
    # vLLM refuses several greedy answers; at this temperature the best token is as good as certain.
    body = body_of(300, 4000, n=2, temperature=0.01)

    def ask(params: Answer) -> int:
        asked.append(params)
        return 500

    with metaserver(ask) as url:
        got = pair.decode(ask_at(url), **body)
    assert asked == []
    assert_same_generation_of_all(pair.reference(**body), got, 2)
