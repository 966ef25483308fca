"""Keys between whole engines: with one set everything works as without, with two nothing moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pairs import MakePair, counts, prompt_of

from vllm_llmdd_connector.control.keys import make_key_set


def keyed(folder: Path) -> dict[str, Any]:
    if not folder.exists():
        make_key_set(folder)
    return {"extra_config": {"keys_dir": str(folder)}}


@pytest.mark.parametrize("tp_size", [1, 2])
def test_pull_and_push_with_one_set(make_pair: MakePair, tmp_path: Path, tp_size: int) -> None:
    options = keyed(tmp_path / "keys")
    pair = make_pair(p=options, d=options, tp_size=tp_size)
    prompt = prompt_of(100)
    request_id = pair.decode(prompt, pair.params(prompt))
    assert pair.is_right(prompt, pair.run(request_id)[0])
    assert len(pair.network.pulls) == tp_size
    pushed = prompt_of(90)
    request_id = pair.push_after_announcement(pushed)
    assert pair.is_right(pushed, pair.run(request_id)[0])
    assert len(pair.journal.dones) == tp_size
    pair.finish()


@pytest.mark.parametrize("d_keys", ["other", ""], ids=["another set", "no keys"])
def test_d_of_another_set_prefills_itself(make_pair: MakePair, tmp_path: Path, d_keys: str) -> None:
    d = keyed(tmp_path / d_keys) if d_keys else {}
    pair = make_pair(p=keyed(tmp_path / "keys"), d=d)
    prompt = prompt_of(100)
    request_id = pair.decode(prompt, pair.params(prompt))
    assert pair.is_right(prompt, pair.run(request_id)[0])
    assert pair.network.pulls == []
    assert counts(pair.d)["failed at connection"] == 1
