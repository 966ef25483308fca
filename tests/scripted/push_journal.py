"""What P's and D's workers said to each other about pushes, checked as it is said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_worker import FakeWorker
from fakes.fake_datadist import FakeDataDist
from fakes.fake_push import Reservation
from harness import Engine

from vllm_llmdd_connector.control.messages import Done, Failed, Reserve, Void


class _Memory:
    """One rank's memory, for the fake network's own checks."""

    def __init__(self, engine: Engine, worker: FakeWorker) -> None:
        self._pool = engine.scheduler.kv_cache_manager.block_pool
        self.engine = engine
        self.worker = worker
        # A worker that has shut down has no connector any more.
        self.plans = worker.connector._worker._plans

    def is_unwritten(self, address: int, length: int) -> bool:
        return self.worker.is_unwritten(address, length)

    def is_free(self, block: int) -> bool:
        return not self._pool.blocks[block].ref_cnt


class PushJournal:
    """Records every ``Reserve`` of D and every answer of P.

    When P says ``Done``, D's blocks have to hold the KV of the transfer's prompt, whatever has
    become of P's own blocks. The reservation is still open then, so nobody else writes there.
    """

    def __init__(self, network: FakeDataDist) -> None:
        self._network = network
        self.prompts: dict[str, list[int]] = {}
        """By transfer id."""
        self.reserves: list[Reserve] = []
        self.dones: list[Done] = []
        self.voids: list[Void] = []
        self.failures: list[Failed] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Look on while the messages are made."""
        receive, push = (f"vllm_llmdd_connector.worker.{name}" for name in ("receive", "push"))
        monkeypatch.setattr(f"{receive}.Reserve", self._reserve)
        monkeypatch.setattr(f"{push}.Done", self._done)
        monkeypatch.setattr(f"{push}.Void", self._void)
        monkeypatch.setattr(f"{push}.Failed", self._failed)

    def watch(self, *engines: Engine) -> None:
        """Have the network look at these engines' memory."""
        for engine in engines:
            for worker in engine.workers:
                cluster_id = worker.connector._worker._engine.cluster_id
                self._network.watches[cluster_id] = _Memory(engine, worker)

    def num_copies(self, transfer_id: str) -> int:
        """Layers, over chunks and caches, that have arrived for a transfer."""
        tokens = {
            token.token
            for reserve in self.reserves
            if reserve.transfer_id == transfer_id
            for token in reserve.tokens
        }
        return sum(copy.call.token in tokens for copy in list(self._network.layer_copies))

    def _reserve(self, **fields: Any) -> Reserve:
        reserve = Reserve(**fields)
        self.reserves.append(reserve)
        return reserve

    def _void(self, **fields: Any) -> Void:
        void = Void(**fields)
        self.voids.append(void)
        return void

    def _failed(self, **fields: Any) -> Failed:
        failed = Failed(**fields)
        self.failures.append(failed)
        return failed

    def _done(self, **fields: Any) -> Done:
        done = Done(**fields)
        self.dones.append(done)
        reserve = next(r for r in self.reserves if r.reservation == done.reservation)
        for cache in reserve.tokens:
            self._network.violations += self._network.early_copies.pop(cache.token, [])
            self._check(done, reserve, self._network.reservations[cache.token])
        return done

    def _check(self, done: Done, reserve: Reserve, reservation: Reservation) -> None:
        memory = self._network.watches[reservation.cluster_id]
        assert isinstance(memory, _Memory)
        worker = memory.worker
        plan = memory.plans[reservation.model_id]
        first = reserve.spans[plan.group_index].first
        # D asks for all tokens but the last, which it computes in any case.
        tokens = self.prompts[done.transfer_id][:-1]
        names = memory.engine.spec.layer_names()
        layers = [names.index(name) for region in plan.regions for name in region.layers]
        with reservation.lock:
            if not reservation.is_open:
                return
            for layer in layers:
                for position, block in enumerate(reservation.blocks):
                    right = memory.engine.expected_block(
                        layer, tokens, first + position, worker.rank
                    )
                    found = worker.block_words(layer, block)[:, : right.shape[1]]
                    if not np.array_equal(found, right):
                        self._network.violations.append(
                            f"{done.transfer_id}: done, but wrong in layer {layer}, "
                            f"position {first + position}"
                        )
