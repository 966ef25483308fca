"""Hangs: whatever happens to the peer at any stage, D's request ends and nothing stays held."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
from pairs import CONNECTOR, MakePair, Pair, prompt_of
from stages import PROMPT, STAGES, Held, Scene, Stage, refused
from wire import Fault, Wire, doubled, late, lost, lost_once, overtaken

PASSING: list[Fault] = [lost, lost_once, doubled, overtaken, late]
"""Faults of messages; both servers live on."""


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    return Wire(monkeypatch)


@pytest.fixture
def scene(make_pair: MakePair, make_engine: Any, wire: Wire) -> Scene:
    return Scene(make_pair, make_engine, wire)


def table() -> list[object]:
    return [pytest.param(stage, id=name) for name, stage in STAGES.items()]


@pytest.mark.parametrize("fault", PASSING)
@pytest.mark.parametrize("stage", table())
def test_s01_s03_s45_hang_when_messages_fail(scene: Scene, stage: Stage, fault: Fault) -> None:
    is_repaired = (
        fault is doubled
        or stage.is_optional
        or (stage.is_repeated and fault in (lost_once, overtaken))
    )
    scene.strike(stage, fault, until_limit=not is_repaired)
    assert scene.ended_as(is_right=is_repaired or not stage.has_blocks)
    scene.wire.heal()
    scene.check_d()
    scene.check_p()


@pytest.mark.parametrize("stage", [p for p in table() if p.id.endswith("answer") or p.id == "done"])
def test_s03_s04_hang_when_p_refuses(scene: Scene, stage: Stage) -> None:
    """P that cannot go on says so, and D does not wait for its limit."""
    scene.strike(stage, refused, until_limit=False)
    assert scene.ended_as(is_right=not stage.has_blocks)
    scene.wire.heal()
    scene.check_d()
    scene.check_p()


@pytest.mark.parametrize("stage", table())
class TestPIsGone:
    def test_s01_s08_hang_when_p_is_killed(self, scene: Scene, stage: Stage) -> None:
        scene.stop_p(stage)
        scene.pair.p.close()
        scene.end_d()
        assert scene.ended_as(is_right=not stage.has_blocks)
        scene.check_d()

    def test_s01_s45_hang_when_p_is_stopped(self, scene: Scene, stage: Stage) -> None:
        """What it says when it goes on comes too late for this request, and harms no other."""
        scene.stop_p(stage)
        scene.end_d(by_limits=True)
        assert scene.ended_as(is_right=not stage.has_blocks)
        scene.wire.heal()
        scene.check_d()
        scene.check_p()

    def test_s41_hang_when_p_is_restarted(self, scene: Scene, stage: Stage) -> None:
        """D meets a process that knows nothing of the request."""
        scene.stop_p(stage)
        scene.restart_p()
        scene.end_d()
        assert scene.ended_as(is_right=not stage.has_blocks)
        scene.wire.heal()
        scene.check_d()
        scene.check_p()


@pytest.fixture
def link(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Held:
    held = Held(scene.pair.network.takes_link)
    monkeypatch.setattr(scene.pair.network, "takes_link", held)
    return held


class TestEngineCalls:
    """P meets its fate while D's engine is in a call to it."""

    def test_s08_hang_when_p_is_killed_in_a_link(self, scene: Scene, link: Held) -> None:
        scene.start(is_push=False)
        scene.pair.run_until(link.seen.is_set)
        scene.pair.p.close()
        link.gate.set()
        scene.end_d()
        assert scene.ended_as(is_right=False)
        scene.check_d()

    def test_s41_hang_when_p_is_restarted_in_a_link(self, scene: Scene, link: Held) -> None:
        scene.start(is_push=False)
        scene.pair.run_until(link.seen.is_set)
        scene.restart_p()
        link.gate.set()
        scene.end_d()
        assert scene.ended_as(is_right=False)
        scene.check_d()
        scene.check_p()

    @pytest.mark.parametrize("num_failures", [1, 2])
    @pytest.mark.parametrize("is_push", [False, True])
    def test_s09_hang_when_a_link_fails(
        self, scene: Scene, num_failures: int, is_push: bool
    ) -> None:
        """A link is tried twice; a request that could not be linked leaves the next one its own
        try."""
        faults = scene.pair.network.faults(scene.pair.producers[0])
        faults.num_link_failures = num_failures
        scene.start(is_push)
        scene.pair.run(scene.request_id)
        assert scene.ended_as(is_right=num_failures == 1)
        scene.check_d()
        scene.check_p()

    @pytest.mark.parametrize("is_restarted", [False, True])
    def test_s01_s41_hang_when_p_ends_in_a_pull(self, scene: Scene, is_restarted: bool) -> None:
        faults = scene.pair.network.faults(scene.pair.producers[0])
        faults.pull_gate = threading.Event()
        scene.start(is_push=False)
        scene.pair.run_until(faults.pull_started.is_set)
        if is_restarted:
            scene.restart_p()
        else:
            scene.pair.p.close()
        faults.pull_gate.set()
        scene.end_d()
        assert scene.ended_as(is_right=False)
        scene.check_d()
        if is_restarted:
            scene.check_p()

    @pytest.mark.parametrize("is_restarted", [False, True])
    def test_s01_s41_hang_when_p_ends_in_a_push(self, scene: Scene, is_restarted: bool) -> None:
        faults = scene.pair.push_faults()
        faults.gate, faults.hold_at = threading.Event(), 1
        scene.start(is_push=True)
        scene.pair.run_until(faults.held.is_set)
        if is_restarted:
            scene.restart_p()
        else:
            scene.pair.p.close()
        faults.gate.set()
        scene.end_d()
        assert scene.ended_as(is_right=False)
        scene.check_d()
        if is_restarted:
            scene.check_p()


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("is_push", [False, True])
def test_s04_hang_when_the_control_port_is_wrong(
    scene: Scene, log: list[str], is_open: bool, is_push: bool
) -> None:
    """Nobody listens there, or somebody who does not answer."""
    pair = scene.pair
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        if not is_open:
            stranger.close()
        params = {
            "do_remote_prefill": True,
            "remote_host": "127.0.0.1",
            "remote_port": port,
            "transfer_id": "t",
        }
        if not is_push:
            params = pair.params(PROMPT) | {"remote_port": port}
        scene.request_id = pair.decode(PROMPT, params)
        if is_open:
            client = pair.d.connector._scheduler._client
            pair.d.run_until(lambda: ("127.0.0.1", port) in client._sessions)
        scene.end_d(by_limits=is_open)
    assert scene.ended_as(is_right=True)
    assert any(f"127.0.0.1:{port}" in line for line in log)
    scene.check_d()
    scene.check_p()


