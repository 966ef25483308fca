"""A prefill engine and a decode engine with the project's connector, in one process.

The connector is complete, with its sockets and threads; only the LLM-DataDist engine under it is
the fake one, which copies between the two engines' tensors and fails on demand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fakes.clock import FakeClock, wait_for
from fakes.fake_datadist import FakeDataDist
from fakes.fake_push import PushFaults
from harness import Engine, Result, run_until
from push_journal import PushJournal

CONNECTOR = {
    "connector": "LLMDataDistConnector",
    "module_path": "vllm_llmdd_connector.connector",
}
PREFILL_LEG = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a proxy sends to P."""

MakePair = Callable[..., "Pair"]


def prompt_of(length: int, seed: int = 1) -> list[int]:
    """A prompt without repetitions that prefix caching could use; seeds differ from the start."""
    return [(seed * 131 + 17 * i * i + i) % 1000 for i in range(length)]


@dataclass
class Pair:
    """P and D, and what lies between them."""

    p: Engine
    d: Engine
    network: FakeDataDist
    p_clock: FakeClock
    """Time of P's scheduler side, which decides about leases."""
    journal: PushJournal
    _transfer_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def producers(self) -> list[int]:
        """Cluster ids of P's ranks."""
        return self.network.producers

    def prefill(self, prompt: Sequence[int], **options: Any) -> Result:
        """Run the prefill leg; its result has the params for D."""
        return self.p.run(self.start_prefill(prompt, **options))[0]

    def start_prefill(self, prompt: Sequence[int], **options: Any) -> str:
        return self.p.add_request(prompt, kv_transfer_params=PREFILL_LEG, **options)

    def params(self, prompt: Sequence[int], **options: Any) -> dict[str, Any]:
        """P's params for a prompt that it is known to hand over."""
        params = self.prefill(prompt, **options).kv_transfer_params
        assert params is not None
        return params

    def decode(
        self, prompt: Sequence[int], params: dict[str, Any] | None, max_tokens: int = 4
    ) -> str:
        """Start the decode leg."""
        return self.d.add_request(prompt, max_tokens=max_tokens, kv_transfer_params=params)

    def transfer(self, prompt: Sequence[int], max_tokens: int = 4) -> Result:
        """Both legs, one after the other."""
        return self.run(self.decode(prompt, self.params(prompt), max_tokens))[0]

    # The concurrent flow: both legs at once, with one transfer id.

    def new_transfer(self, prompt: Sequence[int]) -> str:
        """A transfer id for a prompt; what is reported done under it is compared with that."""
        transfer_id = f"transfer-{next(self._transfer_ids)}"
        self.journal.prompts[transfer_id] = list(prompt)
        return transfer_id

    def push_p(self, prompt: Sequence[int], transfer_id: str, **options: Any) -> str:
        """Start P's leg."""
        params = PREFILL_LEG | {"transfer_id": transfer_id}
        return self.p.add_request(prompt, kv_transfer_params=params, **options)

    def push_d(self, prompt: Sequence[int], transfer_id: str, max_tokens: int = 4) -> str:
        """Start D's leg."""
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_host": "127.0.0.1",
            "remote_port": self.p.connector._scheduler._server.port,
            "transfer_id": transfer_id,
        }
        return self.d.add_request(prompt, max_tokens=max_tokens, kv_transfer_params=params)

    def push(self, prompt: Sequence[int], max_tokens: int = 4, **options: Any) -> str:
        """Start both legs; returns D's request. ``options`` are P's."""
        transfer_id = self.new_transfer(prompt)
        self.push_p(prompt, transfer_id, **options)
        return self.push_d(prompt, transfer_id, max_tokens)

    def push_after_announcement(
        self, prompt: Sequence[int], max_tokens: int = 4, **options: Any
    ) -> str:
        """As ``push``, with P's leg sent when P knows that D waits for it."""
        transfer_id = self.new_transfer(prompt)
        request_id = self.push_d(prompt, transfer_id, max_tokens)
        self.run_until(lambda: transfer_id in self.handovers._by_transfer)
        self.push_p(prompt, transfer_id, **options)
        return request_id

    def step_d_until_reserved(self, transfer_id: str) -> None:
        """Step D until all of P's ranks know of D's blocks for a transfer."""
        pushers = self.pushers()
        self.d.run_until(lambda: all(_is_reserved(pusher, transfer_id) for pusher in pushers))

    def wait_for_copies(self, transfer_id: str, count: int) -> None:
        """Until so many layers, over chunks and caches, have arrived, without a step."""
        wait_for(
            lambda: self.journal.num_copies(transfer_id) >= count,
            f"{count} layers of {transfer_id}",
        )

    @property
    def handovers(self) -> Any:
        """P's table of transfers."""
        return self.p.connector._scheduler._producer.handovers

    def pushers(self) -> list[Any]:
        """The sending side of each of P's ranks."""
        return [worker.connector._worker._pusher for worker in self.p.workers]

    def push_faults(self, rank: int = 0) -> PushFaults:
        """What goes wrong with pushes to a rank of D."""
        return self.network.push_faults(cluster_of(self.d, rank))

    def run(self, *request_ids: str) -> list[Result]:
        """Step both engines until these requests of D have ended."""
        results = [self.d.results[name] for name in request_ids]
        self.run_until(lambda: all(result.finished for result in results))
        return results

    def run_until(self, predicate: Callable[[], bool]) -> None:
        run_until(predicate, self.d, self.p)

    def is_right(self, prompt: Sequence[int], result: Result) -> bool:
        """Whether D's tokens are those that follow from the prompt."""
        right = self.d.model.generate(prompt, len(result.tokens))
        return result.finish_reason == "length" and result.tokens == right

    def status(self, request_id: str) -> str:
        """vLLM's status of a request of D; empty when it is gone."""
        request = self.d.request(request_id)
        return "" if request is None else str(request.status.name)

    def finish(self) -> None:
        """Let both engines come to rest and check that nothing was leaked or done in excess."""
        engines = (self.p, self.d)
        self.run_until(
            lambda: (
                not any(engine.has_work for engine in engines)
                and all(engine.free_blocks() == engine.initial_free_blocks for engine in engines)
            )
        )
        assert self.network.violations == []
        assert self.network.open_reservations == []
        # What P's workers still know of a prompt goes with the next step that P takes.
        if any(pusher is not None for pusher in self.pushers()):
            self.p.run(self.p.add_request([1]))
            for pusher in self.pushers():
                plan = pusher._plan
                self.run_until(lambda plan=plan: not plan.num_prefills + plan.num_parked)
        self.run_until(lambda: not len(self.handovers))


