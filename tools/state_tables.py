"""Write the state tables of docs/protocol.md from the transition tables in the code.

    python tools/state_tables.py

A table stands between the lines ``<!-- states: NAME -->`` and ``<!-- end of states -->``; nothing
else of the page is changed. A test fails while the page is not what this writes.
"""

import re
from enum import Enum
from pathlib import Path
from typing import Any

from vllm_llmdd_connector.control.session_state import SESSION
from vllm_llmdd_connector.scheduler.handover import HANDOVER
from vllm_llmdd_connector.scheduler.request_state import REQUEST
from vllm_llmdd_connector.states import Transitions

PAGE = Path(__file__).resolve().parents[1] / "docs" / "protocol.md"
MACHINES: dict[str, Transitions[Any, Any]] = {
    "request": REQUEST,
    "handover": HANDOVER,
    "session": SESSION,
}
_TABLE = re.compile(r"(<!-- states: (\w+) -->\n).*?(<!-- end of states -->)", re.DOTALL)


def table(transitions: Transitions[Any, Any]) -> str:
    """One row for each transition; a final state is marked where it is reached."""
    rows = ["| state | event | next |", "|---|---|---|"]
    for state, events in transitions.items():
        for event, reached in events.items():
            rows.append(f"| {_code(state)} | {event.value} | {_next(reached, transitions)} |")
    return "\n".join(rows) + "\n"


def filled_in(page: str) -> str:
    """The page with its tables as the code has them; each machine has one place."""
    names = [match[2] for match in _TABLE.finditer(page)]
    if sorted(names) != sorted(MACHINES):
        raise ValueError(f"the page has places for {names}, the code has {list(MACHINES)}")
    return _TABLE.sub(lambda match: match[1] + table(MACHINES[match[2]]) + match[3], page)


def _code(state: Enum) -> str:
    return f"`{state.name}`"


def _next(reached: Enum, transitions: Transitions[Any, Any]) -> str:
    return _code(reached) if reached in transitions else f"{_code(reached)}, final"


if __name__ == "__main__":
    PAGE.write_text(filled_in(PAGE.read_text()))
