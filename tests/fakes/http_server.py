"""A metaserver of the test's making: what it was sent, and an answer on command."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeMetaserver:
    """Answers with ``status`` and ``headers``; with ``hold`` set, not before ``release``."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.status = 200
        self.headers: dict[str, str] = {}
        self.hold = False
        self.release = threading.Event()
        self.num_left = 0
        """Posts whose sender closed the connection before it had an answer."""
        self.on_post: Callable[[dict[str, Any]], None] = lambda body: None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/metaserver"


@contextmanager
def serving() -> Iterator[FakeMetaserver]:
    fake = FakeMetaserver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.paths.append(self.path)
            fake.bodies.append(body)
            fake.on_post(body)
            if fake.hold and not self._is_released():
                fake.num_left += 1
                return
            self.send_response(fake.status)
            for name, value in fake.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def _is_released(self) -> bool:
            """Wait for the test's word, or for the sender to leave."""
            self.connection.settimeout(0.05)
            while not fake.release.is_set():
                try:
                    if not self.connection.recv(1):
                        return False
                except TimeoutError:
                    continue
                except ConnectionError:
                    return False
            return True

        def log_message(self, *args: object) -> None:
            pass

    class ManyAtOnce(ThreadingHTTPServer):
        request_queue_size = 128

    with ManyAtOnce(("127.0.0.1", 0), Handler) as server:
        fake.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield fake
        finally:
            fake.release.set()
            server.shutdown()
            thread.join()
