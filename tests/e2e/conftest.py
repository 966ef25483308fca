"""Real servers for the tests of this folder; they are started once per folder and pair."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
sys.path.insert(0, str(ROOT / "examples" / "disaggregated_prefill"))
sys.path.insert(0, str(Path(__file__).parent))

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

from flow import Pair, connector_config  # noqa: E402
from servers import Servers, ServerSpec  # noqa: E402

START_TIMEOUT_S = 400


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything here, and give it time: the first test of a pair starts two servers."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(START_TIMEOUT_S + 200))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show what the servers had to say when a test fails; their logs are gone afterwards."""
    report = yield
    servers = getattr(item, "funcargs", {}).get("servers")
    pair = getattr(item, "funcargs", {}).get("pair")
    if report.failed and (servers or pair):
        folder = (servers.running[0] if servers else pair.prefill_server).log.parent
        for log in sorted(folder.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()
            telling = [line for line in lines if "WARNING" in line or "ERROR" in line]
            report.sections.append((f"{log.name}, end", "\n".join(telling[-15:])))
    return report


@pytest.fixture(scope="session")
def model() -> Path:
    """SmolLM2-135M-Instruct, made by ``make test``'s set-up."""
    assert MODEL.is_dir(), f"{MODEL} is missing; run `make test`, which builds it"
    return MODEL


@pytest.fixture(scope="session")
def tiny_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that loads in a second."""
    from tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny-llama", model)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The servers of one test file, stopped at its end whatever happens."""
    with Servers(tmp_path_factory.mktemp("logs")) as running:
        yield running


@pytest.fixture(scope="module")
def start_pair(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """Start a P and a D of one model, with options for each side."""

    def start(
        model: Path,
        arguments: tuple[str, ...] = (),
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        prefill_arguments: tuple[str, ...] = (),
        decode_arguments: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
    ) -> Pair:
        digest_dir = tmp_path_factory.mktemp("digests")
        specs = [
            ServerSpec(
                name,
                model,
                connector_config(role, kv_digest=str(digest_dir), **(options or {})),
                arguments=(*arguments, *own),
                environment=environment or {},
            )
            for name, role, options, own in (
                ("prefill", "kv_producer", prefill, prefill_arguments),
                ("decode", "kv_consumer", decode, decode_arguments),
            )
        ]
        started = [servers.start(spec) for spec in specs]
        servers.wait_ready(START_TIMEOUT_S)
        return Pair(started[0], started[1], digest_dir)

    return start


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Poll a condition of another process; fail with ``what`` when it does not come."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.05)
