"""What P and D are sent, as pure functions of the client's body."""

from __future__ import annotations

from typing import Any

import pytest
from bodies import (
    ask_for_prefill_at,
    ask_push,
    decode_body,
    expect_push,
    prefill_body,
    reason_to_pull,
    reason_to_skip_prefill,
    without_client_params,
)

NULLS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class TestPrefillBody:
    def test_completion_becomes_one_token_without_stream(self) -> None:
        body = {
            "model": "m",
            "prompt": "hello",
            "max_tokens": 100,
            "temperature": 0.5,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        assert prefill_body(body) == {
            "model": "m",
            "prompt": "hello",
            "max_tokens": 1,
            "temperature": 0.5,
            "stream": False,
            "kv_transfer_params": NULLS,
        }

    def test_chat_limits_both_names_of_the_token_limit(self) -> None:
        body = {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 64}
        leg = prefill_body(body)
        assert (leg["max_tokens"], leg["max_completion_tokens"]) == (1, 1)

    @pytest.mark.parametrize("body", [{"prompt": "x"}, {"max_completion_tokens": None}])
    def test_absent_or_null_chat_limit_stays_as_it_is(self, body: dict[str, Any]) -> None:
        leg = prefill_body(body)
        assert leg.get("max_completion_tokens") is None

    @pytest.mark.parametrize(("given", "sent"), [(0, 0), (1, 1), (8, 1), ("junk", "junk")])
    def test_min_tokens_never_exceeds_the_one_token(self, given: Any, sent: Any) -> None:
        assert prefill_body({"min_tokens": given})["min_tokens"] == sent

    def test_absent_min_tokens_is_not_added(self) -> None:
        assert "min_tokens" not in prefill_body({"prompt": "x"})

    def test_several_answers_need_one_prefill(self) -> None:
        leg = prefill_body({"prompt": "x", "n": 4, "best_of": 4})
        assert leg["n"] == 1
        assert "best_of" not in leg

    @pytest.mark.parametrize(
        ("prompt", "sent"),
        [
            ("text", "text"),
            (["one", "two"], "one"),
            ([[1, 2], [3]], [1, 2]),
            ([1, 2, 3], [1, 2, 3]),
            ([], []),
            (None, None),
            (7, 7),
        ],
    )
    def test_of_a_prompt_list_only_the_first_is_prefilled(self, prompt: Any, sent: Any) -> None:
        """vLLM returns the first prompt's parameters only; the others' blocks would stay held."""
        assert prefill_body({"prompt": prompt})["prompt"] == sent

    def test_clients_body_is_left_alone(self) -> None:
        body = {"prompt": ["a", "b"], "n": 2, "stream": True, "min_tokens": 3}
        before = dict(body)
        prefill_body(body)
        assert body == before


class TestDecodeBody:
    def test_params_are_passed_verbatim(self) -> None:
        params = {"remote_port": 1.0, "remote_block_ids": None, "unknown": {"deep": [1]}}
        body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 9}
        assert decode_body(body, params) == {**body, "kv_transfer_params": params}

    def test_no_params_leave_the_body_as_it_was(self) -> None:
        assert decode_body({"prompt": "a"}, None) == {"prompt": "a"}


class TestClientParams:
    def test_clients_params_are_removed_and_reported(self) -> None:
        body = {"prompt": "a", "kv_transfer_params": {"remote_host": "10.0.0.1"}}
        assert without_client_params(body) == ({"prompt": "a"}, True)

    def test_null_is_removed_silently(self) -> None:
        assert without_client_params({"kv_transfer_params": None}) == ({}, False)


class TestSkip:
    @pytest.mark.parametrize(
        "body",
        [
            {"prompt_logprobs": 0},
            {"echo": True, "logprobs": 0},
            {"prompt_embeds": "..."},
            {"use_beam_search": True},
        ],
    )
    def test_prefill_is_skipped_where_d_computes_the_prompt_anyway(
        self, body: dict[str, Any]
    ) -> None:
        assert reason_to_skip_prefill(body)

    @pytest.mark.parametrize("body", [{}, {"echo": True}, {"logprobs": 5}, {"n": 2}])
    def test_prefill_is_used_otherwise(self, body: dict[str, Any]) -> None:
        assert reason_to_skip_prefill(body) is None


class TestPush:
    def test_both_legs_name_one_transfer_and_d_where_p_is(self) -> None:
        assert ask_push("t") == {**NULLS, "transfer_id": "t"}
        assert expect_push("t", ("10.0.0.1", 7100)) == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_host": "10.0.0.1",
            "remote_port": 7100,
            "transfer_id": "t",
        }

    def test_prefill_body_takes_the_flows_params(self) -> None:
        assert prefill_body({"prompt": "x"}, {"a": 1})["kv_transfer_params"] == {"a": 1}

    @pytest.mark.parametrize(
        "body",
        [{"n": 2}, {"best_of": 2}, {"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}],
    )
    def test_bodies_that_become_several_requests_go_by_pull(self, body: dict[str, Any]) -> None:
        assert reason_to_pull(body)

    @pytest.mark.parametrize(
        "body",
        [
            {},
            {"n": 1},
            {"prompt": "a"},
            {"prompt": ["a"]},
            {"prompt": [1, 2]},
            {"prompt": [[1, 2]]},
        ],
    )
    def test_one_prompt_and_one_answer_may_be_pushed(self, body: dict[str, Any]) -> None:
        assert reason_to_pull(body) is None


def test_decode_first_gives_d_the_url_only() -> None:
    assert ask_for_prefill_at("http://10.0.0.9:8000/v1/metaserver") == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "metaserver": "http://10.0.0.9:8000/v1/metaserver",
    }
