"""Two real servers with ``integrity: full``: right answers in both flows, every block compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import wait_until
from flow import Pair, assert_same_generation, metrics, num_open_leases
from prompts import prompt_of

FULL = {"integrity": "full"}
PATIENT = {"first_contact_timeout_s": 60, "reserve_timeout_s": 300, "request_timeout_s": 300}
NUM_TOKENS = 300


@pytest.fixture(scope="module")
def pair(start_pair: Callable[..., Pair], tiny_model: Path) -> Pair:
    arguments = ("--max-model-len", "1024", "--dtype", "float32")
    return start_pair(tiny_model, arguments, prefill=FULL, decode=FULL | PATIENT)


@pytest.mark.parametrize("flow", ["pull", "push"])
def test_answers_are_right_and_every_block_was_compared(pair: Pair, flow: str) -> None:
    body = {"prompt": prompt_of(NUM_TOKENS, len(flow)), "max_tokens": 6, "logprobs": 2}
    before = metrics(pair.decode_server)
    got = pair.push(f"checked-{flow}", **body) if flow == "push" else pair.run(**body)
    assert_same_generation(pair.reference(**body), got)
    wait_until(lambda: num_open_leases(pair) == 0, "P holds nothing any more")
    after = metrics(pair.decode_server)
    compared = after["integrity_checked_blocks"] - before["integrity_checked_blocks"]
    assert compared == after["recv_blocks"] - before["recv_blocks"]
    assert compared > 0
    assert after["integrity_failed_blocks"] == 0


def test_nothing_failed(pair: Pair) -> None:
    for server in (pair.prefill_server, pair.decode_server):
        failures = {k: v for k, v in metrics(server).items() if k.startswith("failures") and v}
        assert not failures
