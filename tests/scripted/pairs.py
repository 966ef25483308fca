"""A prefill engine and a decode engine with the project's connector, in one process.

The connector is complete, with its sockets and threads; only the LLM-DataDist engine under it is
the fake one, which copies between the two engines' tensors and fails on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fakes.clock import FakeClock
from fakes.fake_datadist import FakeDataDist
from harness import Engine, Result, run_until

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