def _is_reserved(pusher: Any, transfer_id: str) -> bool:
    with pusher._lock:
        prefill = pusher._plan._by_transfer.get(transfer_id)
        known = prefill.reservations if prefill is not None else {}
        parked = pusher._plan._parked.get(transfer_id, {})
    return bool(known or parked)


def cluster_of(engine: Engine, rank: int = 0) -> int:
    """Cluster id of an engine's rank."""
    return int(engine.workers[rank].connector._worker._engine.cluster_id)


def num_blocks_pulled(pair: Pair) -> int:
    """Blocks of all pulls so far, over caches and ranks."""
    return sum(len(call.dst_blocks) for call in pair.network.pulls)


def counts(engine: Engine) -> dict[str, int]:
    """The connector's counters of an engine, with failures as ``failed at <stage>``."""
    snapshots = list(engine.connector_stats)
    rest = engine.connector.get_kv_connector_stats()
    if rest is not None:
        # vLLM before 0.27 does not ask the scheduler side.
        engine.connector_stats.append(rest.data)
        snapshots.append(rest.data)
    total: dict[str, int] = {}
    for snapshot in snapshots:
        failures = {f"failed at {k}": v for k, v in snapshot["failures"].items()}
        for name, amount in (snapshot["counts"] | failures).items():
            total[name] = total.get(name, 0) + amount
    return total
