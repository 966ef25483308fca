"""What the vendor's engine refuses or forbids, one test for each restriction.

Tests of what only our engine allows name one of these (``refused_by_vendor``).
"""

from __future__ import annotations

import inspect
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from contract.cluster import Cluster
from contract.engines import VENDOR_ENGINE, Restriction
from contract.errors import refused, wait_until
from contract.fixtures import MakeLocal, MakePeer
from contract.memory import ALIGNMENT
from contract.peer import Peer

pytestmark = [pytest.mark.parametrize("engine", [VENDOR_ENGINE], indirect=True, ids=["vendor"])]


def is_violation(error: BaseException, words: str) -> bool:
    """The stand-in's word for what the vendor's documentation forbids without a refusal."""
    return type(error).__name__ == "Violation" and words in str(error)


@pytest.fixture
def linked(make_local: MakeLocal, make_peer: MakePeer) -> tuple[Cluster, Peer]:
    peer, local = make_peer(), make_local()
    peer.add_blocks()
    local.add_blocks()
    assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
    return local, peer


@pytest.fixture
def busy(linked: tuple[Cluster, Peer]) -> Iterator[Cluster]:
    """A cluster with a pull under way: its peer is stopped."""
    local, peer = linked
    peer.stop()
    pull = threading.Thread(
        target=local.pull_blocks, args=(local.api.BlocksCacheKey(2), 1, [0], [0])
    )
    pull.start()
    wait_until(lambda: bool(local.datadist._traffic._busy))
    yield local
    peer.resume()
    pull.join()


def test_port_zero(api: Any) -> None:
    datadist = api.LLMDataDist(api.LLMRole.MIX, 1)
    assert not hasattr(datadist, "listen_port")
    with pytest.raises(BaseException) as caught:
        datadist.init({"llm.EnableCacheManager": "1", "llm.listenIpInfo": "127.0.0.1:0"})
    assert is_violation(caught.value, "port 0")


def test_no_sentences(make_local: MakeLocal) -> None:
    local = make_local()
    assert not hasattr(local.datadist, "last_link_error")
    cache = local.add_blocks()
    with refused(local.api, "LLM_NOT_YET_LINK", says="there is no link"):
        local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])


def test_no_extensions(api: Any, make_local: MakeLocal) -> None:
    assert not hasattr(api, "NativeLayerSynchronizer")
    manager = make_local().manager
    assert not hasattr(manager, "open_reservation")
    assert not hasattr(manager, "require_reservations")
    assert not hasattr(manager, "close_reservation")
    calls: list[tuple[Callable[..., Any], str]] = [
        (manager.push_blocks, "token"),
        (manager.transfer_cache_async, "tensor_num_per_layer"),
        (api.TransferWithCacheKeyConfig, "token"),
    ]
    for call, name in calls:
        assert name not in inspect.signature(call).parameters


def test_register_first(linked: tuple[Cluster, Peer]) -> None:
    local, _ = linked
    for register in (local.add_blocks, local.add_rows):
        with pytest.raises(BaseException) as caught:
            register()
        assert is_violation(caught.value, "registered after a link was made")
    assert local.unlink(2).name == "LLM_SUCCESS"
    local.add_blocks()


def test_one_call_per_link(busy: Cluster) -> None:
    key = busy.api.BlocksCacheKey(2)
    for call in (busy.pull_blocks, busy.push_blocks):
        with pytest.raises(BaseException) as caught:
            call(key, 1, [1], [1])
        assert is_violation(caught.value, "beside another call on the link to 2")


def test_idle_finalize(busy: Cluster) -> None:
    for call in (busy.finalize, lambda: busy.unlink(2, force=True)):
        with pytest.raises(BaseException) as caught:
            call()
        assert is_violation(caught.value, "beside")


def test_link_waits_for_ever(make_local: MakeLocal) -> None:
    """It accepts, says nothing for longer than the timeout, and hangs up."""
    local = make_local()
    answers: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        call = threading.Thread(target=lambda: answers.append(local.link(2, port, timeout_ms=1)))
        call.start()
        silent.accept()[0].close()  # the connect, which the timeout bounds
        connection, _ = silent.accept()
        call.join(0.3)
        assert answers == []
        connection.close()
        call.join()
    assert answers[0].name != "LLM_SUCCESS"


def test_address_limit(make_local: MakeLocal) -> None:
    local = make_local()
    first = local.add_blocks(tensors=239)
    with refused(local.api, "LLM_FAILED"):
        local.add_blocks(tensors=2, model_id=1)
    local.add_blocks(tensors=1, model_id=1)
    local.unregister(first)
    local.add_blocks(tensors=239, model_id=2)


def test_aligned_addresses(make_local: MakeLocal) -> None:
    local = make_local()
    desc = local._desc(1, 4, 8, False)
    for register in (local.manager.register_cache, local.manager.register_blocks_cache):
        with refused(local.api, "LLM_FAILED"):
            register(desc, [ALIGNMENT + 4096])
        register(local._desc(1, 4, 8, True), [ALIGNMENT + 4096])


@pytest.mark.parametrize("restriction", Restriction, ids=lambda restriction: restriction.name)
def test_each_restriction_is_shown(engine: str, restriction: Restriction) -> None:
    assert callable(globals()[f"test_{restriction.name.lower()}"])
