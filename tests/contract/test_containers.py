"""Peers on one host that do not see each other's files, like two containers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.engines import Restriction, refused_by_vendor
from contract.errors import explains
from contract.fixtures import MakeLocal
from contract.memory import block_pieces, moved
from contract.nixl_pair import needs_nixl
from contract.peer import Peer
from vllm_llmdd_connector.datadist import settings

pytestmark = [
    pytest.mark.within_a_host,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None,
        reason="needs root and unshare(1) for a mount namespace",
    ),
    refused_by_vendor(Restriction.NO_EXTENSIONS),
]

HIDE = 'mount -t tmpfs none "$0" && exec "$@"'
"""Puts another directory in the place of the one that is named first."""


@pytest.fixture
def hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Peer]:
    """Cluster 2, whose sockets are in a directory that only its own process sees."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    peer = Peer("unshare", "--mount", "sh", "-c", HIDE, str(tmp_path))
    try:
        peer.create(2, transport=getattr(request, "param", "auto"))
        yield peer
        peer.release()
    finally:
        peer.close()


@needs_nixl
def test_auto_takes_nixl(hidden: Peer, make_local: MakeLocal) -> None:
    local = make_local(1, transport="auto")
    assert local.link(2, hidden.listen_port).name == "LLM_SUCCESS", local.link_error(2)
    source, cache = hidden.add_blocks(seed=100), local.add_blocks()
    before, content = local.dump(cache), hidden.dump(source)
    local.pull_blocks(local.api.BlocksCacheKey(2), cache, [3, 4], [8, 1])
    assert local.dump(cache) == moved(before, content, block_pieces([3, 4], [8, 1], 64))
    assert "r--s" not in local.shared_pages()
    assert not local.link_error(2)


@needs_nixl
@pytest.mark.parametrize("hidden", ["cma"], indirect=True)
def test_a_peer_that_insists_on_cma_is_refused(hidden: Peer, make_local: MakeLocal) -> None:
    local = make_local(1, transport="auto")
    assert local.link(2, hidden.listen_port).name == "LLM_LINK_FAILED"
    assert explains(local, 2, "name it in TMPDIR")


def test_without_nixl_the_sentence_names_the_directory(
    hidden: Peer, make_local: MakeLocal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "find_nixl_library", lambda: "")
    local = make_local(1, transport="auto")
    assert local.link(2, hidden.listen_port).name == "LLM_LINK_FAILED"
    assert explains(local, 2, "name it in TMPDIR")
