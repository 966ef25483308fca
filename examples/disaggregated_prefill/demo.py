"""Disaggregated prefill on this machine: P, D and the proxy, and a verdict for each prompt.

`make demo` runs it once the environment and the model are there. Two vLLM servers are started, and
two proxies: every prompt is asked for by pull, and one like it by push. The reference for the text
is P itself, asked directly with a cache salt of its own, so that it can share no prefix with the
run under test. The exit status is 0 when every prompt is right, 1 when one is not, 2 when a server
did not start or answer, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases import MAX_TOKENS, Case, cases
from client import Reply, RequestError, ask, read_metrics, tokenize
from rich.console import Console
from rich.table import Table
from servers import (
    ProxySpec,
    ServerError,
    Servers,
    ServerSpec,
    free_port,
    raise_on_terminate,
)
from traces import show_traces
from verdict import Expected, check_digests, check_tokens, read_digests

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
WORK = ROOT / ".cache" / "demo"
BLOCK_SIZE = 128
"""Tokens per block of vLLM's CPU build."""
DTYPES = {"float32": 4, "bfloat16": 2}
"""Bytes per value."""

MOVED_BYTES = "vllm:llmdd_recv_bytes_total"
MOVED_BLOCKS = "vllm:llmdd_recv_blocks_total"
RECEIVED = "vllm:llmdd_recv_requests_total"
SENT = "vllm:llmdd_sent_requests_total"
OPENED = "vllm:llmdd_leases_opened_total"
RELEASED = "vllm:llmdd_leases_released_total"
EXPIRED = "vllm:llmdd_leases_expired_total"
VOIDED = "vllm:llmdd_leases_voided_total"
DECODE_SECONDS = "vllm:request_decode_time_seconds_sum"
FLOWS = ("pull", "push")
_METRICS_WAIT_S = 5.0

console = Console(width=None if sys.stdout.isatty() else 150)


@dataclass(frozen=True)
class Model:
    """What of the model's shape is needed to say how much must be moved."""

    name: str
    dtype: str
    layers: int
    block_bytes: int
    """Of one block in all layers."""

    @staticmethod
    def read(folder: Path, dtype: str = "float32") -> Model:
        """Read the shape; `dtype` is what the servers compute and store KV in.

        In float32 D's logprobs repeat a single server's to 2e-5 nat, so that the text is a sharp
        check. In bfloat16 they differ by up to 0.2 nat with the very same KV, because a logit
        itself is stored in steps of 0.06 to 0.13.
        """
        config = json.loads((folder / "config.json").read_text())
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        key_and_value = 2 * config["num_key_value_heads"] * head * BLOCK_SIZE * DTYPES[dtype]
        layers = config["num_hidden_layers"]
        return Model(str(folder), dtype, layers, key_and_value * layers)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    flow: str
    case: Case
    reply: Reply
    first_token_s: float
    blocks: int
    moved_bytes: int
    compared: str
    problems: list[str]


