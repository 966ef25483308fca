"""The engines that the suite runs on, and what keeps some tests from running on the vendor's.

The vendor's engine is a stand-in: ours under the vendor's name and with its restrictions
(``fakes.strict_vendor``), found as the connector finds it.
"""

from __future__ import annotations

import importlib
import os
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from vllm_llmdd_connector.datadist import ascend

__all__ = [
    "HOST_ENGINE",
    "TESTS_PATH",
    "VENDOR_ENGINE",
    "VENDOR_PATH",
    "Restriction",
    "import_engine",
    "is_vendor",
    "message_mode",
    "refused_by_vendor",
    "remote_mode",
]

HOST_ENGINE = "vllm_llmdd_connector.datadist"
VENDOR_ENGINE = "llm_datadist"
TESTS_PATH = str(Path(__file__).resolve().parents[1])
VENDOR_PATH = os.path.join(TESTS_PATH, "vendor")


class Restriction(Enum):
    """What the vendor's engine refuses or forbids. ``test_vendor_restrictions`` shows each."""

    PORT_ZERO = "the port to listen on must be named, and no attribute tells it"
    NO_SENTENCES = "there is no last_link_error, and a refusal says nothing but a code"
    NO_EXTENSIONS = "no reservations, native synchronizer or layers of other than two tensors"
    REGISTER_FIRST = "memory must be registered before a link is made"
    ONE_CALL_PER_LINK = "two calls on one link, or two pushes of a process, must not overlap"
    IDLE_FINALIZE = "finalize and unlink must not run beside another call"
    LINK_WAITS_FOR_EVER = "the timeout of link_clusters ends with the connect"
    ADDRESS_LIMIT = "a process registers 240 addresses at most"
    ALIGNED_ADDRESSES = "device addresses are multiples of 2 MiB"


def refused_by_vendor(restriction: Restriction) -> pytest.MarkDecorator:
    """A test of what only our engine allows: on the vendor's, the restriction is tested instead."""
    return pytest.mark.refused_by_vendor(restriction)


message_mode = pytest.mark.parametrize("remote", [False], indirect=True, ids=["message"])
remote_mode = pytest.mark.parametrize("remote", [True], indirect=True, ids=["remote"])


def import_engine(name: str) -> Any:
    """The module of an engine; the vendor's through the connector's own import."""
    return ascend.load_vendor() if name == VENDOR_ENGINE else importlib.import_module(name)


def is_vendor(api: Any) -> bool:
    return bool(api.__name__ == VENDOR_ENGINE)
