"""Disaggregated prefill on this machine: P, D and the proxy, and a verdict for each prompt.

`make demo` runs it once the environment and the model are there. Two vLLM servers are started; the
reference for the text is P itself, asked directly with a cache salt of its own, so that it can
share no prefix with the run under test. The exit status is 0 when every prompt is right, 1 when one
is not, 2 when a server did not start or answer, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases import MAX_TOKENS, Case, cases
from client import Reply, RequestError, ask, read_metrics, tokenize
from rich.console import Console
from rich.table import Table
from servers import ProxySpec, ServerError, Servers, ServerSpec, raise_on_terminate
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
RELEASED = "vllm:llmdd_leases_released_total"
DECODE_SECONDS = "vllm:request_decode_time_seconds_sum"
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

    case: Case
    reply: Reply
    first_token_s: float
    blocks: int
    moved_bytes: int
    compared: str
    problems: list[str]


class Demo:
    """The running servers and what they are asked."""

    def __init__(self, model: Model, digests: Path, urls: tuple[str, str, str]) -> None:
        """`urls` are those of prefill, decode and proxy; `digests` is the connector's folder."""
        self._model = model
        self._digests = digests
        self._prefill, self._decode, self._proxy = urls

    def run(self) -> list[Row]:
        rows = []
        for case in cases(lambda text: tokenize(self._prefill, self._model.name, text), BLOCK_SIZE):
            console.print(f"  asking: {case.name}", style="dim")
            rows.append(self._run_case(case))
        return rows

    def _run_case(self, case: Case) -> Row:
        request_id = f"demo-{uuid.uuid4()}"
        body = {"model": self._model.name, "max_tokens": MAX_TOKENS, "temperature": 0, **case.body}
        before = self._counters()
        reply = ask(self._proxy, case.path, body, request_id)
        # After the run under test, because an idle P counts a released lease at its next request.
        salted = {**body, "cache_salt": f"reference-{request_id}", "stream": False}
        reference = ask(self._prefill, case.path, salted, f"reference-{request_id}")
        moved = self._moved_since(before)

        expected = self._expected(case, reply.prompt_tokens)
        text = check_tokens(reply.tokens, reference.tokens)
        problems = check_digests(read_digests(self._digests), request_id, expected)
        problems += text.problems
        problems += self._check_counters(moved, expected)
        compared = f"{text.compared} tokens"
        if text.near_tie is not None:
            compared += ", then a near tie"
        first = reply.first_token_s
        if first is None:
            first = reply.total_s - moved[DECODE_SECONDS]
        blocks, size = int(moved[MOVED_BLOCKS]), int(moved[MOVED_BYTES])
        return Row(case, reply, first, blocks, size, compared, problems)

    def _expected(self, case: Case, prompt_tokens: int) -> Expected:
        """D reads every block it has not cached; the last token is never taken from its cache."""
        cached = (prompt_tokens - 1) // BLOCK_SIZE if case.repeats else 0
        blocks = -(-prompt_tokens // BLOCK_SIZE) - cached
        return Expected(cached, blocks, self._model.layers)

    def _check_counters(self, moved: dict[str, float], expected: Expected) -> list[str]:
        wanted = {
            RECEIVED: 1,
            RELEASED: 1,
            MOVED_BLOCKS: expected.blocks,
            MOVED_BYTES: expected.blocks * self._model.block_bytes,
        }
        return [
            f"{name} grew by {moved[name]:.0f}, expected {value}"
            for name, value in wanted.items()
            if moved[name] != value
        ]

    def _counters(self) -> dict[str, float]:
        decode = read_metrics(self._decode)
        names = (MOVED_BYTES, MOVED_BLOCKS, RECEIVED, DECODE_SECONDS)
        counters = {name: decode.get(name, 0.0) for name in names}
        return {**counters, RELEASED: read_metrics(self._prefill).get(RELEASED, 0.0)}

    def _moved_since(self, before: dict[str, float]) -> dict[str, float]:
        """Return by how much the counters grew; vLLM publishes them a moment after the answer."""
        deadline = time.monotonic() + _METRICS_WAIT_S
        while True:
            now = self._counters()
            grown = {name: now[name] - before[name] for name in now}
            if (grown[RECEIVED] and grown[RELEASED]) or time.monotonic() > deadline:
                return grown
            time.sleep(0.2)


def start(servers: Servers, model: Model, digests: Path) -> Demo:
    """Start P and D side by side, then the proxy in front of them."""
    prefill = servers.start(_spec("prefill", "kv_producer", model, digests))
    decode = servers.start(_spec("decode", "kv_consumer", model, digests))
    servers.wait_ready()
    proxy = servers.start(ProxySpec("proxy", [prefill.url], [decode.url]))
    servers.wait_ready()
    return Demo(model, digests, (prefill.url, decode.url, proxy.url))


def _spec(name: str, role: str, model: Model, digests: Path) -> ServerSpec:
    config: dict[str, Any] = {
        "kv_connector": "LLMDataDistConnector",
        "kv_role": role,
        "kv_load_failure_policy": "fail",  # a failed transfer must be seen here, not repaired
        "kv_connector_extra_config": {"kv_digest": str(digests)},
    }
    config["kv_connector_extra_config"]["trace_dir"] = str(digests.parent / "traces")
    arguments = ("--max-model-len", "4096")
    return ServerSpec(name, Path(model.name), config, arguments=arguments, dtype=model.dtype)


def show(rows: list[Row]) -> None:
    table = Table(title="Prefilled by P, decoded by D", show_lines=True)
    for name in ("prompt", "tokens", "text", "first token", "blocks", "moved", "compared"):
        table.add_column(name, justify="left" if name in ("prompt", "text") else "right")
    table.add_column("verdict")
    for row in rows:
        estimated = "" if row.case.body.get("stream") else "≈ "
        table.add_row(
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
            console.print(f"{row.case.name}: {problem}", style="red", markup=False)


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