class Demo:
    """The running servers and what they are asked."""

    def __init__(
        self, model: Model, digests: Path, prefill: str, decode: str, proxies: dict[str, str]
    ) -> None:
        """URLs, those of the proxies by flow; `digests` is the connector's folder."""
        self._model = model
        self._digests = digests
        self._prefill, self._decode, self._proxies = prefill, decode, proxies

    def run(self) -> list[Row]:
        return [row for flow in FLOWS for row in self._run_flow(flow)]

    def _run_flow(self, flow: str) -> Iterator[Row]:
        for case in cases(self._tokenize, BLOCK_SIZE, flow):
            console.print(f"  asking by {flow}: {case.name}", style="dim")
            yield self._run_case(flow, case)

    def _tokenize(self, text: str) -> list[int]:
        return tokenize(self._prefill, self._model.name, text)

    def _run_case(self, flow: str, case: Case) -> Row:
        request_id = f"demo-{uuid.uuid4()}"
        body = {"model": self._model.name, "max_tokens": MAX_TOKENS, "temperature": 0, **case.body}
        before = self._counters()
        reply = ask(self._proxies[flow], case.path, body, request_id)
        # After the run under test, because an idle P counts a released lease at its next request.
        salted = {**body, "cache_salt": f"reference-{request_id}", "stream": False}
        reference = ask(self._prefill, case.path, salted, f"reference-{request_id}")
        moved = self._moved_since(before, flow)

        expected = self._expected(case, reply.prompt_tokens)
        text = check_tokens(reply.tokens, reference.tokens)
        problems = check_digests(read_digests(self._digests), request_id, expected)
        problems += text.problems
        problems += self._check_counters(moved, expected, flow)
        compared = f"{text.compared} tokens"
        if text.near_tie is not None:
            compared += ", then a near tie"
        first = reply.first_token_s
        if first is None:
            first = reply.total_s - moved[DECODE_SECONDS]
        blocks, size = int(moved[MOVED_BLOCKS]), int(moved[MOVED_BYTES])
        return Row(flow, case, reply, first, blocks, size, compared, problems)

    def _expected(self, case: Case, prompt_tokens: int) -> Expected:
        """D is given every block it has not cached; it computes the last token itself."""
        cached = (prompt_tokens - 1) // BLOCK_SIZE if case.repeats else 0
        blocks = -(-(prompt_tokens - 1) // BLOCK_SIZE) - cached
        return Expected(cached, blocks, self._model.layers)

    def _check_counters(self, moved: dict[str, float], expected: Expected, flow: str) -> list[str]:
        wanted = {
            RECEIVED: 1,
            MOVED_BLOCKS: expected.blocks,
            MOVED_BYTES: expected.blocks * self._model.block_bytes,
            SENT: 1 if flow == "push" else 0,
            EXPIRED: 0,
        }
        if flow == "pull":
            wanted[RELEASED] = 1
        problems = [
            f"{name} grew by {moved[name]:.0f}, expected {value}"
            for name, value in wanted.items()
            if moved[name] != value
        ]
        # D may have everything before P computes its last chunk: then a push needs no lease.
        if moved[OPENED] != _ended(moved):
            problems.append(f"{moved[OPENED]:.0f} leases opened, {_ended(moved):.0f} ended")
        return problems

    def _counters(self) -> dict[str, float]:
        sides = (
            (self._decode, (MOVED_BYTES, MOVED_BLOCKS, RECEIVED, DECODE_SECONDS)),
            (self._prefill, (SENT, OPENED, RELEASED, EXPIRED, VOIDED)),
        )
        counters = {}
        for url, names in sides:
            metrics = read_metrics(url)
            counters.update({name: metrics.get(name, 0.0) for name in names})
        return counters

    def _moved_since(self, before: dict[str, float], flow: str) -> dict[str, float]:
        """Return by how much the counters grew; vLLM publishes them a moment after the answer."""
        told = SENT if flow == "push" else RELEASED
        deadline = time.monotonic() + _METRICS_WAIT_S
        while True:
            now = self._counters()
            grown = {name: now[name] - before[name] for name in now}
            is_whole = grown[RECEIVED] and grown[told] and grown[OPENED] == _ended(grown)
            if is_whole or time.monotonic() > deadline:
                return grown
            time.sleep(0.2)


def _ended(counters: dict[str, float]) -> float:
    return counters[RELEASED] + counters[EXPIRED] + counters[VOIDED]


def start(servers: Servers, model: Model, digests: Path) -> Demo:
    """Start P and D side by side, then a proxy per flow in front of them."""
    control_port = free_port()
    prefill = servers.start(_spec("prefill", "kv_producer", model, digests, control_port))
    decode = servers.start(_spec("decode", "kv_consumer", model, digests))
    servers.wait_ready()
    proxies = {}
    for flow in FLOWS:
        words = ("--flow", flow, "--prefill-control", f"127.0.0.1:{control_port}")
        spec = ProxySpec(f"proxy-{flow}", [prefill.url], [decode.url], arguments=words)
        proxies[flow] = servers.start(spec).url
    servers.wait_ready()
    return Demo(model, digests, prefill.url, decode.url, proxies)


def _spec(name: str, role: str, model: Model, digests: Path, control_port: int = 0) -> ServerSpec:
    config: dict[str, Any] = {
        "kv_connector": "LLMDataDistConnector",
        "kv_role": role,
        "kv_load_failure_policy": "fail",  # a failed transfer must be seen here, not repaired
        "kv_connector_extra_config": {
            "kv_digest": str(digests),
            "control_port": control_port,
            # D's engine steps without pause while it waits for a push, so on a machine of few cores
            # P may take minutes for what it computes alone in seconds.
            "reserve_timeout_s": 240,
            "request_timeout_s": 240,
        },
    }
    config["kv_connector_extra_config"]["trace_dir"] = str(digests.parent / "traces")
    arguments = ("--max-model-len", "4096")
    return ServerSpec(name, Path(model.name), config, arguments=arguments, dtype=model.dtype)


def show(rows: list[Row]) -> None:
    table = Table(title="Prefilled by P, decoded by D", show_lines=True)
    left = ("flow", "prompt", "text")
    for name in ("flow", "prompt", "tokens", "text", "first token", "blocks", "moved", "compared"):
        table.add_column(name, justify="left" if name in left else "right")
    table.add_column("verdict")
    for row in rows:
        estimated = "" if row.case.body.get("stream") else "≈ "
        table.add_row(
            row.flow,
            row.case.name,
            str(row.reply.prompt_tokens),
            " ".join(row.reply.text.split()),
            f"{estimated}{row.first_token_s * 1000:.0f} ms",
            str(row.blocks),
            f"{row.moved_bytes / 1e6:.1f} MB",
            row.compared,
            "[red]WRONG" if row.problems else "[green]right",
        )
    console.print(table)
    for row in rows:
        for problem in row.problems:
            console.print(f"{row.case.name} by {row.flow}: {problem}", style="red", markup=False)


def main() -> int:
    arguments = _parse()
    model = Model.read(arguments.model, arguments.dtype)
    work: Path = arguments.work_dir
    raise_on_terminate()
    shutil.rmtree(work / "digests", ignore_errors=True)
    shutil.rmtree(work / "traces", ignore_errors=True)
    begin = time.monotonic()
    try:
        with Servers(work, lambda line: console.print(f"  {line}", style="dim")) as servers:
            rows = start(servers, model, work / "digests").run()
    except KeyboardInterrupt:
        console.print("stopped; every server it had started has ended")
        return 130
    except (ServerError, RequestError, OSError) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    show(rows)
    show_traces(work / "traces", console)
    wrong = sum(bool(row.problems) for row in rows)
    console.print(
        f"{len(rows) - wrong} of {len(rows)} prompts right: KV digests of P and D, tokens and "
        f"logprobs of a single server, blocks and bytes moved. {time.monotonic() - begin:.0f} s."
    )
    return 1 if wrong else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="P, D and a proxy on this machine, checked.")
    add = parser.add_argument
    add("--model", type=Path, default=MODEL, help="default: %(default)s")
    add("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    add("--work-dir", type=Path, default=WORK, help="logs and digests (default: %(default)s)")
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").is_file():
        parser.error(f"no model in {arguments.model}; `make demo` makes one")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
