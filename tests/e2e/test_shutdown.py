"""Prefill servers that get SIGTERM while decode servers depend on them.

D's own limits are far away, so what ends within a test's patience was ended by the event itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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
    connector_config,
    kv_cache_usage,
    metrics,
    post,
)
from prompts import prompt_of
from servers import Server, Servers, ServerSpec

BLOCK_SIZE = 128
LONG = 2100
FAR_S = 600
EXIT_S = 90
ARGUMENTS = ("--dtype", "float32", "--max-model-len", "4096")
D_OPTIONS = {
    "first_contact_timeout_s": FAR_S,
    "reserve_timeout_s": FAR_S,
    "request_timeout_s": FAR_S,
    "link_timeout_ms": FAR_S * 1000,
    "sync_kv_timeout_ms": FAR_S * 1000,
    "release_timeout_s": FAR_S,
}

pytestmark = pytest.mark.slow

StartP = Callable[..., Pair]


@pytest.fixture(scope="module")
def digest_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("digests")


@pytest.fixture(scope="module")
def decode_server(servers: Servers, model: Path, digest_dir: Path) -> Server:
    config = connector_config("kv_consumer", kv_digest=str(digest_dir), **D_OPTIONS)
    return servers.start(ServerSpec("decode", model, config, arguments=ARGUMENTS))


@pytest.fixture
def start_p(servers: Servers, model: Path, decode_server: Server, digest_dir: Path) -> StartP:
    """A new P beside the D of all tests; each test ends its own."""

    def start(shutdown_timeout_s: int) -> Pair:
        config = connector_config("kv_producer", kv_digest=str(digest_dir), lease_s=FAR_S // 2)
        arguments = (
            *ARGUMENTS,
            "--max-num-batched-tokens",
            "256",
            "--shutdown-timeout",
            str(shutdown_timeout_s),
        )
        name = f"prefill-{len(servers.running)}-{shutdown_timeout_s}"
        server = servers.start(ServerSpec(name, model, config, arguments=arguments))
        servers.wait_ready(START_TIMEOUT_S)
        return Pair(server, decode_server, digest_dir)

    return start


def body_of(seed: int, num_tokens: int) -> Answer:
    return {"prompt": prompt_of(num_tokens, seed), "max_tokens": 4, "logprobs": 2}


def ask_to_stop(server: Server) -> None:
    """SIGTERM to the server's leader; returns when its engine finishes what it has."""
    server.process.terminate()
    wait_until(
        lambda: "EngineCore: start mode=drain" in server.log.read_text(errors="replace"),
        "the engine begins to stop",
    )


def wait_exited(server: Server) -> None:
    server.process.wait(EXIT_S)
    wait_until(lambda: not server.pids(), "no process of the server is left")


def in_push(pair: Pair, transfer_id: str, body: Answer, pool: ThreadPoolExecutor) -> Future[Any]:
    """Both legs; D's answer. P computes, and D has reserved blocks."""
    prefill_leg, decode_leg = pair.legs(transfer_id)

    def prefill() -> None:
        with contextlib.suppress(httpx.HTTPError):
            post(pair.prefill_server, body | {"max_tokens": 1, "kv_transfer_params": prefill_leg})

    pool.submit(prefill)
    answer = pool.submit(pair.decode, decode_leg, **body)
    wait_until(lambda: kv_cache_usage(pair.decode_server) > 0, "D has reserved blocks")
    wait_until(lambda: kv_cache_usage(pair.prefill_server) > 0, "P computes the prompt")
    return answer


def test_push_in_progress_is_finished(start_p: StartP) -> None:
    pair, body = start_p(EXIT_S), body_of(1, LONG)
    reference = pair.reference(**body)
    assert pair.control_port
    before = metrics(pair.decode_server)
    with ThreadPoolExecutor(2) as pool:
        answer = in_push(pair, "finished", body, pool)
        ask_to_stop(pair.prefill_server)
        got = answer.result()
    assert_same_generation(reference, got)
    assert_equal_digests(pair.digest_dir, "finished", -(-(LONG - 1) // BLOCK_SIZE))
    after = metrics(pair.decode_server)
    assert after["recv_requests"] == before["recv_requests"] + 1
    wait_exited(pair.prefill_server)


def test_prompt_that_was_handed_over_is_still_served(start_p: StartP) -> None:
    pair, body = start_p(EXIT_S), body_of(2, 300)
    reference = pair.reference(**body)
    params = pair.prefill(**body)["kv_transfer_params"]
    before = metrics(pair.decode_server)
    ask_to_stop(pair.prefill_server)
    got = pair.decode(params, **body)
    assert_same_generation(reference, got)
    assert metrics(pair.decode_server)["recv_requests"] == before["recv_requests"] + 1
    wait_exited(pair.prefill_server)


def test_prompt_that_nobody_fetches_does_not_keep_p(start_p: StartP) -> None:
    """Its lease would last for minutes."""
    pair = start_p(20)
    assert pair.prefill(**body_of(3, 300))["kv_transfer_params"] is not None
    ask_to_stop(pair.prefill_server)
    wait_exited(pair.prefill_server)
    # By itself, not by vLLM's SIGKILL at the end of its patience.
    log = pair.prefill_server.log.read_text(errors="replace")
    assert "starting resource teardown" in log


def test_without_the_option_d_learns_of_the_end_by_its_link(start_p: StartP) -> None:
    pair, body = start_p(0), body_of(4, LONG)
    reference = pair.reference(**body)
    with ThreadPoolExecutor(2) as pool:
        answer = in_push(pair, "cut", body, pool)
        pair.prefill_server.process.terminate()
        got = answer.result()
    assert_same_generation(reference, got)
    wait_exited(pair.prefill_server)
    wait_until(lambda: kv_cache_usage(pair.decode_server) == 0, "D holds nothing any more")
