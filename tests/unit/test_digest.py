"""``DigestLog``: lines that let P's and D's blocks be compared one by one."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest

from vllm_llmdd_connector.layout.kv_layout import CachePlan, Region
from vllm_llmdd_connector.worker.digest import DigestLog

NUM_BLOCKS, BLOCK_LEN = 4, 64


class Cache:
    """Two layers in memory of the test's own."""

    def __init__(self) -> None:
        size = NUM_BLOCKS * BLOCK_LEN
        data = [bytes((i * 7 + layer) % 251 for i in range(size)) for layer in range(2)]
        self.memory = [ctypes.create_string_buffer(raw, size) for raw in data]
        self.plan = CachePlan(
            0,
            0,
            NUM_BLOCKS,
            BLOCK_LEN,
            tuple(
                Region(f"layer{i}", ctypes.addressof(buffer), BLOCK_LEN)
                for i, buffer in enumerate(self.memory)
            ),
        )


@pytest.fixture
def cache() -> Cache:
    return Cache()


def lines(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.iterdir()
    return [json.loads(line) for line in path.read_text().splitlines()]


def digests(folder: Path) -> dict[str, list[str]]:
    return {line["layer"]: line["digests"] for line in lines(folder)}


def test_one_line_a_layer_names_request_side_rank_and_place(tmp_path: Path, cache: Cache) -> None:
    DigestLog(str(tmp_path / "new"), "kv_consumer", 3).write(
        "recv", "d", "p", cache.plan, 2, [3, 1]
    )
    first, second = lines(tmp_path / "new")
    assert (first["layer"], second["layer"]) == ("layer0", "layer1")
    assert first["request_id"] == "d"
    assert first["transfer_id"] == "p"
    assert (first["side"], first["rank"], first["first_block"]) == ("recv", 3, 2)
    assert len(first["digests"]) == 2


def test_flipped_byte_changes_exactly_the_digest_of_its_block(tmp_path: Path, cache: Cache) -> None:
    for name in ("before", "after"):
        DigestLog(str(tmp_path / name), "r", 0).write("send", "p", "p", cache.plan, 0, [0, 1, 2, 3])
        byte = cache.memory[1][2 * BLOCK_LEN + 5]
        cache.memory[1][2 * BLOCK_LEN + 5] = bytes([byte[0] ^ 1])
    before, after = digests(tmp_path / "before"), digests(tmp_path / "after")
    assert before["layer0"] == after["layer0"]
    changed = [old != new for old, new in zip(before["layer1"], after["layer1"], strict=True)]
    assert changed == [False, False, True, False]


def test_equal_bytes_at_other_blocks_have_equal_digests(tmp_path: Path, cache: Cache) -> None:
    other = Cache()
    ctypes.memmove(other.memory[0], ctypes.byref(cache.memory[0], 3 * BLOCK_LEN), BLOCK_LEN)
    DigestLog(str(tmp_path / "p"), "p", 0).write("send", "p", "p", cache.plan, 0, [3])
    DigestLog(str(tmp_path / "d"), "d", 0).write("recv", "d", "p", other.plan, 0, [0])
    assert digests(tmp_path / "p")["layer0"] == digests(tmp_path / "d")["layer0"]
    assert digests(tmp_path / "p")["layer1"] != digests(tmp_path / "d")["layer1"]


def test_requests_are_appended_to_one_file(tmp_path: Path, cache: Cache) -> None:
    log = DigestLog(str(tmp_path), "r", 0)
    for name in ("first", "second"):
        log.write("send", name, name, cache.plan, 0, [0])
    assert [line["request_id"] for line in lines(tmp_path)] == ["first"] * 2 + ["second"] * 2
