"""A proxy for disaggregated prefill: one vLLM server prefills a request, another decodes it.

    python proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

It serves /v1/completions, /v1/chat/completions, /v1/models and /health. Several --prefill and
--decode servers are used in turn. This file is the command line; app.py holds the handlers,
bodies.py what each server is sent, legs.py how that is sent and when it may be repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from collections.abc import Sequence

from app import Proxy, start
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
    proxy = Proxy(arguments.prefill, arguments.decode, limits)
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
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    add("--connect-timeout", type=float, default=5.0, metavar="S", help="default: %(default)s s")
    until = "seconds until the answer's first byte, 0 for no limit (default: %(default)s)"
    add("--prefill-timeout", type=float, default=600.0, metavar="S", help=until)
    add("--decode-timeout", type=float, default=0.0, metavar="S", help=until)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
