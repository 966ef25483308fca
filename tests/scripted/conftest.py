"""Set-up of the scripted tests: a real vLLM, imported without warnings, and engines that end."""

from __future__ import annotations

import importlib.util
import os
import warnings
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

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

HAVE_VLLM = importlib.util.find_spec("vllm") is not None

if HAVE_VLLM:
    with warnings.catch_warnings():
        # torch's own use of torch.jit, met while vLLM imports torch's compiler.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")
        import harness  # noqa: F401
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str:
    """Say which vLLM the scripted tests run on, or that they are left out."""
    if not HAVE_VLLM:
        return "scripted: vLLM is not installed, tests/scripted is left out"
    import vllm

    return f"scripted: vLLM {vllm.__version__} from {Path(vllm.__file__).parent}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this directory as scripted."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.scripted)


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
