"""The params of the decode-first flow: what D posts, and how P finds its own among several."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_llmdd_connector.errors import RemoteProtocolError
from vllm_llmdd_connector.params import (
    caller_of,
    child_params,
    external_id,
    is_child,
    metaserver_of,
    metaserver_post,
    wants_remote_decode,
    wants_remote_prefill,
)

POST = metaserver_post(
    "cmpl-6f-0-0123abcd", "t" * 32, "engine-of-d", ("10.0.0.2", 7200), [16, 128], 4
)


CHILDREN = {"cmpl-6f-0": {"a": 0}, "cmpl-6f-1": {"a": 1}, "cmpl-6f-11": {"a": 11}}


class TestPost:
    def test_keys_are_those_of_layer_wise_proxies_and_a_transfer_id(self) -> None:
        assert json.loads(json.dumps(POST)) == {
            "token_ids": [],
            "request_id": "cmpl-6f-0",
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": [[], []],
            "remote_block_size": [16, 128],
            "remote_engine_id": "engine-of-d",
            "remote_host": "10.0.0.2",
            "remote_port": 7200,
            "remote_tp_size": 4,
            "remote_pcp_size": 1,
            "remote_dcp_size": 1,
            "remote_cached_tokens": 0,
            "transfer_id": "t" * 32,
            "llmdd": {"v": 1},
        }

    def test_it_is_a_prefill_leg_that_names_its_d(self) -> None:
        params = json.loads(json.dumps(POST), parse_int=float)
        assert wants_remote_decode(params)
        assert not wants_remote_prefill(params)
        assert caller_of(params) == ("10.0.0.2", 7200)


class TestIds:
    @pytest.mark.parametrize(
        ("internal", "external"),
        [
            ("cmpl-6f-0-0123abcd", "cmpl-6f-0"),
            ("chatcmpl-6f-deadbeef", "chatcmpl-6f"),
            ("cmpl-6f-0", "cmpl-6f-0"),
            ("cmpl-6f-0-0123ABCD", "cmpl-6f-0-0123ABCD"),
            ("-0123abcd", ""),
        ],
    )
    def test_the_random_suffix_is_cut_off_and_nothing_else(
        self, internal: str, external: str
    ) -> None:
        assert external_id(internal) == external

    @pytest.mark.parametrize(
        ("request_id", "expected"),
        [("0_cmpl-6f-0-0123abcd", True), ("12_x", True), ("cmpl-6f-0", False), ("_x", False)],
    )
    def test_a_choice_is_told_from_a_request(self, request_id: str, expected: bool) -> None:
        assert is_child(request_id) is expected


class TestMetaserver:
    @pytest.mark.parametrize("params", [{}, {"metaserver": None}, {"metaserver": "u", "llmdd": {}}])
    def test_there_is_none_in_other_flows(self, params: dict[str, Any]) -> None:
        assert metaserver_of(params) is None

    @pytest.mark.parametrize("url", [7, "", [], "http://a\nb"])
    def test_one_that_is_no_text_is_refused(self, url: object) -> None:
        with pytest.raises(RemoteProtocolError, match="'metaserver'"):
            metaserver_of({"metaserver": url})


class TestChildParams:
    def test_one_prompt_has_its_params_at_the_top(self) -> None:
        assert child_params({"a": 7}, "cmpl-6f-0-0123abcd") == {"a": 7}

    @pytest.mark.parametrize("number", [0, 1, 11])
    def test_own_id_comes_first(self, number: int) -> None:
        params = {"a": 0, "batch_kv_transfer_params": CHILDREN}
        assert child_params(params, f"cmpl-6f-{number}-0123abcd") == {"a": number}

    @pytest.mark.parametrize("number", [0, 1, 11])
    def test_the_prompts_number_decides_where_the_proxy_gave_p_another_id(
        self, number: int
    ) -> None:
        params = {"batch_kv_transfer_params": CHILDREN}
        assert child_params(params, f"cmpl-other-{number}-0123abcd") == {"a": number}

    @pytest.mark.parametrize(
        "children",
        [{}, {"cmpl-6f-1": {}}, {"cmpl-6f-0": None}, [], "x", {"a-0": {}, "b-0": {}}],
    )
    def test_a_prompt_that_no_d_asked_for_is_refused(self, children: object) -> None:
        with pytest.raises(RemoteProtocolError, match="no D has asked for this prompt"):
            child_params({"batch_kv_transfer_params": children}, "cmpl-6f-0-0123abcd")
