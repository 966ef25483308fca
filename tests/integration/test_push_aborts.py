"""D aborts pushes at random moments; no byte that P still had under way arrives afterwards.

Two processes with the real engines, threads and control channels of P's and D's workers. D's copies
are slowed down, so that most aborts come in the middle of one. When a request is reported, its
blocks are overwritten at once, as vLLM may, and compared when P has nothing under way any more.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from bench_layer_overlap import Case, Decoder, Shape, peer

from vllm_llmdd_connector.datadist import _engine

SHAPE = Shape(layers=6, token_bytes=512, max_tokens=512, chunk_tokens=256)
COPY_RATE = 500_000_000
COMPUTE_MS = 0.2
LATEST_ABORT_S = 0.008
NUM_ABORTS = 2_000


@pytest.fixture(autouse=True)
def slow_copies() -> Iterator[None]:
    _engine.testing.set_copy_rate(COPY_RATE)
    yield
    _engine.testing.set_copy_rate(0)


def num_changed(num_aborts: int, keep_reservations: bool = False) -> tuple[int, int]:
    """How many aborted requests' blocks changed after their report, and how many had none."""
    dice = random.Random(1)
    changed = early = 0
    with peer(SHAPE) as (pipe, ports):
        decoder = Decoder(SHAPE, ports)
        if keep_reservations:
            decoder.keep_reservations()
        for number in range(1, num_aborts + 1):
            case = Case("push", number, SHAPE.max_tokens, COMPUTE_MS, holds_core=False)
            decoder.submit(case)
            pipe.send(case)
            time.sleep(dice.uniform(0, LATEST_ABORT_S))
            decoder.give_up(case)
            if decoder.wait_end() == "received":
                early += 1
            decoder.fill(number % 251)
            pipe.recv()
            pipe.send(None)
            pipe.recv()  # P has nothing under way any more
            changed += not decoder.holds(number % 251)
        decoder.close()
    return changed, early


@pytest.mark.timeout(900)
def test_nothing_arrives_after_the_report() -> None:
    changed, finished = num_changed(NUM_ABORTS)
    assert changed == 0
    assert finished < NUM_ABORTS / 2, "most requests were aborted before they had everything"


def test_reservations_are_what_prevents_it() -> None:
    """The same with reservations that stay open finds blocks that change."""
    changed, _ = num_changed(100, keep_reservations=True)
    assert changed > 0
