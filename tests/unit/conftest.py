"""Set-up of the unit tests: vLLM's base classes, imported without vLLM's and torch's complaints,
and the two ends of P that a D's peer thread talks to."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest
from fakes.pull_peer import ReleasePeer
from fakes.worker_peer import WorkerPeer

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

with warnings.catch_warnings():
    # torch's own use of torch.jit, met while vLLM imports torch's compiler.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")
    import vllm_llmdd_connector.connector  # noqa: F401


@pytest.fixture
def scheduler() -> Iterator[ReleasePeer]:
    """P's scheduler."""
    peer = ReleasePeer()
    yield peer
    peer.close()


@pytest.fixture
def worker() -> Iterator[WorkerPeer]:
    """P's rank."""
    peer = WorkerPeer()
    yield peer
    peer.close()
