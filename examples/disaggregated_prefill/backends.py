"""The vLLM servers behind the proxy: which is next, and what is said when one does not answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Stage(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass
class Backend:
    """One server. `resting_until` is on the pool's clock."""

    url: str
    stage: Stage
    resting_until: float = 0.0
    control: tuple[str, int] | None = None
    """Where the connector of a prefill server is dialled; None until it is known."""
    control_is_given: bool = False
    """The address is the operator's; no answer changes it."""

    def learn_control(self, params: dict[str, Any]) -> None:
        """Take the address from an answer of this server.

        A known one is replaced too: a restarted server has another port. Until it has answered, D
        is sent to the old one, where nobody listens, and prefills by itself.
        """
        host, port = params.get("remote_host"), params.get("remote_port")
        if self.control_is_given or not isinstance(host, str) or isinstance(port, bool):
            return
        if isinstance(port, int | float) and 0 < port < 65536:
            self.control = (host, int(port))


@dataclass
class Pool:
    """The servers of one stage, used in turn.

    A server that refused a connection rests for `rest_s`: it is then asked after all others, so
    that a host which drops packets costs its connect timeout once and not for every request. It
    is never left out, because nothing else would notice that it is back.
    """

    stage: Stage
    backends: list[Backend]
    clock: Callable[[], float]
    rest_s: float = 5.0
    _next: int = 0

    def in_turn(self) -> list[Backend]:
        """Return every server once, in the order in which they should be tried."""
        start = self._next % len(self.backends)
        self._next += 1
        turned = self.backends[start:] + self.backends[:start]
        now = self.clock()
        return sorted(turned, key=lambda backend: backend.resting_until > now)

    def rest(self, backend: Backend) -> None:
        backend.resting_until = self.clock() + self.rest_s


@dataclass
class Counters:
    """What the proxy did since it started; shown by /health."""

    requests: int = 0
    prefills: int = 0
    prefills_failed: int = 0
    """Beside a decode leg, whose answer counted."""
    prefills_skipped: int = 0
    pushes: int = 0
    metaserver_posts: int = 0
    params_missing: int = 0
    client_params_dropped: int = 0
    retries: int = 0
    client_disconnects: int = 0
    errors: dict[str, int] = field(default_factory=dict)

    def count_error(self, kind: str) -> None:
        self.errors[kind] = self.errors.get(kind, 0) + 1


class ProxyError(Exception):
    """An answer of the proxy's own: what failed, at which server and stage, and what to do."""

    def __init__(self, status: int, kind: str, message: str, **where: Any) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.where = where

    def to_bytes(self) -> bytes:
        """Return JSON in the shape OpenAI's clients know, with `stage` and `server` added."""
        error = {"message": str(self), "type": self.kind, "param": None, "code": self.status}
        return json.dumps({"error": {**error, **self.where}}).encode()


def none_reachable(stage: Stage, tried: dict[str, str]) -> ProxyError:
    """No server of the stage took the request: nothing was computed, so a client may try again."""
    causes = "; ".join(f"{url}: {cause}" for url, cause in tried.items())
    return ProxyError(
        503,
        f"{stage.value}_unavailable",
        f"no {stage.value} server accepted a connection ({causes}); start one, or correct "
        f"--{stage.value} of the proxy",
        stage=stage.value,
        server=", ".join(tried),
    )


def broke_off(backend: Backend, cause: str) -> ProxyError:
    """A server took the request and then went away: it is not known how far it came."""
    return ProxyError(
        502,
        f"{backend.stage.value}_broke_off",
        f"{backend.stage.value} server {backend.url} closed the connection before its answer was "
        f"complete ({cause}); see that server's log, then send the request again",
        stage=backend.stage.value,
        server=backend.url,
    )


def timed_out(backend: Backend, seconds: float) -> ProxyError:
    return ProxyError(
        504,
        f"{backend.stage.value}_timeout",
        f"{backend.stage.value} server {backend.url} gave no answer within {seconds:g} s; it "
        f"may be overloaded: add a server or raise --{backend.stage.value}-timeout",
        stage=backend.stage.value,
        server=backend.url,
    )


def failed(backend: Backend, status: int, text: str) -> ProxyError:
    """A server answered with a 5xx status: its fault, not the client's."""
    return ProxyError(
        502,
        f"{backend.stage.value}_failed",
        f"{backend.stage.value} server {backend.url} answered {status}: {text[:500]}; see that "
        "server's log",
        stage=backend.stage.value,
        server=backend.url,
        upstream_status=status,
    )
