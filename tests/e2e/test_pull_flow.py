"""The pull flow between two real servers on SmolLM2: bytes by digest, results by logprobs.

P prefills in chunks of 256 tokens and has another number of blocks than D, so both hold throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import wait_until
from flow import (
    Answer,
    Pair,
    assert_equal_digests,
    assert_same_generation,
    digests,
    kv_cache_usage,
    metrics,
    post,
    post_many,
)
from prompts import prompt_of
from servers import ProxySpec, Servers

BLOCK_SIZE = 128
NUM_LAYERS = 30
BLOCK_BYTES = 2 * 98_304 * NUM_LAYERS
D_MAX_MODEL_LEN = 2560


@pytest.fixture(scope="module")
def pair(start_pair: Callable[..., Pair], model: Path) -> Pair:
    return start_pair(
        model,
        # bfloat16 logits are 1/16 to 1/8 apart at this model's values: too coarse to compare.
        arguments=("--dtype", "float32"),
        prefill_arguments=("--max-model-len", "4096", "--max-num-batched-tokens", "256"),
        decode_arguments=(
            "--max-model-len",
            str(D_MAX_MODEL_LEN),
            "--num-gpu-blocks-override",
            "200",
        ),
    )


def check_transfer(pair: Pair, body: Answer, num_blocks: int) -> Answer:
    """Run a body through P and D and compare digests and generation with a single server."""
    params = pair.prefill(**body)["kv_transfer_params"]
    got = pair.decode(params, **body)
    assert_equal_digests(pair.digest_dir, params["llmdd"]["transfer_id"], num_blocks)
    assert_same_generation(pair.reference(**body), got)
    return got


@pytest.mark.parametrize(
    "num_tokens",
    [5, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 2, 3 * BLOCK_SIZE - 1, 3 * BLOCK_SIZE, 2100],
)
def test_prompt_of_any_length_arrives_whole(pair: Pair, num_tokens: int) -> None:
    body = {"prompt": prompt_of(num_tokens, num_tokens), "max_tokens": 6, "logprobs": 2}
    check_transfer(pair, body, -(-num_tokens // BLOCK_SIZE))


def test_one_token_beyond_a_block_that_d_has_needs_no_transfer(pair: Pair) -> None:
    """vLLM computes the last token in any case, so a hit of all others is a full hit."""
    prompt = prompt_of(BLOCK_SIZE, 10)
    check_transfer(pair, {"prompt": [*prompt, 7], "max_tokens": 4, "logprobs": 2}, 1)
    before = metrics(pair.decode_server)
    body = {"prompt": [*prompt, 9], "max_tokens": 4, "logprobs": 2}
    check_transfer(pair, body, 0)
    wait_until(
        lambda: metrics(pair.decode_server)["recv_not_needed"] == before["recv_not_needed"] + 1,
        "D counts the request as one that needed nothing",
    )
    wait_for_all_leases_to_end(pair)


def test_prefix_cached_on_d_is_not_transferred_again(pair: Pair) -> None:
    prompt = prompt_of(3 * BLOCK_SIZE, 20)
    check_transfer(pair, {"prompt": prompt, "max_tokens": 4, "logprobs": 2}, 3)
    before = metrics(pair.decode_server)["recv_bytes"]
    longer = [*prompt, *prompt_of(BLOCK_SIZE + 5, 21)]
    check_transfer(pair, {"prompt": longer, "max_tokens": 4, "logprobs": 2}, 2)
    assert metrics(pair.decode_server)["recv_bytes"] - before == 2 * BLOCK_BYTES


def test_prefix_cached_on_p_is_transferred(pair: Pair) -> None:
    prompt = prompt_of(2 * BLOCK_SIZE + 3, 30)
    pair.prefill(prompt=prompt)
    check_transfer(pair, {"prompt": prompt, "max_tokens": 4, "logprobs": 2}, 3)


def test_a_flipped_block_would_be_noticed(pair: Pair) -> None:
    """The oracle of this file has teeth: another prompt's blocks are another result."""
    bodies = [
        {"prompt": prompt_of(2 * BLOCK_SIZE, seed), "max_tokens": 4, "logprobs": 2}
        for seed in (40, 41)
    ]
    transfers = [pair.prefill(**body)["kv_transfer_params"]["llmdd"] for body in bodies]
    ids = {transfer["transfer_id"] for transfer in transfers}
    wait_until(
        lambda: ids <= {key[0] for key in digests(pair.digest_dir, "send")}, "P writes its digests"
    )
    sent = digests(pair.digest_dir, "send")
    first, second = (
        [digest for key, digest in sent.items() if key[0] == transfer["transfer_id"]]
        for transfer in transfers
    )
    assert len(first) == len(second) == 2 * NUM_LAYERS
    assert not set(first) & set(second)
    references = [pair.reference(**body) for body in bodies]
    with pytest.raises(AssertionError, match="differs"):
        assert_same_generation(references[0], references[1])


