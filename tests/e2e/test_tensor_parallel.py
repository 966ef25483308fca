"""Two ranks on each side: every pair of ranks transfers and decides for itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import wait_until
from flow import Pair, assert_equal_digests, assert_same_generation, digests, metrics
from prompts import prompt_of
from servers import Server

# Eight spinning processes on two cores: minutes at times.
pytestmark = pytest.mark.slow

# Only the pull from the stopped rank is meant to run out of time. Eight busy processes share the
# machine's cores, so everything else gets plenty.
OPTIONS = {
    "link_timeout_ms": 20000,
    "sync_kv_timeout_ms": 5000,
    "first_contact_timeout_s": 30,
    "reserve_timeout_s": 240,
    "request_timeout_s": 240,
    "release_timeout_s": 30,
    "lease_s": 30,
}


@pytest.fixture(scope="module")
def pair(start_pair: Callable[..., Pair], tiny_model: Path) -> Pair:
    arguments = ("--max-model-len", "1024", "--dtype", "float32", "--tensor-parallel-size", "2")
    return start_pair(tiny_model, arguments, prefill=OPTIONS, decode=OPTIONS)


def worker_of_rank(server: Server, rank: int) -> int:
    """The process id of one worker, by the name that vLLM gives it."""
    for pid in server.pids():
        if f"Worker_TP{rank}" in Path(f"/proc/{pid}/cmdline").read_text(errors="replace"):
            return pid
    raise AssertionError(f"server {server.spec.name} has no worker of rank {rank}")


def check_service(pair: Pair, seed: int) -> None:
    body = {"prompt": prompt_of(300, seed), "max_tokens": 4, "logprobs": 2}
    params = pair.prefill(**body)["kv_transfer_params"]
    got = pair.decode(params, **body)
    assert_equal_digests(pair.digest_dir, params["llmdd"]["transfer_id"], 3)
    assert_same_generation(pair.reference(**body), got)


def test_each_rank_receives_its_own_heads(pair: Pair) -> None:
    check_service(pair, 1)
    sent = digests(pair.digest_dir, "send")
    assert {rank for _, rank, _, _ in sent} == {0, 1}
    first = {value for key, value in sent.items() if key[1] == 0}
    second = {value for key, value in sent.items() if key[1] == 1}
    assert not first & second


def test_push_to_each_rank(pair: Pair) -> None:
    """While D waits all of its processes spin: on two cores P may take minutes."""
    body = {"prompt": prompt_of(600, 9), "max_tokens": 4, "logprobs": 2}
    got = pair.push("two-ranks", **body)
    assert_equal_digests(pair.digest_dir, "two-ranks", 5)
    assert_same_generation(pair.reference(**body), got)
    assert pair.prefill_metrics()["sent_requests"] == 2, "each rank of P has pushed its heads"


def test_one_rank_that_fails_costs_a_recompute_and_no_more(pair: Pair) -> None:
    body = {"prompt": prompt_of(300, 2), "max_tokens": 4, "logprobs": 2}
    reference = pair.reference(**body)
    params = pair.prefill(**body)["kv_transfer_params"]
    before = metrics(pair.decode_server)
    pid = worker_of_rank(pair.prefill_server, 1)
    os.kill(pid, signal.SIGSTOP)
    try:
        got = pair.decode(params, **body)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert_same_generation(reference, got)
    after = metrics(pair.decode_server)
    failed = sum(
        after[f"failures:{stage}"] - before[f"failures:{stage}"]
        for stage in ("link", "transfer", "release")
    )
    assert failed == 1, "rank 1 alone fails"
    assert after["recv_requests"] == before["recv_requests"] + 1, "rank 0 alone receives"
    check_service(pair, 3)

    def all_ended() -> bool:
        seen = pair.prefill_metrics()
        ended = sum(seen[f"leases_{end}"] for end in ("released", "expired", "voided"))
        return seen["leases_opened"] == ended

    wait_until(all_ended, "every lease of P ends")
