"""Puts a stand-in where the connector's workers look for the LLM-DataDist API."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.fake_datadist import FakeDataDist

VENDOR_PATH = str(Path(__file__).resolve().parents[1] / "vendor")


def install_fake_datadist(monkeypatch: pytest.MonkeyPatch) -> FakeDataDist:
    """Every engine started from here on, in this process, is on the returned network.

    Undone with the test's ``monkeypatch``. Only the host engine is replaced, not the vendor's.
    """
    network = FakeDataDist()
    monkeypatch.setattr("vllm_llmdd_connector.worker.backend.load_api", lambda name: network.api)
    return network


@contextlib.contextmanager
def vendor_importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``import llm_datadist`` finds the strict stand-in, and imports it anew."""
    monkeypatch.syspath_prepend(VENDOR_PATH)
    _forget_vendor()
    yield
    _forget_vendor()


def _forget_vendor() -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == "llm_datadist" or name.startswith("fakes.strict_"):
            del sys.modules[name]
