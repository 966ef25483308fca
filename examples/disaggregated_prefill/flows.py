"""How the two legs of a request come together: pull, push, decode first, or decode alone.

- Pull: P first; D is then sent its leg with P's object and reads P's blocks.
- Push: both legs at once with one transfer id; P sends each layer when it has computed it. D has to
  know the address of P's control channel, which the operator gives or an earlier answer named.
- Decode first: D first, with a URL of this proxy; D posts there what P is to be sent.

With the last two D's answer decides. It prefills by itself when P fails, so P's failure is counted
and the request goes on; when D fails or the client goes away, P's leg has no use and is ended.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from enum import Enum

from backends import Backend, Counters, Pool, ProxyError
from bodies import (
    Address,
    Body,
    ask_for_prefill_at,
    ask_push,
    decode_body,
    expect_push,
    prefill_body,
    reason_to_pull,
    reason_to_skip_prefill,
)
from legs import Answer, Legs, Refused
from metaserver import Metaserver

log = logging.getLogger("proxy")

_GRACE_S = 1.0
"""P's answer comes about when D's first token does: a short answer of D's may be earlier. Beyond
this a P that still computes does it for nobody."""


class Flow(Enum):
    PULL = "pull"
    PUSH = "push"
    DECODE_FIRST = "decode-first"


@dataclass(frozen=True)
class FlowOptions:
    """What the operator says about flows."""

    flow: Flow = Flow.PUSH
    """A push goes by pull while the address of P's control channel is not known."""
    prefill_controls: Sequence[Address] = ()
    """Of the prefill servers, in their order; empty: to be learnt from their answers."""
    metaserver_url: str = ""
    """As D reaches it; empty: at the address on which the proxy listens."""


class Flows:
    """Decides each request's flow and runs it."""

    def __init__(
        self, options: FlowOptions, prefill: Pool, decode: Pool, counters: Counters
    ) -> None:
        self._flow = options.flow
        self._prefill = prefill
        self._decode = decode
        self._counters = counters
        self.metaserver = Metaserver(options.metaserver_url, prefill, counters)
        self._ending: set[asyncio.Task[None]] = set()
        for backend, control in zip(prefill.backends, options.prefill_controls, strict=False):
            backend.control, backend.control_is_given = control, True

    @asynccontextmanager
    async def answer(self, legs: Legs, body: Body) -> AsyncIterator[Answer]:
        """Give D's answer once its headers are there."""
        reason = reason_to_skip_prefill(body)
        if reason is not None:
            self._counters.prefills_skipped += 1
            log.info("request %s: no prefill leg: %s", legs.request_id, reason)
            chosen: AbstractAsyncContextManager[Answer] = legs.decode(
                self._decode, decode_body(body, None)
            )
        else:
            chosen = self._choose(legs, body)
        async with chosen as answer:
            yield answer

    async def close(self) -> None:
        """End the prefill legs that outlived their request."""
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _choose(self, legs: Legs, body: Body) -> AbstractAsyncContextManager[Answer]:
        if self._flow is Flow.PULL or reason_to_pull(body) is not None:
            return self._pull(legs, body, self._prefill.in_turn())
        if self._flow is Flow.DECODE_FIRST:
            if self.metaserver.can_expect(legs):
                return self._decode_first(legs, body)
            return self._pull(legs, body, self._prefill.in_turn())
        backends = self._prefill.in_turn()
        if backends[0].control is None:
            return self._pull(legs, body, backends)
        return self._push(legs, body, backends[0], backends[0].control)

    @asynccontextmanager
    async def _pull(
        self, legs: Legs, body: Body, backends: Sequence[Backend]
    ) -> AsyncIterator[Answer]:
        params = await legs.prefill(self._prefill, prefill_body(body), backends)
        if params is None:
            self._counters.params_missing += 1
            log.warning(
                "request %s: prefill gave no kv_transfer_params; decode computes the prompt",
                legs.request_id,
            )
        async with legs.decode(self._decode, decode_body(body, params)) as answer:
            yield answer

    def _push(
        self, legs: Legs, body: Body, backend: Backend, control: Address
    ) -> AbstractAsyncContextManager[Answer]:
        transfer_id = uuid.uuid4().hex
        prefill = prefill_body(body, ask_push(transfer_id))
        decode = decode_body(body, expect_push(transfer_id, control))
        return self._at_once(legs, prefill, decode, backend)

    @asynccontextmanager
    async def _at_once(
        self, legs: Legs, prefill_leg: Body, decode_leg: Body, backend: Backend
    ) -> AsyncIterator[Answer]:
        """Only this P can be asked: D is told its address before anybody knows whether it runs."""
        self._counters.pushes += 1
        prefill = asyncio.create_task(self._prefill_beside(legs, prefill_leg, backend))
        try:
            async with legs.decode(self._decode, decode_leg) as answer:
                yield answer
        except BaseException:
            prefill.cancel()
            raise
        finally:
            self._end_later(prefill)

    async def _prefill_beside(self, legs: Legs, body: Body, backend: Backend) -> None:
        # An answer without an object is usual here: D had everything before P's request ended.
        try:
            await legs.prefill(self._prefill, body, [backend])
        except (ProxyError, Refused) as error:
            self._note_failure(legs, error)

    @asynccontextmanager
    async def _decode_first(self, legs: Legs, body: Body) -> AsyncIterator[Answer]:
        expected = self.metaserver.expect(legs, body, self._note_failure)
        try:
            params = ask_for_prefill_at(self.metaserver.url)
            async with legs.decode(self._decode, decode_body(body, params)) as answer:
                yield answer
        except BaseException:
            self._cancel(expected.prefill)
            raise
        finally:
            self.metaserver.forget(legs)
            if expected.prefill is not None:
                self._end_later(expected.prefill)

    @staticmethod
    def _cancel(task: asyncio.Task[None] | None) -> None:
        if task is not None:
            task.cancel()

    def _note_failure(self, legs: Legs, error: Exception) -> None:
        self._counters.prefills_failed += 1
        log.warning(
            "request %s: the prefill leg failed, decode goes on: %s", legs.request_id, error
        )

    def _end_later(self, prefill: asyncio.Task[None]) -> None:
        """The client has its answer and does not wait for P's."""

        async def end() -> None:
            with suppress(TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(prefill, _GRACE_S)

        task = asyncio.create_task(end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
