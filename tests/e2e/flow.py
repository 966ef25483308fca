"""Drives a prefill and a decode server as a sequential proxy does, and compares results."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from servers import Server

NULL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What sequential proxies in the wild send on the prefill leg, nulls included."""

CLEAR_GAP_NATS = 0.1
LOGPROB_TOLERANCE_NATS = 0.05
DIGEST_WAIT_S = 20.0

Answer = dict[str, Any]


def connector_config(role: str, **options: Any) -> dict[str, Any]:
    """``--kv-transfer-config`` for a server of this role."""
    policy = options.pop("kv_load_failure_policy", "recompute")
    engine_id = options.pop("engine_id", None)
    config = {
        "kv_connector": "LLMDataDistConnector",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": options,
    }
    return config | ({"engine_id": engine_id} if engine_id else {})


@dataclass
class Pair:
    """A running P and D, and the folder where both write their digests."""

    prefill_server: Server
    decode_server: Server
    digest_dir: Path
    _salt: int = 0
    _control_port: int = 0

    def prefill(self, **body: Any) -> Answer:
        """The prefill leg; the answer carries P's ``kv_transfer_params``."""
        leg = {"max_tokens": 1, "stream": False, "kv_transfer_params": NULL_PARAMS}
        return post(self.prefill_server, body | leg)

    def decode(self, params: Answer | None, **body: Any) -> Answer:
        return post(self.decode_server, body | {"kv_transfer_params": params})

    def run(self, **body: Any) -> Answer:
        """Both legs, one after the other."""
        params = self.prefill(**body)["kv_transfer_params"]
        assert params is not None, "the prefill server returned no kv_transfer_params"
        return self.decode(params, **body)

    @property
    def control_port(self) -> int:
        """P's control port, learnt as a proxy does: from an earlier answer."""
        if not self._control_port:
            params = self.prefill(prompt=[1, 2, 3])["kv_transfer_params"]
            self.decode(params, prompt=[1, 2, 3], max_tokens=1)
            self._control_port = params["remote_port"]
        return self._control_port

    def legs(self, transfer_id: str) -> tuple[Answer, Answer]:
        """The params of both legs of the concurrent flow."""
        decode_leg = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_host": "127.0.0.1",
            "remote_port": self.control_port,
            "transfer_id": transfer_id,
        }
        return NULL_PARAMS | {"transfer_id": transfer_id}, decode_leg

    def push(
        self,
        transfer_id: str,
        prefill_delay_s: float = 0.0,
        decode_delay_s: float = 0.0,
        **body: Any,
    ) -> Answer:
        """Both legs at once, or one later than the other; D's answer."""
        prefill_leg, decode_leg = self.legs(transfer_id)

        def prefill() -> Answer:
            time.sleep(prefill_delay_s)
            leg = {"max_tokens": 1, "stream": False, "kv_transfer_params": prefill_leg}
            return post(self.prefill_server, body | leg)

        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(prefill)
            time.sleep(decode_delay_s)
            answer = self.decode(decode_leg, **body)
            first.result()
        return answer

    def prefill_metrics(self) -> dict[str, float]:
        """P's metrics, up to date: an idle vLLM publishes nothing, so ask it for a token."""
        post(self.prefill_server, {"prompt": [1], "max_tokens": 1})
        return metrics(self.prefill_server)

    def reference(self, **body: Any) -> Answer:
        """What one server alone answers: P without params, apart from its prefix cache."""
        self._salt += 1
        return post(self.prefill_server, body | {"cache_salt": f"reference-{self._salt}"})


def post(server: Server, body: Answer, timeout_s: float = 120.0) -> Answer:
    """POST to completions, or to chat completions when the body has messages."""
    path = "chat/completions" if "messages" in body else "completions"
    if "model" not in body:
        body = body | {"model": str(server.spec.model)}
    body = {"temperature": 0} | body
    response = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=timeout_s)
    response.raise_for_status()
    answer: Answer = response.json()
    return answer


