"""State machines as tables: state, event, next state.

Each is an enum of states, an enum of events whose values are their words, and one table; a final
state has no row. ``docs/protocol.md`` shows the tables (``tools/state_tables.py`` writes them).
"""

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from vllm_llmdd_connector.errors import LocalProtocolError

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)

Transitions = Mapping[State, Mapping[Event, State]]


def next_state(transitions: Transitions[State, Event], state: State, event: Event) -> State:
    """Raises ``LocalProtocolError`` for an event that does not belong to the state."""
    reached = transitions.get(state, {}).get(event)
    if reached is None:
        raise LocalProtocolError(
            f"{type(state).__name__} {state.name}: {event.name} ({event.value}) is not for it"
        )
    return reached
