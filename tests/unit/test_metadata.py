"""What crosses between scheduler and workers: merged over ranks, pickled by vLLM's executor."""

from __future__ import annotations

import pickle

from fakes.builders import make_endpoint, make_geometry

from vllm_llmdd_connector.metadata import (
    Hold,
    PullJob,
    StepMessage,
    WorkerHandshake,
    WorkerReport,
)
from vllm_llmdd_connector.scheduler.block_map import GroupBlocks

JOB = PullJob(
    request_id="r",
    transfer_id="p",
    claim_id=1,
    production=2,
    secret="s",
    workers=(make_endpoint(),),
    groups=[GroupBlocks([1], [2], 0)],
    loaded_blocks=[2],
    timeout_s=1.0,
)


def test_releases_of_ranks_are_counted_and_the_first_reason_is_kept() -> None:
    report = WorkerReport({1: 1, 2: 1}, {"r": "link: refused"})
    report.aggregate(WorkerReport({2: 1, 3: 1}, {"r": "release: late", "s": "queue: full"}))
    assert report.released == {1: 1, 2: 2, 3: 1}
    assert report.failed == {"r": "link: refused", "s": "queue: full"}


def test_step_message_is_empty_only_without_any_order() -> None:
    assert StepMessage().is_empty
    for step in (
        StepMessage(holds=[Hold(1, "p", "s")]),
        StepMessage(ended=[1]),
        StepMessage(pulls=[JOB]),
        StepMessage(cancels=["r"]),
    ):
        assert not step.is_empty


def test_everything_survives_pickling() -> None:
    handshake = WorkerHandshake(0, make_endpoint(), (make_geometry(),))
    step = StepMessage([Hold(1, "p", "s", ((1, 2),))], [3], [JOB], ["x"])
    for part in (handshake, step, WorkerReport({1: 1}, {"r": "x"})):
        assert pickle.loads(pickle.dumps(part)) == part