def test_chat_completion_arrives_whole(pair: Pair) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 12,
    }
    params = pair.prefill(**body)["kv_transfer_params"]
    got = pair.decode(params, **body)
    assert_equal_digests(pair.digest_dir, params["llmdd"]["transfer_id"], 1)
    text = got["choices"][0]["message"]["content"]
    assert text == pair.reference(**body)["choices"][0]["message"]["content"]
    assert "Paris" in text


def test_64_requests_at_once_through_the_proxy_all_arrive(pair: Pair, servers: Servers) -> None:
    urls = [pair.prefill_server.url], [pair.decode_server.url]
    proxy = servers.start(ProxySpec("proxy", *urls, arguments=("--flow", "pull")))
    servers.wait_ready()
    bodies = [
        {"prompt": prompt_of(20 + 4 * i, 100 + i), "max_tokens": 4, "logprobs": 2}
        for i in range(64)
    ]
    before = metrics(pair.decode_server)
    earlier = digests(pair.digest_dir, "recv").keys()
    model = str(pair.decode_server.spec.model)
    answers = post_many(proxy, [body | {"model": model} for body in bodies])
    after = metrics(pair.decode_server)
    assert after["recv_requests"] - before["recv_requests"] == 64
    for body, answer in zip(bodies[::16], answers[::16], strict=True):
        assert_same_generation(pair.reference(**body), answer)
    sent, received = digests(pair.digest_dir, "send"), digests(pair.digest_dir, "recv")
    assert all(sent[key] == digest for key, digest in received.items())
    assert len({transfer for transfer, *_ in received.keys() - earlier}) == 64


def test_list_of_two_prompts_gives_each_its_own_text(pair: Pair) -> None:
    """P answers with one prompt's params; the other must not get its blocks."""
    prompts = [prompt_of(200, 50), prompt_of(200, 51)]
    got = pair.run(prompt=prompts, max_tokens=4, logprobs=2)
    for index, prompt in enumerate(prompts):
        reference = pair.reference(prompt=prompt, max_tokens=4, logprobs=2)
        (choice,) = [choice for choice in got["choices"] if choice["index"] == index]
        assert_same_generation(reference, {"choices": [choice]})


def test_two_choices_of_one_prompt_are_both_right(pair: Pair) -> None:
    sampling = {"temperature": 1, "top_k": 1, "n": 2}
    body = {"prompt": prompt_of(300, 60), "max_tokens": 4, "logprobs": 2} | sampling
    got = pair.run(**body)
    reference = pair.reference(prompt=body["prompt"], max_tokens=4, logprobs=2)
    assert len(got["choices"]) == 2
    for choice in got["choices"]:
        assert_same_generation(reference, {"choices": [choice]})