def post_many(server: Server, bodies: list[Answer]) -> list[Answer]:
    """All bodies at once."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: post(server, body), bodies))


def metrics(server: Server) -> dict[str, float]:
    """The connector's metrics by name without prefix; failures are ``failures:<stage>``."""
    text = httpx.get(f"{server.url}/metrics", timeout=10).text
    values: dict[str, float] = {}
    for name, labels, value in re.findall(r"^vllm:llmdd_(\w+)\{(.*)\} (\S+)$", text, re.M):
        stage = re.search(r'stage="([^"]+)"', labels)
        key = f"failures:{stage[1]}" if stage else name.removesuffix("_total")
        if not name.endswith(("_created", "_bucket")):
            values[key] = values.get(key, 0.0) + float(value)
    return values


def num_open_leases(pair: Pair) -> float:
    seen = pair.prefill_metrics()
    ended = sum(seen[f"leases_{end}"] for end in ("released", "expired", "voided"))
    return seen["leases_opened"] - ended


def kv_cache_usage(server: Server) -> float:
    """Share of the server's KV cache that is in use, as vLLM reports it."""
    text = httpx.get(f"{server.url}/metrics", timeout=10).text
    match = re.search(r"^vllm:kv_cache_usage_perc\{.*\} (\S+)$", text, re.M)
    assert match is not None
    return float(match[1])


def assert_same_generation(reference: Answer, got: Answer, index: int = 0) -> None:
    """Equal tokens wherever the reference is sure, and equal logprobs on the common prefix.

    Both bodies must ask for ``logprobs=2``. Where the reference's two best tokens are closer than
    ``CLEAR_GAP_NATS``, another batch shape may turn them round; the comparison ends there.
    """
    expected, actual = (answer["choices"][index]["logprobs"] for answer in (reference, got))
    assert expected["tokens"], "the reference generated nothing"
    for position, token in enumerate(expected["tokens"]):
        best = sorted(expected["top_logprobs"][position].values(), reverse=True)
        if actual["tokens"][position] != token:
            gap = best[0] - best[1]
            assert gap <= CLEAR_GAP_NATS, f"token {position} differs at a gap of {gap} nat"
            return
        difference = abs(expected["token_logprobs"][position] - actual["token_logprobs"][position])
        assert difference <= LOGPROB_TOLERANCE_NATS, (
            f"logprob of token {position} ({token!r}) differs by {difference} nat"
        )


Position = tuple[str, int, str, int]
"""Transfer id, rank, layer, block position in the prompt."""


def digests(digest_dir: Path, side: str) -> dict[Position, str]:
    """All digests of one side; a transfer read twice keeps its last."""
    return dict(_lines(digest_dir, side))


def _lines(digest_dir: Path, side: str) -> Iterator[tuple[Position, str]]:
    for path in sorted(digest_dir.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if entry["side"] != side:
                continue
            for offset, digest in enumerate(entry["digests"]):
                place = entry["first_block"] + offset
                yield (entry["transfer_id"], entry["rank"], entry["layer"], place), digest


def assert_equal_digests(digest_dir: Path, transfer_id: str, num_blocks: int) -> None:
    """D received ``num_blocks`` blocks of a transfer per layer and rank, all as P had them."""
    sent, received = _digests_of(digest_dir, transfer_id)
    slabs = {(rank, layer) for _, rank, layer, _ in sent}
    assert slabs, f"the prefill server wrote no digests of {transfer_id}"
    assert len(received) == num_blocks * len(slabs), (
        f"{len(received)} digests of {transfer_id} at D, expected {num_blocks} x {len(slabs)}"
    )
    wrong = [key for key, value in received.items() if sent.get(key) != value]
    assert not wrong, f"{len(wrong)} blocks differ, the first is {wrong[0]}"


def _digests_of(
    digest_dir: Path, transfer_id: str
) -> tuple[dict[Position, str], dict[Position, str]]:
    """What both sides wrote of a transfer.

    P writes in the step after the prompt's last one, so D may have answered before.
    """
    deadline_s = time.monotonic() + DIGEST_WAIT_S
    while True:
        sent, received = (
            {
                key: value
                for key, value in digests(digest_dir, side).items()
                if key[0] == transfer_id
            }
            for side in ("send", "recv")
        )
        if (sent and received.keys() <= sent.keys()) or time.monotonic() > deadline_s:
            return sent, received
        time.sleep(0.05)
