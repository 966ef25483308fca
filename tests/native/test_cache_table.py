"""The cache table: ids, bindings, lookups."""

from __future__ import annotations

import pytest

from vllm_llmdd_connector.datadist import LLMStatusCode
from vllm_llmdd_connector.datadist._engine import EngineError, testing

BY_REQUEST, BY_PREFIX, BY_MODEL, BY_ID = range(4)
NONE = 2**64 - 1


@pytest.fixture
def table() -> testing.CacheTable:
    return testing.CacheTable()


def missing(table: testing.CacheTable, *ref: int) -> bool:
    with pytest.raises(EngineError) as caught:
        table.find(*ref)
    return bool(caught.value.args[1] == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)


def test_rows_are_found_by_their_keys(table: testing.CacheTable) -> None:
    cache = table.add([3, 8], False, [4096], [(10, NONE, 0), (NONE, NONE, 0), (5, 20, 1)], None)
    assert table.find(BY_REQUEST, 10, 0, 0) == (cache, 0)
    assert table.find(BY_PREFIX, 20, 1, 0) == (cache, 2)
    assert missing(table, BY_REQUEST, NONE, 0, 0)
    assert missing(table, BY_REQUEST, 5, 1, 0)  # this row's key names a prefix
    assert missing(table, BY_REQUEST, 10, 1, 0)  # another model


def test_equal_request_of_another_model_is_another_row(table: testing.CacheTable) -> None:
    cache = table.add([2, 8], False, [4096], [(10, NONE, 0), (10, NONE, 1)], None)
    assert table.find(BY_REQUEST, 10, 1, 0) == (cache, 1)


def test_first_row_key_and_last_blocks_key_win(table: testing.CacheTable) -> None:
    rows = [table.add([1, 8], False, [4096], [(1, NONE, 0)], None) for _ in range(2)]
    blocks = [table.add([1, 8], True, [4096], [], 7) for _ in range(2)]
    assert table.find(BY_REQUEST, 1, 0, 0) == (rows[0], 0)
    assert table.find(BY_MODEL, 0, 7, 0) == (blocks[1], 0)


def test_removing_an_overwritten_cache_keeps_the_newer_binding(
    table: testing.CacheTable,
) -> None:
    older, newer = (table.add([1, 8], True, [4096], [], 7) for _ in range(2))
    table.remove(older)
    assert table.find(BY_MODEL, 0, 7, 0) == (newer, 0)
    table.remove(newer)
    assert missing(table, BY_MODEL, 0, 7, 0)


def test_rows_by_id(table: testing.CacheTable) -> None:
    cache = table.add([2, 8], False, [4096], [], None)
    assert table.find(BY_ID, cache, 0, 1) == (cache, 1)
    assert missing(table, BY_ID, cache, 0, 2)
    assert missing(table, BY_ID, cache + 1, 0, 0)
    assert missing(table, BY_ID, 2**64 - 1, 0, 0)


def test_refused_cache_uses_up_its_id_and_binds_nothing(table: testing.CacheTable) -> None:
    with pytest.raises(EngineError):
        table.add([1, 8], False, [4096], [(1, NONE, 0), (2, NONE, 0)], None)
    assert missing(table, BY_REQUEST, 1, 0, 0)
    assert table.add([1, 8], False, [4096], [], None) == 2
