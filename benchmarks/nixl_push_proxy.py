"""The example's proxy for vLLM's NixlPushConnector: both legs at once.

    python nixl_push_proxy.py --prefill URL --decode URL --engine-id P --side-channel HOST:PORT …

D is told P's engine id and side channel, and tells P where to write; P's answer is not needed. Both
legs carry the client's request id, by which P knows which of D's requests is whose.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "disaggregated_prefill"
sys.path.insert(0, str(EXAMPLE))

import proxy as example  # noqa: E402
from app import Proxy  # noqa: E402
from bodies import EXPECT_PREFILL, Body, decode_body, prefill_body  # noqa: E402
from flows import Flow, FlowOptions, Flows  # noqa: E402
from legs import Answer, Legs, Limits  # noqa: E402

if TYPE_CHECKING:
    from backends import Counters, Pool


class NixlPushFlows(Flows):
    """Of one P, whose engine and side channel are known from the start."""

    def __init__(self, engine: Body, prefill: Pool, decode: Pool, counters: Counters) -> None:
        super().__init__(FlowOptions(Flow.PUSH), prefill, decode, counters)
        self._engine = engine

    def _choose(self, legs: Legs, body: Body) -> AbstractAsyncContextManager[Answer]:
        params = {**EXPECT_PREFILL, **self._engine, "remote_request_id": legs.request_id}
        backend = self._prefill.in_turn()[0]
        return self._at_once(legs, prefill_body(body), decode_body(body, params), backend)


class NixlPushProxy(Proxy):
    def __init__(self, prefill: str, decode: str, engine: Body) -> None:
        super().__init__([prefill], [decode], Limits())
        self.flows = NixlPushFlows(engine, self._prefill, self._decode, self.counters)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("--prefill", "--decode", "--engine-id", "--side-channel"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args(arguments)
    host, _, port = options.side_channel.rpartition(":")
    engine = {"remote_engine_id": options.engine_id, "remote_host": host, "remote_port": int(port)}
    one_rank = {"tp_size": 1, "pp_size": 1}
    proxy = NixlPushProxy(options.prefill, options.decode, {**engine, **one_rank})
    asyncio.run(example.serve(proxy, "127.0.0.1", options.port))


if __name__ == "__main__":
    main(sys.argv[1:])
