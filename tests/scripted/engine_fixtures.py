"""Fixtures of engines and pairs, for every folder that drives scripted engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from fakes.clock import FakeClock

if TYPE_CHECKING:
    from fakes.fake_datadist import FakeDataDist
    from harness import Engine
    from pairs import Pair

__all__ = ["make_engine", "make_pair"]


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Build engines from ``EngineSpec`` fields; they are closed at the end of the test."""
    from harness import Engine, EngineSpec

    engines: list[Engine] = []

    def make(**fields: Any) -> Engine:
        engine = Engine(EngineSpec(**fields), tmp_path)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def make_pair(
    datadist: FakeDataDist,
    make_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Pair]:
    """Build P and D from common ``EngineSpec`` fields, and from ``p`` and ``d`` for one of them.

    D's scheduler side lives in real time unless it is given a clock.
    """
    from pairs import CONNECTOR, Pair
    from push_journal import PushJournal

    scheduler_time = "vllm_llmdd_connector.scheduler.scheduler.time"

    def make(
        p: dict[str, Any] | None = None,
        d: dict[str, Any] | None = None,
        d_clock: FakeClock | None = None,
        **fields: Any,
    ) -> Pair:
        clock = FakeClock()
        journal = PushJournal(datadist)
        journal.install(monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(scheduler_time, SimpleNamespace(monotonic=clock))
            producer = make_engine(**CONNECTOR | {"role": "kv_producer"} | fields | (p or {}))
        with monkeypatch.context() as patch:
            if d_clock is not None:
                patch.setattr(scheduler_time, SimpleNamespace(monotonic=d_clock))
            consumer = make_engine(**CONNECTOR | {"role": "kv_consumer"} | fields | (d or {}))
        journal.watch(producer, consumer)
        return Pair(producer, consumer, datadist, clock, journal)

    return make
