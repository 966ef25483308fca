"""Fixtures for every kind of test; pytest puts this directory on the import path, for ``fakes``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.clock import FakeClock
from fakes.fake_datadist import FakeDataDist
from fakes.install import install_fake_datadist
from hypothesis import settings

# No test depends on how fast this machine is. In CI hypothesis is deterministic by itself.
settings.register_profile("llmdd", deadline=None)
settings.load_profile("llmdd")


_SERVERS = (Path(__file__).parent / "e2e", Path(__file__).parent / "example" / "test_demo.py")


def _starts_servers(file: Path) -> bool:
    return any(path in (file, *file.parents) for path in _SERVERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real servers come last."""
    items.sort(key=lambda item: _starts_servers(item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Where tests run side by side (``pytest -n``) those of a file stay together, and real servers
    are started for one file at a time, so that they have memory and processors for themselves."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "servers" if _starts_servers(config.rootpath / file) else file

    return Files(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--transport", help="transport of the engine in the contract suite; nixl skips the vendor's"
    )


@pytest.fixture
def clock() -> FakeClock:
    """A clock that moves only when the test says so."""
    return FakeClock()


@pytest.fixture
def datadist(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDataDist]:
    """The fake LLM-DataDist network, installed; at the end nothing forbidden may have happened."""
    network = install_fake_datadist(monkeypatch)
    yield network
    assert network.violations == []


@pytest.fixture
def log() -> Iterator[list[str]]:
    """The connector's warnings and errors, whatever this vLLM does with them."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, collector = logging.getLogger("vllm.vllm_llmdd_connector"), Collector()
    level = logger.level
    logger.addHandler(collector)
    logger.setLevel(logging.WARNING)
    yield lines
    logger.setLevel(level)
    logger.removeHandler(collector)
