"""Worker ranks of the connector with two layers, and a P around one that holds prompts."""

from __future__ import annotations

import mmap
from types import SimpleNamespace
from typing import Any

import torch

from fakes.block_pool import FakeBlockPool
from fakes.builders import make_fingerprint
from fakes.clock import FakeClock, wait_for
from fakes.prefiller import make_output
from fakes.requests import make_request
from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.control.channel import Server
from vllm_llmdd_connector.control.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Claim,
    Grant,
    Hello,
    Message,
    Welcome,
    WorkerEndpoint,
    raw_fingerprint,
)
from vllm_llmdd_connector.layout.blocks import GroupBlocks, WantedBlocks
from vllm_llmdd_connector.layout.groups import Group
from vllm_llmdd_connector.metadata import (
    PrefillChunk,
    PullJob,
    ReceiveJob,
    StepMessage,
    WorkerReport,
)
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.params import read_ticket
from vllm_llmdd_connector.scheduler.producer import Producer
from vllm_llmdd_connector.scheduler.producer_control import ProducerControl
from vllm_llmdd_connector.worker.worker import WorkerConnector

NUM_BLOCKS = 8
PROMPT = list(range(32))


NO_LAYERS = SimpleNamespace(static_forward_context={})


class FullAttentionSpec:
    """Its name is what counts."""

    block_size = 16


def own_memory(num_blocks: int, block_bytes: int) -> torch.Tensor:
    """Apart from the heap, as a real cache is: malloc would put one of 32 MiB there, too, in a
    process that has freed such ones before, and pages of the heap cannot be shared."""
    pages = mmap.mmap(-1, num_blocks * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(num_blocks, block_bytes)


class Rank:
    """One worker with two layers; every byte of block ``b`` is ``fill + b``."""

    def __init__(self, kv_role: str, fill: int, *, block_bytes: int = 64, **options: Any) -> None:
        """``block_bytes``: of a block in one layer. ``options`` are the connector's."""
        transfer = SimpleNamespace(
            engine_id=kv_role,
            kv_role=kv_role,
            is_kv_producer=kv_role == "kv_producer",
            is_kv_consumer=kv_role == "kv_consumer",
        )
        group = SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=["a", "b"])
        config: Any = SimpleNamespace(kv_transfer_config=transfer, compilation_config=NO_LAYERS)
        kv_cache_config: Any = SimpleNamespace(kv_cache_groups=[group], num_blocks=NUM_BLOCKS)
        self.worker = WorkerConnector(config, kv_cache_config, ConnectorConfig(**options), 0)
        self.caches = {name: own_memory(NUM_BLOCKS, block_bytes) for name in "ab"}
        for cache in self.caches.values():
            cache[:] = torch.arange(fill, fill + NUM_BLOCKS, dtype=torch.uint8)[:, None]
        self.worker.register_kv_caches(self.caches)
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.report = WorkerReport()

    def step(self, **orders: Any) -> None:
        """One engine step with these orders."""
        step = StepMessage(**orders)
        self.worker.apply_voids(step)
        self.worker.bind(step)
        drained = self.worker.poll()
        assert not self.reported & drained.received, "a request was reported twice"
        self.received |= drained.received
        self.failed |= drained.failed.keys()
        report = self.worker.take_report()
        if report is not None:
            self.report.aggregate(report)

    def fill(self, block: int, value: int) -> None:
        for cache in self.caches.values():
            cache[block] = value

    def holds(self, block: int, value: int) -> bool:
        """Whether this is every byte of a block."""
        return all(bool((cache[block] == value).all()) for cache in self.caches.values())

    @property
    def reported(self) -> set[str]:
        return self.received | self.failed

    @property
    def endpoint(self) -> WorkerEndpoint:
        handshake = self.worker.handshake
        assert handshake is not None
        assert handshake.endpoint is not None
        return handshake.endpoint

    def blocks(self) -> list[list[int]]:
        """First byte of each block by layer."""
        return [cache[:, 0].tolist() for cache in self.caches.values()]


