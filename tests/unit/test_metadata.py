"""What crosses between scheduler and workers: merged over ranks, pickled by vLLM's executor."""

from __future__ import annotations

import pickle

from fakes.builders import make_endpoint, make_geometry

from vllm_llmdd_connector.layout.blocks import GroupBlocks, WantedBlocks
from vllm_llmdd_connector.metadata import (
    PrefillChunk,
    PullJob,
    ReceiveJob,
    SentPrompt,
    StepMessage,
    WorkerHandshake,
    WorkerReport,
)

JOB = PullJob(
    request_id="r",
    transfer_id="p",
    claim_id=1,
    production=2,
    secret="s",
    control_address=("127.0.0.1", 4000),
    session=5,
    workers=(make_endpoint(),),
    groups=[GroupBlocks([1], [2], 0)],
    loaded_blocks=[2],
    timeout_s=1.0,
)
RECEIVE = ReceiveJob(
    request_id="r",
    transfer_id="t",
    claim_id=1,
    control_address=("127.0.0.1", 4000),
    session=5,
    workers=(make_endpoint(),),
    groups=[WantedBlocks([2], 0)],
    loaded_blocks=[2],
    timeout_s=1.0,
)
CHUNK = PrefillChunk("t", 7, 40, ((1, 2, 3),), 32)


def test_first_rank_s_reason_is_kept() -> None:
    report = WorkerReport({"r": "link: refused"})
    report.aggregate(WorkerReport({"r": "release: late", "s": "queue: full"}))
    assert report.failed == {"r": "link: refused", "s": "queue: full"}


def test_step_message_is_empty_only_without_any_order() -> None:
    assert StepMessage().is_empty
    for step in (
        StepMessage(sent_prompts=[SentPrompt("p", "t", ((1, 2),))]),
        StepMessage(chunks=[CHUNK]),
        StepMessage(jobs=[JOB]),
        StepMessage(jobs=[RECEIVE]),
        StepMessage(cancels={"r": ""}),
    ):
        assert not step.is_empty


def test_everything_survives_pickling() -> None:
    handshake = WorkerHandshake(
        0, make_endpoint(), (make_geometry(),), can_push=True, kv_format="CPU_ATTN/vec"
    )
    prompts = [SentPrompt("p", "t", ((1, 2),))]
    step = StepMessage(prompts, [CHUNK], [7], [JOB, RECEIVE], {"x": "claim: gone"})
    for part in (handshake, step, WorkerReport({"r": "x"})):
        assert pickle.loads(pickle.dumps(part)) == part
