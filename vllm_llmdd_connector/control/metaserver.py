"""D's requests to metaservers: HTTP posts that a proxy answers when P has finished.

An answer takes as long as a prefill, so each post stays open beside all others: one thread runs
them in an event loop. It starts with the first post; a D that is never sent a metaserver has none.
"""

import asyncio
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vllm_llmdd_connector.config import is_allowed_peer
from vllm_llmdd_connector.deadlines import Deadlines
from vllm_llmdd_connector.errors import RemoteProtocolError
from vllm_llmdd_connector.log import get_logger

if TYPE_CHECKING:
    import httpx

logger = get_logger(__name__)

_PLAIN_URL = re.compile(r"https?://[0-9a-z.:\[\]-]*([/?#][!-~]*)?", re.IGNORECASE)

OnAnswer = Callable[[str], None]
"""Takes the reason of a failure; empty when the metaserver answered that all went well."""


def check_metaserver(url: str, allowed_peers: tuple[str, ...]) -> None:
    """Refuse what a client could abuse to have this server talk to others.

    A name is refused too: whoever answers for it may change between this check and the post.

    Raises:
        RemoteProtocolError: the URL is not http(s) to an address in ``allowed_peers``.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise RemoteProtocolError(f"the metaserver {url!r} is not a URL: {error}") from None
    # Only what every URL parser reads alike: no user, no white space, no backslash.
    if not _PLAIN_URL.fullmatch(url):
        raise RemoteProtocolError(
            f"the metaserver {url!r} is not a plain http or https URL; see the proxy's set-up"
        )
    if host is None or not is_allowed_peer(host, allowed_peers):
        raise RemoteProtocolError(
            f"the metaserver's host {host!r} is not an IPv4 address in allowed_peers "
            f"{list(allowed_peers)}; add it there if it is yours"
        )


class MetaserverClient:
    """Posts that are under way, by a key of the caller's."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: httpx.AsyncClient | None = None
        self._posts: dict[str, Future[None]] = {}
        self._stopping = False

    def post(self, key: str, url: str, body: dict[str, Any], on_answer: OnAnswer) -> None:
        """Send ``body``; ``on_answer`` is called once, on another thread, unless cancelled; before
        this returns when no thread is to be had."""
        if self._stopping:
            return
        try:
            loop = self._loop or self._start()
        except (OSError, RuntimeError) as error:
            on_answer(f"{url} cannot be asked: {error}")
            return
        self._posts[key] = asyncio.run_coroutine_threadsafe(self._post(url, body, on_answer), loop)

    def cancel(self, key: str) -> None:
        """Nobody wants the answer any more: close the connection, if there still is one."""
        post = self._posts.pop(key, None)
        if post is not None:
            post.cancel()

    def close(self) -> None:
        """End all posts and the thread; idempotent."""
        if self._stopping:
            return
        self._stopping = True
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _start(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(
            target=self._run, args=(loop,), name="llmdd-metaserver", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            loop.close()
            raise
        self._loop, self._thread = loop, thread
        return loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._client = self._new_client()
            loop.run_forever()
        finally:
            loop.run_until_complete(self._end())
            loop.close()

    def _new_client(self) -> "httpx.AsyncClient":
        # Not at start-up: the import takes a moment, which the scheduling thread has not.
        import httpx

        return httpx.AsyncClient(
            # Not through a proxy of the environment, and to no other host than the checked one.
            trust_env=False,
            follow_redirects=False,
            # No bound on the answer: the caller's own deadline ends a post that nobody answers.
            timeout=httpx.Timeout(None, connect=self._deadlines.first_contact_timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    async def _post(self, url: str, body: dict[str, Any], on_answer: OnAnswer) -> None:
        import httpx

        try:
            reason = await self._outcome(url, body)
        except httpx.ConnectTimeout:
            limit = self._deadlines.within("first_contact_timeout_s")
            reason = f"{url} cannot be asked: no connection {limit}"
        except Exception as error:
            # Whatever the HTTP library raises, the request must not wait for its deadline.
            reason = f"{url} cannot be asked: {error or type(error).__name__}"
        on_answer(reason)

    async def _outcome(self, url: str, body: dict[str, Any]) -> str:
        assert self._client is not None
        # As a stream: only the status counts, and a body could be of any length.
        async with self._client.stream("POST", url, json=body) as response:
            if response.is_success:
                return ""
            return f"{url} answered {response.status_code}"
