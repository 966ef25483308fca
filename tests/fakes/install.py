"""Puts a ``FakeDataDist`` where the connector's workers look for the LLM-DataDist API."""

from __future__ import annotations

import pytest

from fakes.fake_datadist import FakeDataDist


def install_fake_datadist(monkeypatch: pytest.MonkeyPatch) -> FakeDataDist:
    """Every engine started from here on, in this process, is on the returned network.

    Undone with the test's ``monkeypatch``. Only the host engine is replaced, not the vendor's.
    """
    network = FakeDataDist()
    monkeypatch.setattr("vllm_llmdd_connector.worker.backend.load_api", lambda name: network.api)
    return network
