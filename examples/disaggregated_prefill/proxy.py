"""A proxy for disaggregated prefill: one vLLM server prefills a request, another decodes it.

    python proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

It serves /v1/completions, /v1/chat/completions, /v1/models and /health. Several --prefill and
--decode servers are used in turn. This file is the command line; app.py holds the handlers,
flows.py how a request's two legs come together, bodies.py what each server is sent, legs.py how
that is sent and when it may be repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import signal
from collections.abc import Sequence

from app import Proxy, start
from bodies import Address
from flows import Flow, FlowOptions
from legs import Limits

log = logging.getLogger("proxy")


async def serve(proxy: Proxy, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = await start(proxy, host, port)
    log.info("serving on http://%s:%d", host, port)
    try:
        await stop.wait()
    finally:
        await runner.cleanup()


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    limits = Limits(
        connect_s=arguments.connect_timeout,
        prefill_s=arguments.prefill_timeout or None,
        decode_s=arguments.decode_timeout or None,
    )
    options = FlowOptions(Flow(arguments.flow), arguments.prefill_control, arguments.metaserver_url)
    proxy = Proxy(arguments.prefill, arguments.decode, limits, options)
    try:
        asyncio.run(serve(proxy, arguments.host, arguments.port))
    except OSError as error:
        raise SystemExit(f"proxy: cannot listen on --host/--port: {error.strerror}") from error


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--prefill", action="append", required=True, metavar="URL", help="a prefill server")
    add("--decode", action="append", required=True, metavar="URL", help="a decode server")
    add(
        "--flow",
        choices=[flow.value for flow in Flow],
        default=Flow.PUSH.value,
        help="how prefill and decode come together; push goes by pull while the address of a "
        "prefill server's control channel is not known (default: %(default)s)",
    )
    add(
        "--prefill-control",
        action="append",
        type=_address,
        default=[],
        metavar="HOST:PORT",
        help="a prefill server's control channel, for --flow push: one per --prefill, in the same "
        "order; without it the address is learnt from that server's first answer",
    )
    add(
        "--metaserver-url",
        default="",
        metavar="URL",
        help="where decode servers reach this proxy, for --flow decode-first "
        "(default: http://HOST:PORT/v1/metaserver)",
    )
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    add("--connect-timeout", type=float, default=5.0, metavar="S", help="default: %(default)s s")
    until = "seconds until the answer's first byte, 0 for no limit (default: %(default)s)"
    add("--prefill-timeout", type=float, default=600.0, metavar="S", help=until)
    add("--decode-timeout", type=float, default=0.0, metavar="S", help=until)
    arguments = parser.parse_args(argv)
    _check(parser, arguments)
    return arguments


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if len(arguments.prefill_control) not in (0, len(arguments.prefill)):
        parser.error("--prefill-control: give one per --prefill, or none")
    is_anywhere = arguments.host in ("0.0.0.0", "::", "")
    if arguments.flow == Flow.DECODE_FIRST.value and is_anywhere and not arguments.metaserver_url:
        parser.error("--metaserver-url: decode servers cannot dial --host; give the URL they can")


def _address(text: str) -> Address:
    """Read HOST:PORT; the connector dials IPv4 literals only."""
    host, _, port = text.rpartition(":")
    try:
        ipaddress.IPv4Address(host)
        number = int(port)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not IPV4:PORT") from error
    if not 0 < number < 65536:
        raise argparse.ArgumentTypeError(f"port {number} is not in [1, 65535]")
    return host, number


if __name__ == "__main__":
    main()
