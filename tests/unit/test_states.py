"""State machines as tables, and the page that shows them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from vllm_llmdd_connector.control.session_state import SESSION, SessionEvent, SessionState
from vllm_llmdd_connector.errors import LocalProtocolError
from vllm_llmdd_connector.scheduler.handover import HANDOVER, HandoverEvent, HandoverState
from vllm_llmdd_connector.scheduler.request_state import REQUEST, RequestEvent, RequestState
from vllm_llmdd_connector.states import next_state

TOOL = Path(__file__).resolve().parents[2] / "tools" / "state_tables.py"

Table = Mapping[Any, Mapping[Any, Any]]
MACHINES = [
    (SESSION, SessionState, SessionEvent, {SessionState.OPENING}),
    (HANDOVER, HandoverState, HandoverEvent, {HandoverState.AWAITED}),
    (REQUEST, RequestState, RequestEvent, {RequestState.SUMMONING, RequestState.CLAIMING}),
]


@pytest.fixture
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("state_tables", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("table", "states", "events", "first"), MACHINES)
class TestTables:
    def test_every_state_is_reached_and_every_event_used(
        self, table: Table, states: type[Enum], events: type[Enum], first: set[Any]
    ) -> None:
        reached = {state for row in table.values() for state in row.values()}
        assert reached | first == set(states)
        assert {event for row in table.values() for event in row} == set(events)

    def test_every_state_leads_to_a_final_one(
        self, table: Table, states: type[Enum], events: type[Enum], first: set[Any]
    ) -> None:
        ending = set(states) - set(table)
        assert ending
        for _ in states:
            ending |= {state for state, row in table.items() if ending & set(row.values())}
        assert ending == set(states)

    def test_final_state_has_no_event(
        self, table: Table, states: type[Enum], events: type[Enum], first: set[Any]
    ) -> None:
        for state in set(states) - set(table):
            for event in events:
                with pytest.raises(LocalProtocolError, match=f"{state.name}: {event.name}"):
                    next_state(table, state, event)


def test_event_of_another_state_is_refused_in_words() -> None:
    with pytest.raises(LocalProtocolError, match=r"SessionState READY: WELCOMED .*is not for it"):
        next_state(SESSION, SessionState.READY, SessionEvent.WELCOMED)


class TestPage:
    def test_tables_of_the_page_are_those_of_the_code(self, tool: Any) -> None:
        page = tool.PAGE.read_text()
        assert tool.filled_in(page) == page, "run python tools/state_tables.py"

    def test_changed_table_is_noticed(self, tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        page = tool.PAGE.read_text()
        monkeypatch.setitem(tool.MACHINES, "session", {**SESSION, SessionState.READY: {}})
        assert tool.filled_in(page) != page

    def test_page_without_a_place_for_a_machine_is_refused(self, tool: Any) -> None:
        with pytest.raises(ValueError, match="places for"):
            tool.filled_in("<!-- states: session -->\n<!-- end of states -->")
