"""Decode servers of both failure policies, and a prefill server that stops, dies, restarts.

Every request must end with the right result or a clean error, and service must resume by itself.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
from servers import Server, Servers, ServerSpec, free_port

LEASE_S = 6
SHORT = {
    "link_timeout_ms": 1000,
    "sync_kv_timeout_ms": 1500,
    "release_timeout_s": 2,
    "first_contact_timeout_s": 3,
    "lease_s": LEASE_S,
    "max_lease_s": 60,
}
ARGUMENTS = ("--max-model-len", "1024", "--dtype", "float32")


@pytest.fixture(scope="module")
def control_port() -> int:
    """Fixed, so that a restarted P is found at the same address."""
    return free_port()


@pytest.fixture(scope="module")
def failing_server(servers: Servers, tiny_model: Path) -> Server:
    """A decode server whose failed loads end in an error; it loads while the pair does."""
    config = connector_config("kv_consumer", kv_load_failure_policy="fail", **SHORT)
    return servers.start(ServerSpec("fail", tiny_model, config, arguments=ARGUMENTS))


@pytest.fixture(scope="module")
def pair(
    start_pair: Callable[..., Pair], tiny_model: Path, control_port: int, failing_server: Server
) -> Pair:
    prefill = SHORT | {"control_port": control_port, "engine_id": "configured-by-hand"}
    return start_pair(tiny_model, ARGUMENTS, prefill=prefill, decode=SHORT)


def body_of(seed: int, num_tokens: int = 300) -> Answer:
    return {"prompt": prompt_of(num_tokens, seed), "max_tokens": 3, "logprobs": 2}


def check_service(pair: Pair, seed: int) -> None:
    """A new request goes through P and D, every block by digest."""
    body = body_of(seed)
    params = pair.prefill(**body)["kv_transfer_params"]
    got = pair.decode(params, **body)
    assert_equal_digests(pair.digest_dir, params["llmdd"]["transfer_id"], 3)
    assert_same_generation(pair.reference(**body), got)


@contextlib.contextmanager
def stopped(server: Server, process_name: str) -> Iterator[None]:
    """One kind of a server's processes gets SIGSTOP, and SIGCONT at the end."""
    import os

    pids = [
        pid
        for pid in server.pids()
        if process_name in Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    ]
    assert pids, f"server {server.spec.name} has no process named {process_name}"
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def restart(servers: Servers, server: Server) -> Server:
    """Kill a server and start it again at the same address."""
    server.send(signal.SIGKILL)
    server.process.wait()
    servers.running.remove(server)
    spec = ServerSpec(
        f"{server.spec.name}-again",
        server.spec.model,
        server.spec.kv_transfer_config,
        port=server.port,
        arguments=server.spec.arguments,
    )
    started = servers.start(spec)
    servers.wait_ready(START_TIMEOUT_S)
    return started


def test_service_works_before_any_fault(pair: Pair) -> None:
    check_service(pair, 1)


def test_lease_that_expired_before_d_comes_ends_in_a_local_prefill(pair: Pair) -> None:
    body = body_of(2)
    params = pair.prefill(**body)["kv_transfer_params"]
    wait_until(
        lambda: pair.prefill_metrics()["leases_expired"] == 1,
        "the lease expires",
        LEASE_S * 3,
    )
    before = metrics(pair.decode_server)
    assert_same_generation(pair.reference(**body), pair.decode(params, **body))
    after = metrics(pair.decode_server)
    assert after["failures:claim"] == before["failures:claim"] + 1
    assert after["recv_requests"] == before["recv_requests"]


def test_stopped_p_worker_costs_a_recompute_and_p_is_used_again_afterwards(pair: Pair) -> None:
    body = body_of(3)
    reference = pair.reference(**body)
    params = pair.prefill(**body)["kv_transfer_params"]
    before = metrics(pair.decode_server)
    with stopped(pair.prefill_server, "Worker"):
        got = pair.decode(params, **body)
    assert_same_generation(reference, got)
    after = metrics(pair.decode_server)
    assert after["recv_requests"] == before["recv_requests"]
    failed = sum(
        after[f"failures:{stage}"] - before[f"failures:{stage}"]
        for stage in ("link", "transfer", "release")
    )
    assert failed == 1
    check_service(pair, 4)