@pytest.mark.parametrize("has_blocks", [False, True])
def test_s05_hang_when_d_is_killed_and_p_serves_others(
    make_pair: MakePair, make_engine: Any, has_blocks: bool
) -> None:
    """The dead D has announced itself, or was being pushed to."""
    pair = make_pair()
    faults = pair.push_faults()
    faults.gate = threading.Event()
    transfer_id = pair.new_transfer(PROMPT)
    pair.push_d(PROMPT, transfer_id)
    pair.run_until(lambda: transfer_id in pair.handovers._by_transfer)
    at_p = pair.push_p(PROMPT, transfer_id)
    if has_blocks:
        pair.run_until(faults.held.is_set)
    pair.d.close()
    other = Pair(
        pair.p,
        make_engine(**CONNECTOR, role="kv_consumer"),
        pair.network,
        pair.p_clock,
        pair.journal,
    )
    other.journal.watch(other.d)
    for flow in (other.transfer, lambda prompt: other.run(other.push(prompt))[0]):
        prompt = prompt_of(70, 3)
        assert other.is_right(prompt, flow(prompt))
    faults.gate.set()
    other.p.run(at_p)
    other.p_clock.advance(400)
    other.finish()


def test_s09_hang_no_long_decode_while_others_are_fetched(make_pair: MakePair) -> None:
    """Decode steps and transfers of others go on beside each other, by pull and by push."""
    pair = make_pair(num_blocks=200, pipeline_depth=2)
    prompt = prompt_of(60)
    long = pair.decode(prompt, pair.params(prompt), max_tokens=150)
    pair.run_until(lambda: bool(pair.d.results[long].tokens))
    others = {}
    for seed in range(2, 6):
        other = prompt_of(70, seed)
        is_push = seed % 2
        others[pair.push(other) if is_push else pair.decode(other, pair.params(other))] = other
    for request_id, other in others.items():
        assert pair.is_right(other, pair.run(request_id)[0])
    assert not pair.d.results[long].finished
    assert pair.is_right(prompt, pair.run(long)[0])
    pair.finish()