class Prefill:
    """P: one rank, and the scheduler that holds blocks 1 and 2 for each prompt."""

    def __init__(self, rank: Rank, **options: Any) -> None:
        """``options`` are the connector's."""
        self.rank = rank
        config = ConnectorConfig(**options)
        self.clock = FakeClock()
        self.pool: Any = FakeBlockPool(NUM_BLOCKS)
        self.server = Server("p-scheduler", "127.0.0.1", 0, lambda: None)
        stats = TransferStats()
        self.producer = Producer(
            config,
            "engine-p",
            "instance-p",
            self.server.port,
            [Group(0, "FullAttentionSpec", 16, ("a", "b"))],
            NUM_BLOCKS,
            1,
            self.clock,
            stats,
        )
        self.producer.bind_block_pool(self.pool)
        self.control = ProducerControl(
            config,
            "instance-p",
            self.producer,
            make_fingerprint(),
            (rank.endpoint,),
            self.clock,
            stats,
        )
        self.server.start(self.control.handle)

    def ask(self, message: AnyMessage) -> Message:
        """What D's scheduler asks, straight to the handler."""
        answers: list[Message] = []
        self.control.handle(message, answers.append)
        (answer,) = answers
        return answer

    def hold(self, claim_id: int) -> PullJob:
        """Finish a prompt and claim it; returns the order to fetch it into blocks 5 and 4."""
        request_id = f"p{claim_id}"
        request = make_request(
            request_id, PROMPT, {"do_remote_decode": True}, status="FINISHED_STOPPED"
        )
        self.pool.allocate((1, 2))
        params = self.producer.request_finished(request, [[1, 2]])
        self.pool.end_request((1, 2))
        assert params is not None
        ticket = read_ticket(params)
        hello = Hello(version=PROTOCOL_VERSION, fingerprint=raw_fingerprint(make_fingerprint()))
        welcome = self.ask(hello)
        assert isinstance(welcome, Welcome)
        claim = Claim(
            session=welcome.session,
            claim_id=claim_id,
            production=ticket.production,
            secret=ticket.secret,
            prompt_hash=ticket.prompt_hash,
        )
        grant = Grant(
            claim_id=claim_id,
            production=ticket.production,
            secret=ticket.secret,
            block_ids=((1, 2),),
        )
        assert self.ask(claim) == grant
        return PullJob(
            request_id=f"d{claim_id}",
            transfer_id=request_id,
            claim_id=claim_id,
            production=ticket.production,
            secret=ticket.secret,
            control_address=ticket.address,
            session=welcome.session,
            workers=welcome.workers,
            groups=[GroupBlocks([1, 2], [5, 4], 0)],
            loaded_blocks=[5, 4],
            timeout_s=60.0,
        )

    def push(self, number: int) -> None:
        """Compute a prompt in blocks 1 and 2; they hold it already."""
        chunk = PrefillChunk(f"t{number}", 1000 + number, 32, ((1, 2),), 32, num_final=(2,))
        self.rank.step(chunks=[chunk])
        self.rank.worker.forward_ended()

    def step(self) -> None:
        """A step that schedules nothing, as vLLM takes after the end of a request."""
        step = StepMessage()
        self.producer.fill(step, make_output())
        self.rank.worker.apply_voids(step)
        self.rank.worker.bind(step)

    def expire_leases(self) -> None:
        self.clock.advance(ConnectorConfig().max_lease_s)
        self.producer.free_ended()

    def close(self) -> None:
        """Idempotent."""
        self.server.close()
        self.rank.worker.shutdown()


def receive_job(
    number: int, control_port: int, endpoint: WorkerEndpoint, timeout_s: float = 60.0
) -> ReceiveJob:
    """An order to take the prompt of P's ``push(number)`` into blocks 5 and 4."""
    return ReceiveJob(
        request_id=f"d{number}",
        transfer_id=f"t{number}",
        claim_id=number,
        control_address=("127.0.0.1", control_port),
        session=1,
        workers=(endpoint,),
        groups=[WantedBlocks([5, 4], 0)],
        loaded_blocks=[5, 4],
        timeout_s=timeout_s,
    )


def run(d: Rank, *request_ids: str) -> None:
    """Empty steps until these requests are reported."""

    def all_reported() -> bool:
        d.step()
        return set(request_ids) <= d.reported

    wait_for(all_reported, f"reports of {request_ids}")
