"""One end of a control connection in a process of its own; its lines on standard output say how it
is.

``… serve HOST KEEPALIVE_S`` says its port. ``… dial HOST KEEPALIVE_S PORT TALKS`` says ``linked``
when it was answered, and why the connection was lost; with TALKS it goes on asking meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from fakes.builders import make_fingerprint, make_welcome
from vllm_llmdd_connector.control.channel import Dialer, Server, Sleeper, new_context
from vllm_llmdd_connector.control.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Hello,
    Message,
    raw_fingerprint,
)

ASKS_EVERY_MS = 200


def serve(host: str, keepalive_s: int) -> None:
    def answer(message: AnyMessage, reply: Callable[[Message], None]) -> None:
        reply(make_welcome())

    server = Server("served", host, 0, lambda: None, keepalive_s=keepalive_s)
    server.start(answer)
    print(server.port, flush=True)
    sys.stdin.read()
    server.close()


def dial(host: str, keepalive_s: int, port: int, talks: bool) -> None:
    hello = Hello(version=PROTOCOL_VERSION, fingerprint=raw_fingerprint(make_fingerprint()))
    dialer = Dialer(new_context(), host, port, keepalive_s=keepalive_s)
    sleeper = Sleeper()
    sleeper.watch(dialer.socket, dialer.monitor)
    dialer.send([hello])
    while not dialer.receive()[0]:
        sleeper.sleep()
    print("linked", flush=True)
    while not dialer.was_lost():
        sleeper.sleep(ASKS_EVERY_MS if talks else None)
        dialer.receive()
        if talks:
            dialer.send([hello])
    print(dialer.loss, flush=True)


if __name__ == "__main__":
    what, host, keepalive_s, *rest = sys.argv[1:]
    if what == "serve":
        serve(host, int(keepalive_s))
    else:
        dial(host, int(keepalive_s), int(rest[0]), rest[1] == "True")
