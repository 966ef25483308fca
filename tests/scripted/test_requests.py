"""What requests may carry: other prompts than P had, rubbish in the params, adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from pairs import MakePair, counts, num_blocks_pulled, prompt_of

Change = Callable[[dict[str, Any]], None]


def _set(key: str, value: Any) -> Change:
    def change(params: dict[str, Any]) -> None:
        params[key] = value

    return change


def _set_inner(key: str, value: Any) -> Change:
    def change(params: dict[str, Any]) -> None:
        params["llmdd"][key] = value

    return change


REFUSED_BY_D: dict[str, Change] = {
    "host missing": lambda params: params.pop("remote_host"),
    "host null": _set("remote_host", None),
    "host is a number": _set("remote_host", 7),
    "host not allowed": _set("remote_host", "192.0.2.7"),
    "host is huge": _set("remote_host", "x" * 10**6),
    "port is text": _set("remote_port", "no"),
    "port is a list": _set("remote_port", [1]),
    "port out of range": _set("remote_port", 70000),
    "port is true": _set("remote_port", True),
    "our part missing": lambda params: params.pop("llmdd"),
    "our part is a list": _set("llmdd", [1, 2]),
    "another version": _set_inner("v", 2),
    "tokens negative": _set_inner("num_tokens", -1),
    "tokens not a number": _set_inner("num_tokens", float("nan")),
    "another length": _set_inner("num_tokens", 71),
    "another hash": _set_inner("prompt_hash", "0" * 32),
    "secret empty": _set_inner("secret", ""),
    "production is huge": _set_inner("production", 2**60),
    "production is nested": _set_inner("production", {"a": [{}]}),
}
REFUSED_BY_P: dict[str, Change] = {
    "another secret": _set_inner("secret", "guess"),
    "another production": _set_inner("production", 4711),
    "another instance": _set_inner("instance", "someone-else"),
}
TOLERATED: dict[str, Change] = {
    "port is a float": lambda params: params.update(remote_port=float(params["remote_port"])),
    "port is digits": lambda params: params.update(remote_port=str(params["remote_port"])),
    "block ids are rubbish": _set("remote_block_ids", [["x", None], -5]),
    "engine id is null": _set("remote_engine_id", None),
    "more keys": _set("remote_prefill_cached_tokens", 3),
}


class TestParams:
    @pytest.mark.parametrize("change", REFUSED_BY_D.values(), ids=REFUSED_BY_D)
    def test_rubbish_means_a_local_prefill(self, make_pair: MakePair, change: Change) -> None:
        pair = make_pair(d={"load_failure_policy": "fail"})
        prompt = prompt_of(70)
        params = copy.deepcopy(pair.params(prompt))
        change(params)
        assert pair.is_right(prompt, pair.d.run(pair.decode(prompt, params))[0])
        assert counts(pair.d)["failed at params"] == 1
        assert pair.network.pulls == []
        pair.p_clock.advance(60)
        pair.finish()

    @pytest.mark.parametrize("change", REFUSED_BY_P.values(), ids=REFUSED_BY_P)
    def test_a_forged_ticket_gets_nothing_and_harms_nobody(
        self, make_pair: MakePair, change: Change
    ) -> None:
        pair = make_pair(d={"load_failure_policy": "fail", "enable_prefix_caching": False})
        prompt = prompt_of(70)
        params = pair.params(prompt)
        forged = copy.deepcopy(params)
        change(forged)
        assert pair.is_right(prompt, pair.run(pair.decode(prompt, forged))[0])
        assert pair.network.pulls == []
        assert counts(pair.d)["failed at claim"] == 1
        assert pair.is_right(prompt, pair.run(pair.decode(prompt, params))[0])
        assert num_blocks_pulled(pair) == 5
        pair.finish()

    @pytest.mark.parametrize("change", TOLERATED.values(), ids=TOLERATED)
    def test_what_proxies_do_to_params_is_tolerated(
        self, make_pair: MakePair, change: Change
    ) -> None:
        pair = make_pair()
        prompt = prompt_of(70)
        params = copy.deepcopy(pair.params(prompt))
        change(params)
        assert pair.is_right(prompt, pair.run(pair.decode(prompt, params))[0])
        assert num_blocks_pulled(pair) == 5
        pair.finish()

    @pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": None}, {"a": [{}]}])
    def test_no_usable_params_are_counted(
        self, make_pair: MakePair, params: dict[str, Any] | None
    ) -> None:
        pair = make_pair()
        prompt = prompt_of(40)
        assert pair.is_right(prompt, pair.d.run(pair.decode(prompt, params))[0])
        assert counts(pair.d)["local_prefills"] == 1
        pair.finish()


class TestOtherPrompts:
    def test_s44_wrong_output_none_for_a_list_of_prompts(self, make_pair: MakePair) -> None:
        """A proxy hands one prompt's params on with both."""
        pair = make_pair()
        mine, other = prompt_of(70, 1), prompt_of(70, 2)
        params = pair.params(mine)
        ids = [pair.decode(prompt, copy.deepcopy(params)) for prompt in (other, mine)]
        for prompt, result in zip((other, mine), pair.run(*ids), strict=True):
            assert pair.is_right(prompt, result)
        assert num_blocks_pulled(pair) == 5
        pair.finish()

    def test_generated_text_behind_the_prompt_is_another_prompt(self, make_pair: MakePair) -> None:
        pair = make_pair()
        prompt = prompt_of(70)
        first = pair.prefill(prompt)
        longer = [*prompt, *first.tokens]
        result = pair.d.run(pair.decode(longer, first.kv_transfer_params))[0]
        assert pair.is_right(longer, result)
        assert pair.network.pulls == []

    @pytest.mark.parametrize(("at_p", "at_d"), [("one", "two"), ("one", None), (None, "two")])
    def test_another_adapter_is_another_prompt(
        self, make_pair: MakePair, at_p: str | None, at_d: str | None
    ) -> None:
        pair = make_pair()
        prompt = prompt_of(70)
        params = pair.params(prompt, lora_name=at_p)
        request_id = pair.d.add_request(prompt, kv_transfer_params=params, lora_name=at_d)
        pair.d.run(request_id)
        assert pair.network.pulls == []
        assert counts(pair.d)["failed at params"] == 1

    def test_the_same_adapter_fetches(self, make_pair: MakePair) -> None:
        pair = make_pair()
        prompt = prompt_of(70)
        params = pair.params(prompt, lora_name="one")
        pair.run(pair.d.add_request(prompt, kv_transfer_params=params, lora_name="one"))
        assert num_blocks_pulled(pair) == 5
        pair.finish()


class TestRejection:
    @pytest.mark.parametrize("placeholder", [[0], None])
    def test_s12_leak_none_when_d_s_frontend_refuses(
        self, make_pair: MakePair, placeholder: list[int] | None
    ) -> None:
        """Such a request comes only to be aborted, with its own or with a placeholder prompt."""
        pair = make_pair()
        prompt = prompt_of(70)
        params = pair.params(prompt)
        pair.d.add_request(placeholder or prompt, kv_transfer_params=params, abort_immediately=True)
        pair.finish()
        assert pair.network.pulls == []
        assert counts(pair.p)["leases_released"] == 1


class TestPromptLogprobs:
    def test_s34_crash_none_for_prompt_logprobs(self, make_pair: MakePair) -> None:
        """vLLM reads no prefix cache for them, so at most the remote part is used."""
        pair = make_pair()
        prompt = prompt_of(70)
        params = pair.params(prompt)
        request_id = pair.d.add_request(
            prompt, max_tokens=3, kv_transfer_params=params, prompt_logprobs=1
        )
        assert pair.is_right(prompt, pair.run(request_id)[0])
        pair.p_clock.advance(60)
        pair.finish()
