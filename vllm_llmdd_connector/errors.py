"""The connector's exceptions.

A message names what failed, the identifiers, both values, and the next step. ``Local`` errors are
our own or the operator's mistakes; ``Remote`` ones are a peer's.
"""

from typing import Any


class ConnectorError(Exception):
    """Base of every error the connector raises on purpose."""


class ConfigError(ConnectorError, ValueError):
    """The configuration, the model or the machine cannot be served as asked; raised at start-up."""


class LocalProtocolError(ConnectorError):
    """Our own code asked a state machine for something its state does not allow."""


class RemoteProtocolError(ConnectorError):
    """A peer or a client sent something that is malformed or not allowed now."""


class LinkError(ConnectorError):
    """A data link to a peer could not be made or was lost."""


class TransferError(ConnectorError):
    """A KV transfer ended without valid data in the destination blocks."""


class TransferTimeout(TransferError):
    """A KV transfer stage ran out of time; the message names the stage."""


def status_name(status: Any) -> str:
    """Name of an LLM-DataDist status code, which is an IntEnum or, in older CANN, a plain Enum."""
    return str(getattr(status, "name", status))
