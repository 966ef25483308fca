"""Pushes between real servers when a leg is late or missing, or a server stops or dies meanwhile.

The prompts are long enough for P to compute over several seconds, so a fault that comes while P's
metrics show the push under way comes in the middle of it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from conftest import wait_until
from flow import (
    Answer,
    Pair,
    assert_equal_digests,
    assert_same_generation,
    kv_cache_usage,
    metrics,
    post,
)
from prompts import prompt_of
from servers import free_port

BLOCK_SIZE = 128
LONG = 2100
LATE_S = 2.0
OPTIONS = {
    "first_contact_timeout_s": 5,
    "reserve_timeout_s": 30,
    "request_timeout_s": 30,
    "lease_s": 6,
    "max_lease_s": 60,
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(start_pair: Callable[..., Pair], model: Path) -> Pair:
    pair = start_pair(
        model,
        arguments=("--dtype", "float32", "--max-model-len", "4096"),
        prefill=OPTIONS | {"control_port": free_port()},
        decode=OPTIONS,
        prefill_arguments=("--max-num-batched-tokens", "256"),
    )
    assert pair.control_port
    return pair


def body_of(seed: int, num_tokens: int = 300) -> Answer:
    return {"prompt": prompt_of(num_tokens, seed), "max_tokens": 4, "logprobs": 2}


def blocks_of(num_tokens: int) -> int:
    """What D takes of a prompt it knows nothing of; it computes the last token itself."""
    return -(-(num_tokens - 1) // BLOCK_SIZE)


def wait_idle(pair: Pair) -> None:
    """No lease of P is open and no block of either server in use."""

    def all_free() -> bool:
        seen = pair.prefill_metrics()
        ended = sum(seen[f"leases_{end}"] for end in ("released", "expired", "voided"))
        usage = [kv_cache_usage(server) for server in (pair.prefill_server, pair.decode_server)]
        return seen["leases_opened"] == ended and usage == [0, 0]

    wait_until(all_free, "both servers hold nothing any more")


def check_push(pair: Pair, seed: int, **delays: float) -> None:
    body = body_of(seed)
    got = pair.push(f"check-{seed}", **delays, **body)
    assert_same_generation(pair.reference(**body), got)
    assert_equal_digests(pair.digest_dir, f"check-{seed}", blocks_of(300))


def in_prefill(
    pair: Pair, transfer_id: str, body: Answer
) -> tuple[Future[Answer], ThreadPoolExecutor]:
    """Start a request's prefill leg and return when P computes it."""
    pool = ThreadPoolExecutor(1)
    leg, _ = pair.legs(transfer_id)
    prefill = body | {"max_tokens": 1, "kv_transfer_params": leg}
    future = pool.submit(post, pair.prefill_server, prefill)
    wait_until(lambda: kv_cache_usage(pair.prefill_server) > 0, "P computes the prompt")
    return future, pool


def test_decode_leg_first(pair: Pair) -> None:
    before = pair.prefill_metrics()
    check_push(pair, 1, prefill_delay_s=LATE_S)
    assert pair.prefill_metrics()["sent_requests"] == before["sent_requests"] + 1


def test_prefill_leg_first_is_pulled_when_p_has_finished(pair: Pair) -> None:
    before = metrics(pair.decode_server)
    check_push(pair, 2, decode_delay_s=LATE_S)
    after = metrics(pair.decode_server)
    assert after["recv_requests"] == before["recv_requests"] + 1
    wait_idle(pair)


def test_prefill_leg_never_comes(pair: Pair) -> None:
    body = body_of(3)
    _, decode_leg = pair.legs("never-at-p")
    before = metrics(pair.decode_server)
    got = pair.decode(decode_leg, **body)
    assert_same_generation(pair.reference(**body), got)
    after = metrics(pair.decode_server)
    assert after["failures:announce"] == before["failures:announce"] + 1
    wait_idle(pair)


def test_decode_leg_never_comes(pair: Pair) -> None:
    before = pair.prefill_metrics()
    prefill_leg, _ = pair.legs("never-at-d")
    leg = {"max_tokens": 1, "kv_transfer_params": prefill_leg}
    post(pair.prefill_server, body_of(4) | leg)
    wait_until(
        lambda: pair.prefill_metrics()["leases_expired"] == before["leases_expired"] + 1,
        "P's lease expires",
    )
    wait_idle(pair)


def test_other_prompt_at_d_is_prefilled_there(pair: Pair) -> None:
    body, other = body_of(5), body_of(6)
    prefill_leg, decode_leg = pair.legs("mismatch")
    with ThreadPoolExecutor(1) as pool:
        leg = {"max_tokens": 1, "kv_transfer_params": prefill_leg}
        first = pool.submit(post, pair.prefill_server, body | leg)
        got = pair.decode(decode_leg, **other)
        first.result()
    assert_same_generation(pair.reference(**other), got)
    wait_idle(pair)


def test_same_transfer_three_times(pair: Pair) -> None:
    """As a proxy that repeats both legs: each answer is right, whichever gets the blocks."""
    body = body_of(7)
    reference = pair.reference(**body)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: pair.push("thrice", **body), range(3)))
    for answer in answers:
        assert_same_generation(reference, answer)
    wait_idle(pair)


def test_client_leaves_while_p_pushes(pair: Pair) -> None:
    body = body_of(8, LONG)
    prefilling, pool = in_prefill(pair, "left", body)
    _, decode_leg = pair.legs("left")
    request = {"model": str(pair.decode_server.spec.model), "temperature": 0, **body}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{pair.decode_server.url}/v1/completions",
            json=request | {"kv_transfer_params": decode_leg},
            timeout=1.0,
        )
    prefilling.result()
    pool.shutdown()
    wait_idle(pair)
    check_push(pair, 9)


def test_p_stopped_in_the_middle_and_continued(pair: Pair) -> None:
    """D gives up at its deadline and answers; what P sends afterwards changes nothing at D."""
    body = body_of(10, LONG)
    reference = pair.reference(**body)
    _, decode_leg = pair.legs("stopped")
    prefilling, pool = in_prefill(pair, "stopped", body)
    with ThreadPoolExecutor(1) as decoding:
        answer = decoding.submit(pair.decode, decode_leg, **body)
        wait_until(lambda: kv_cache_usage(pair.decode_server) > 0, "D has reserved blocks")
        pair.prefill_server.send(signal.SIGSTOP)
        try:
            got = answer.result()
        finally:
            pair.prefill_server.send(signal.SIGCONT)
    assert_same_generation(reference, got)
    prefilling.result()
    pool.shutdown()
    check_push(pair, 11)
    wait_idle(pair)


def test_p_killed_in_the_middle(pair: Pair) -> None:
    """Last, because P is gone afterwards."""
    body = body_of(12, LONG)
    reference = pair.reference(**body)
    _, decode_leg = pair.legs("killed")
    prefilling, pool = in_prefill(pair, "killed", body)
    with ThreadPoolExecutor(1) as decoding:
        answer = decoding.submit(pair.decode, decode_leg, **body)
        wait_until(lambda: kv_cache_usage(pair.decode_server) > 0, "D has reserved blocks")
        pair.prefill_server.send(signal.SIGKILL)
        got = answer.result()
    assert_same_generation(reference, got)
    with pytest.raises(httpx.HTTPError):
        prefilling.result()
    pool.shutdown()
    wait_until(lambda: kv_cache_usage(pair.decode_server) == 0, "D holds nothing any more")