def test_stopped_p_worker_is_a_clean_error_under_policy_fail(
    pair: Pair, failing_server: Server
) -> None:
    body = body_of(5)
    params = pair.prefill(**body)["kv_transfer_params"]
    with stopped(pair.prefill_server, "Worker"), pytest.raises(httpx.HTTPStatusError) as error:
        post(failing_server, body | {"kv_transfer_params": params})
    assert error.value.response.status_code == 500
    again = body_of(6)
    params = pair.prefill(**again)["kv_transfer_params"]
    got = post(failing_server, again | {"kv_transfer_params": params})
    assert_same_generation(pair.reference(**again), got)
    assert metrics(failing_server)["recv_requests"] == 1


def test_s10_hang_none_when_the_client_leaves_while_d_waits(pair: Pair) -> None:
    body = body_of(7)
    params = pair.prefill(**body)["kv_transfer_params"]
    released = pair.prefill_metrics()["leases_released"]
    with stopped(pair.prefill_server, "EngineCore"), pytest.raises(httpx.ReadTimeout):
        post(pair.decode_server, body | {"kv_transfer_params": params}, timeout_s=1)
    wait_until(
        lambda: pair.prefill_metrics()["leases_released"] == released + 1,
        "P is told to release, its lease does not expire",
        LEASE_S * 3,
    )
    wait_until(lambda: kv_cache_usage(pair.decode_server) == 0.0, "D holds nothing")


def test_p_killed_ends_in_a_local_prefill_and_disturbs_no_decode(
    pair: Pair, servers: Servers
) -> None:
    body = body_of(8)
    reference = pair.reference(**body)
    params = pair.prefill(**body)["kv_transfer_params"]
    long_body = body_of(80) | {"max_tokens": 150}
    long_reference = pair.reference(**long_body)
    long_params = pair.prefill(**long_body)["kv_transfer_params"]
    received = metrics(pair.decode_server)["recv_requests"]
    with ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(pair.decode, long_params, **long_body)
        wait_until(
            lambda: metrics(pair.decode_server)["recv_requests"] == received + 1, "D has the KV"
        )
        pair.prefill_server.send(signal.SIGKILL)
        assert_same_generation(long_reference, decoding.result())
    pair.prefill_server.process.wait()
    assert_same_generation(reference, pair.decode(params, **body))
    pair.prefill_server = restart(servers, pair.prefill_server)
    got = pair.decode(params, **body)
    assert_same_generation(reference, got)
    check_service(pair, 9)


def test_d_killed_costs_p_one_lease_time_and_a_restarted_d_is_served(
    pair: Pair, servers: Servers
) -> None:
    body = body_of(10)
    params = pair.prefill(**body)["kv_transfer_params"]
    pair.decode_server = restart(servers, pair.decode_server)
    wait_until(
        lambda: pair.prefill_metrics()["leases_expired"] == 1, "P ends the lease", LEASE_S * 4
    )
    assert kv_cache_usage(pair.prefill_server) == 0.0
    assert_same_generation(pair.reference(**body), pair.decode(params, **body))
    check_service(pair, 11)


def test_d_with_another_block_size_is_refused_with_both_values(
    pair: Pair, servers: Servers, tiny_model: Path
) -> None:
    config = connector_config("kv_consumer", **SHORT)
    spec = ServerSpec(
        "other-blocks", tiny_model, config, arguments=(*ARGUMENTS, "--block-size", "64")
    )
    other = servers.start(spec)
    servers.wait_ready(START_TIMEOUT_S)
    body = body_of(12)
    params = pair.prefill(**body)["kv_transfer_params"]
    got = post(other, body | {"kv_transfer_params": params})
    assert_same_generation(pair.reference(**body), got)
    sentence = "block_size of KV cache group 0 differs: local 128, peer 64"
    assert sentence in other.log.read_text()
    assert sentence in pair.prefill_server.log.read_text()
    assert metrics(other)["failures:handshake"] == 1
