"""Every time limit of the connector in one place: options with defaults, and what is fixed.

``ConnectorConfig`` inherits the options. Whoever ends something because its time is over takes the
words from ``Deadlines.within``, so that an error names the limit and the option that raises it.
docs/configuration.md has the same as a table; a test compares the two.
"""

import math

import msgspec

from vllm_llmdd_connector.errors import ConfigError

MAX_TIMEOUT_MS = 2**31 - 1
"""The engines take milliseconds as 32 bits with a sign."""

RESEND_S = 1.0
"""A message without an answer is sent again after this long; answers are idempotent."""
IDLE_S = 30.0
"""A connection or thread that is kept for one peer ends after this long without work."""
KEEPALIVE_S = 20
"""A control connection on which nothing is said is probed after so long, and as often."""
KEEPALIVE_PROBES = 3
"""The peer is lost when so many are not answered, and when what is sent to it is not acknowledged
for as long as that takes."""
PEER_IDLE_S = 600.0
"""D ends a thread and link that no request has used for so long; the next one makes them anew."""
SWEEP_S = 1.0
"""P looks this often at most for D's that have fallen silent."""
MIN_RENEWAL_S = 0.01
"""D renews no more often, whatever lease a P claims to give."""
LINK_MARGIN_MS = 2000
"""Of engine ``ascend``: beyond ``link_timeout_ms``, which bounds only the connect inside of the
vendor's call."""
DROP_LINGER_S = 0.2
"""A server that stops tries this long to tell its P's that it needs nothing more."""
MAX_TEARDOWN_S = 5.0
"""Of vLLM's ``--shutdown-timeout``, what is left for ending the processes in order; vLLM gives
workers 4 s to end by themselves."""


class Deadlines(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits that can be set in ``kv_connector_extra_config``; each is above 0."""

    first_contact_timeout_s: float = 5.0
    """D: from a request's claim to P's first answer, the handshake included; then it is prefilled
    locally. P: wait of a prompt beyond ``unreserved_fraction`` for a D that never announced it."""

    metaserver_timeout_s: float = 30.0
    """D: how long a request that has asked a metaserver waits for a P to get in touch."""

    reserve_timeout_s: float = 120.0
    """D, push flow: from P's answer that it has the request until D has reserved blocks for it and
    tells P so. Between the two lie P's turn, behind the prefills that are queued there, and D's own
    wait for free blocks."""

    request_timeout_s: float = 60.0
    """D: how long a request waits behind other transfers; in the push flow also its wait for the
    last block once its blocks are reserved."""

    link_timeout_ms: int = 3000
    """D: one attempt to link one worker to one peer worker; there are two."""

    sync_kv_timeout_ms: int = 10000
    """Both: one pull of one cache at D, one layer of a push at P (LLM-DataDist's
    ``sync_kv_timeout``)."""

    release_timeout_s: float = 5.0
    """D: how long a worker waits for P's confirmation that the blocks it read were still held; on
    engine ``ascend`` also, beyond ``sync_kv_timeout_ms``, that P writes nothing of what D has given
    up."""

    lease_s: float = 30.0
    """P: how long finished prompts' blocks are held without a sign of life from D."""

    max_lease_s: float = 300.0
    """P: bound on a lease, however often it is renewed."""

    renewals_per_lease: float = 3.0
    """D: how often it renews in the span of P's ``lease_s``; all but one may be lost."""

    def within(self, option: str) -> str:
        """``within 5 s (raise first_contact_timeout_s)``, for an error's sentence."""
        unit = "ms" if option.endswith("_ms") else "s"
        return f"within {getattr(self, option):g} {unit} (raise {option})"

    def renewal_s(self, lease_s: float) -> float:
        """Time between two renewals of a claim whose P holds leases for ``lease_s``."""
        return max(lease_s / self.renewals_per_lease, MIN_RENEWAL_S)


DEADLINE_OPTIONS = tuple(Deadlines.__struct_fields__)


def check_deadlines(deadlines: Deadlines) -> None:
    """Refuse values that would end everything at once, or never.

    Raises:
        ConfigError: names the option and its value.
    """
    for name in DEADLINE_OPTIONS:
        value = getattr(deadlines, name)
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{name} is {value}, it must be above 0; change it or leave it out")
        if name.endswith("_ms") and value > MAX_TIMEOUT_MS:
            raise ConfigError(f"{name} is {value}, it must be below 2**31")
    if deadlines.max_lease_s < deadlines.lease_s:
        raise ConfigError(
            f"max_lease_s is {deadlines.max_lease_s}, below lease_s {deadlines.lease_s}; raise it"
        )
    if deadlines.renewals_per_lease <= 1:
        raise ConfigError(
            f"renewals_per_lease is {deadlines.renewals_per_lease:g}, so a lease would end before "
            "it is renewed; set it above 1"
        )


def drain_limit_s(shutdown_timeout_s: float) -> float:
    """How long a server that was asked to stop waits for what it has handed over.

    vLLM kills its processes when ``--shutdown-timeout`` is over, so some of it is left for an end
    in order; 0 without that option.
    """
    return max(shutdown_timeout_s - MAX_TEARDOWN_S, shutdown_timeout_s / 2)
