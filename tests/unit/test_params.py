"""``kv_transfer_params``: written by any client, so believed in no field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.builders import decode_params, make_ticket
from fakes.requests import make_request
from hypothesis import given
from hypothesis import strategies as st

from vllm_llmdd_connector.errors import RemoteProtocolError
from vllm_llmdd_connector.params import (
    MAX_TEXT,
    prompt_hash,
    read_ticket,
    request_prompt_hash,
    wants_remote_decode,
    wants_remote_prefill,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


class TestRoundTrip:
    def test_p_s_response_is_d_s_ticket(self) -> None:
        ticket = make_ticket()
        assert read_ticket(decode_params(ticket)) == ticket

    def test_response_survives_json_and_a_router_that_makes_floats_of_integers(self) -> None:
        params = json.loads(json.dumps(decode_params()), parse_int=float)
        assert read_ticket(params) == make_ticket()

    def test_digit_strings_are_integers(self) -> None:
        params = decode_params()
        params["remote_port"] = "4000"
        assert read_ticket(params) == make_ticket()

    def test_keys_that_proxies_know_are_there(self) -> None:
        keys = set(decode_params())
        assert keys >= {
            "do_remote_prefill",
            "do_remote_decode",
            "remote_block_ids",
            "remote_engine_id",
            "remote_host",
            "remote_port",
        }

    def test_unknown_keys_and_nulls_beside_ours_are_ignored(self) -> None:
        params = {**decode_params(), "remote_engine_id": None, "remote_tp_size": "2", "x": [1]}
        assert read_ticket(params) == make_ticket()


class TestRefusal:
    @pytest.mark.parametrize("inner", [None, "text", [], 7])
    def test_params_of_another_connector_are_refused_with_what_to_do(self, inner: Any) -> None:
        with pytest.raises(RemoteProtocolError, match="hand on the prefill server's unchanged"):
            read_ticket({**decode_params(), "llmdd": inner})

    def test_other_version_is_refused_with_both(self) -> None:
        params = decode_params()
        params["llmdd"]["v"] = 2
        with pytest.raises(RemoteProtocolError, match="is 2, this server speaks 1"):
            read_ticket(params)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("remote_port", 0),
            ("remote_port", 65536),
            ("remote_port", True),
            ("remote_port", 80.5),
            ("remote_port", float("inf")),
            ("remote_port", "9" * 30),
            ("remote_port", "\uff14\uff10"),
            ("remote_port", None),
            ("remote_host", ""),
            ("remote_host", 7),
            ("remote_host", "h" * (MAX_TEXT + 1)),
            ("remote_host", "127.0.0.1\nERROR forged log line"),
            ("production", 0),
            ("production", 2**53 + 1),
            ("num_tokens", -1),
            ("secret", None),
            ("secret", "\ud800"),
            ("instance", ["x"]),
            ("prompt_hash", b"raw"),
        ],
    )
    def test_malformed_field_is_refused_by_name(self, key: str, value: Any) -> None:
        params = decode_params()
        where = params if key.startswith("remote") else params["llmdd"]
        where[key] = value
        with pytest.raises(RemoteProtocolError, match=repr(key)) as caught:
            read_ticket(params)
        assert len(str(caught.value)) < 300
        assert "\n" not in str(caught.value)

    @given(data=st.data())
    def test_arbitrary_json_is_a_ticket_or_a_protocol_error(self, data: st.DataObject) -> None:
        params = decode_params()
        for _ in range(data.draw(st.integers(1, 3))):
            where = params if data.draw(st.booleans()) else params.get("llmdd")
            if isinstance(where, dict) and where:
                where[data.draw(st.sampled_from(sorted(where)))] = data.draw(json_values)
        try:
            ticket = read_ticket(params)
        except RemoteProtocolError:
            return
        assert 1 <= ticket.port <= 65535
        json.dumps(ticket.secret).encode()


class TestLegs:
    @pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": None}, [], "x"])
    def test_plain_requests_are_neither_leg(self, params: Any) -> None:
        assert not wants_remote_decode(params)
        assert not wants_remote_prefill(params)

    def test_truthy_is_not_true(self) -> None:
        assert not wants_remote_decode({"do_remote_decode": 1})
        assert not wants_remote_prefill({"do_remote_prefill": "false"})


class TestPromptHash:
    def test_tokens_adapter_and_media_all_count(self) -> None:
        hashes = {
            prompt_hash([1, 2], None, ()),
            prompt_hash([2, 1], None, ()),
            prompt_hash([1, 2, 0], None, ()),
            prompt_hash([1, 2], "adapter", ()),
            prompt_hash([1, 2], None, ("image",)),
            prompt_hash([1, 2], None, ("im", "age")),
            prompt_hash([1, 2], "im", ("age",)),
        }
        assert len(hashes) == 7

    def test_same_request_on_both_sides_has_the_same_hash(self) -> None:
        first = request_prompt_hash(make_request("p", [1, 2, 3], lora_name="a"))
        second = request_prompt_hash(make_request("d", [1, 2, 3], lora_name="a"))
        assert first == second == prompt_hash([1, 2, 3], "a", ())

    def test_place_of_an_image_counts(self) -> None:
        near = request_prompt_hash(make_request("p", [1, 2, 3], media=[("image", "x", 0, 2)]))
        far = request_prompt_hash(make_request("p", [1, 2, 3], media=[("image", "x", 1, 2)]))
        assert near != far

    def test_prompt_of_embeddings_has_no_hash(self) -> None:
        assert request_prompt_hash(make_request("p", None)) is None
        assert request_prompt_hash(make_request("p", [1], prompt_embeds=object())) is None