def test_stop_at_the_first_token_on_p_still_hands_over(pair: Pair) -> None:
    prompt = prompt_of(150, 70)
    plain = pair.reference(prompt=prompt, max_tokens=1, logprobs=0, return_tokens_as_token_ids=True)
    token_id = int(plain["choices"][0]["logprobs"]["tokens"][0].removeprefix("token_id:"))
    answer = pair.prefill(prompt=prompt, stop_token_ids=[token_id])
    assert answer["choices"][0]["finish_reason"] == "stop"
    params = answer["kv_transfer_params"]
    pair.decode(params, prompt=prompt, max_tokens=4)
    assert_equal_digests(pair.digest_dir, params["llmdd"]["transfer_id"], 2)


def test_prompt_logprobs_at_d_fall_back_and_release_p(pair: Pair) -> None:
    body = {"prompt": prompt_of(140, 80), "max_tokens": 2, "logprobs": 2, "prompt_logprobs": 1}
    params = pair.prefill(prompt=body["prompt"])["kv_transfer_params"]
    got = pair.decode(params, **body)
    assert_same_generation(pair.reference(**body), got)
    assert_equal_digests(pair.digest_dir, params["llmdd"]["transfer_id"], 0)
    wait_for_all_leases_to_end(pair)


def test_request_that_d_rejects_releases_p(pair: Pair) -> None:
    import httpx

    prompt = prompt_of(D_MAX_MODEL_LEN + 100, 90)
    params = pair.prefill(prompt=prompt)["kv_transfer_params"]
    released = pair.prefill_metrics()["leases_released"]
    with pytest.raises(httpx.HTTPStatusError) as error:
        pair.decode(params, prompt=prompt, max_tokens=4)
    assert error.value.response.status_code == 400
    wait_until(
        lambda: pair.prefill_metrics()["leases_released"] == released + 1,
        "the rejected request's lease is released, not expired",
        timeout_s=20,
    )


def test_request_without_params_is_prefilled_locally_and_counted(pair: Pair) -> None:
    before = metrics(pair.decode_server)
    body = {"prompt": prompt_of(130, 95), "max_tokens": 4, "logprobs": 2}
    got = post(pair.decode_server, body)
    assert_same_generation(pair.reference(**body), got)
    after = metrics(pair.decode_server)
    assert after["local_prefills"] == before["local_prefills"] + 1
    assert after["recv_requests"] == before["recv_requests"]


@pytest.mark.parametrize(
    "junk",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "llmdd": 7, "remote_host": [], "remote_port": "x"},
        {"do_remote_prefill": True, "llmdd": {"v": 2}, "remote_host": None},
        {"do_remote_prefill": "yes", "do_remote_decode": "no"},
    ],
)
def test_junk_in_params_harms_nobody(pair: Pair, junk: Answer) -> None:
    body = {"prompt": prompt_of(20, 96), "max_tokens": 4, "logprobs": 2}
    assert_same_generation(pair.reference(**body), pair.decode(junk, **body))


def test_params_that_name_a_foreign_host_are_not_followed(pair: Pair) -> None:
    body = {"prompt": prompt_of(140, 97), "max_tokens": 4, "logprobs": 2}
    params = pair.prefill(**body)["kv_transfer_params"]
    before = metrics(pair.decode_server)["failures:params"]
    got = pair.decode(params | {"remote_host": "192.0.2.1"}, **body)
    assert_same_generation(pair.reference(**body), got)
    assert metrics(pair.decode_server)["failures:params"] == before + 1


def wait_for_all_leases_to_end(pair: Pair) -> None:
    def all_ended() -> bool:
        seen = pair.prefill_metrics()
        return seen["leases_opened"] == seen["leases_released"] + seen.get("leases_expired", 0)

    wait_until(all_ended, "every lease of P ends")


def test_nothing_is_held_at_the_end(pair: Pair) -> None:
    """Runs last in this file: all leases of the tests above are over and no block is in use."""
    wait_for_all_leases_to_end(pair)
    pair.prefill_metrics()
    for server in (pair.prefill_server, pair.decode_server):
        wait_until(
            lambda server=server: kv_cache_usage(server) == 0.0, f"{server.spec.name} is free"
        )
