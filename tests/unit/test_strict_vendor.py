"""The stand-in for the vendor's package refuses what the vendor refuses, and what it forbids."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm_llmdd_connector.datadist", exc_type=ImportError)
from fakes import strict_vendor as api
from fakes.strict_managers import ALIGNMENT
from fakes.strict_vendor import LLMDataDist, Violation

BLOCKS, BLOCK = 4, 16


@pytest.fixture
def datadist() -> Iterator[LLMDataDist]:
    options = api.LLMConfig()
    options.enable_cache_manager = options.enable_remote_cache_accessible = True
    made = LLMDataDist(api.LLMRole.MIX, 1)
    made.init(options.generate_options())
    yield made
    made.finalize()


@pytest.fixture
def register(datadist: LLMDataDist) -> Callable[..., Any]:
    memory = ctypes.create_string_buffer(BLOCKS * BLOCK)

    def call(count: int = 1, placement: Any = api.Placement.HOST) -> Any:
        desc = api.CacheDesc(count, [BLOCKS, BLOCK], api.DataType.DT_UINT8, placement)
        return datadist.cache_manager.register_blocks_cache(
            desc, [ctypes.addressof(memory)] * count, api.BlocksCacheKey(1), True
        )

    return call


def refused(call: Callable[[], object], code: str) -> None:
    with pytest.raises(api.LLMException, match=r"^\[\w+\] failed, error code is \S+$") as caught:
        call()
    assert caught.value.status_code is api.LLMStatusCode[code]


def test_our_extensions_are_missing(datadist: LLMDataDist) -> None:
    for name in ("listen_port", "last_link_error", "_require"):
        assert not hasattr(datadist, name)
    other = LLMDataDist(api.LLMRole.MIX, 2)
    with pytest.raises(Violation, match="port 0"):
        other.init({"llm.EnableCacheManager": "1", "llm.listenIpInfo": "127.0.0.1:0"})


def test_addresses_are_limited_in_number_and_alignment(register: Callable[..., Any]) -> None:
    register(240)
    refused(register, "LLM_FAILED")


def test_device_addresses_must_be_aligned(register: Callable[..., Any]) -> None:
    refused(lambda: register(1, api.Placement.DEVICE), "LLM_FAILED")


def test_reasons_are_hidden_unknown_options_ignored_none_an_attribute_error(
    datadist: LLMDataDist, register: Callable[..., Any]
) -> None:
    cache, manager = register(), datadist.cache_manager
    key = api.BlocksCacheKey(9)
    refused(lambda: manager.pull_blocks(key, cache, [0], [0], wrong=1), "LLM_NOT_YET_LINK")
    for arguments in ((None, cache), (key, None)):
        with pytest.raises(AttributeError):
            manager.pull_blocks(*arguments, [0], [0])  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        manager.pull_blocks(key, cache, ["0"], [0])  # type: ignore[list-item]


def test_memory_registered_after_a_link_is_a_violation(
    datadist: LLMDataDist, register: Callable[..., Any]
) -> None:
    datadist._traffic.linked.add(9)
    with pytest.raises(Violation, match="registered after a link"):
        register()


def test_calls_that_must_not_overlap_are_violations(
    datadist: LLMDataDist, register: Callable[..., Any]
) -> None:
    cache, manager, traffic = register(), datadist.cache_manager, datadist._traffic
    key = api.BlocksCacheKey(9)
    with traffic.on_link("push", 9, push=True):
        with pytest.raises(Violation, match="pull beside another call on the link to 9"):
            manager.pull_blocks(key, cache, [0], [0])
        with pytest.raises(Violation, match="push beside another transfer"):
            manager.push_blocks(api.BlocksCacheKey(8), cache, [0], [0])
        with pytest.raises(Violation, match=r"finalize beside calls on links \[9\]"):
            datadist.finalize()
        refused(
            lambda: manager.pull_blocks(api.BlocksCacheKey(8), cache, [0], [0]), "LLM_NOT_YET_LINK"
        )


def test_layer_wise_transfer_uses_its_link_until_its_end(datadist: LLMDataDist) -> None:
    memory = ctypes.create_string_buffer(2 * ALIGNMENT + BLOCKS * BLOCK)
    address = -(-ctypes.addressof(memory) // ALIGNMENT) * ALIGNMENT
    manager, entered, go_on = datadist.cache_manager, threading.Event(), threading.Event()
    cache = manager.register_blocks_cache(
        api.CacheDesc(2, [BLOCKS, BLOCK], api.DataType.DT_UINT8, api.Placement.DEVICE),
        [address, address],
        api.BlocksCacheKey(1),
        True,
    )

    class Held(api.LayerSynchronizer):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            entered.set()
            return not go_on.wait(20)

    def transfer(cluster_id: int) -> Any:
        key = api.BlocksCacheKey(cluster_id)
        config = api.TransferWithCacheKeyConfig(key, range(1), range(1))
        return manager.transfer_cache_async(cache, Held(), [config], [0], [0])

    task = transfer(9)
    assert entered.wait(20)
    with pytest.raises(Violation, match="pull beside another call on the link to 9"):
        manager.pull_blocks(api.BlocksCacheKey(9), cache, [0], [0])
    with pytest.raises(Violation, match="transfer_cache_async beside another transfer"):
        transfer(8)
    with pytest.raises(Violation, match="push beside another transfer"):
        manager.push_blocks(api.BlocksCacheKey(8), cache, [0], [0])
    with pytest.raises(Violation, match=r"finalize beside calls on links \[9\]"):
        datadist.finalize()
    go_on.set()
    assert task.synchronize().name == "LLM_PARAM_INVALID"
    refused(lambda: manager.pull_blocks(api.BlocksCacheKey(9), cache, [0], [0]), "LLM_NOT_YET_LINK")
