"""The harness calls a connector as the imported vLLM version does."""

from __future__ import annotations

from collections.abc import Callable

from harness import LOOPBACK, VERSION, Engine
from pairs import prompt_of

MakeEngine = Callable[..., Engine]


def test_hooks_come_in_the_order_of_this_version(make_engine: MakeEngine) -> None:
    engine = make_engine(**LOOPBACK, num_layers=1)
    engine.add_request(prompt_of(20))
    engine.step()
    layer = "model.layers.0.self_attn.attn"
    results = ["get_finished"] if VERSION < (0, 30) else ["get_transfer_results"]
    forward = [f"wait_for_layer_load {layer}", f"save_kv_layer {layer}"]
    load = ["start_load_kv"]
    around = load + forward if VERSION < (0, 29) else forward + load
    assert engine.workers[0].connector.hooks == [
        "register_kv_caches",
        "handle_preemptions",
        "bind_connector_metadata",
        *around,
        "wait_for_save",
        *results,
        "get_block_ids_with_load_errors",
        "clear_connector_metadata",
    ]


def test_a_replayed_graph_calls_no_layer_hooks(make_engine: MakeEngine) -> None:
    engine = make_engine(**LOOPBACK)
    engine.workers[0].use_layer_hooks = False
    engine.run(engine.add_request(prompt_of(20)))
    hooks = engine.workers[0].connector.hooks
    assert not [hook for hook in hooks if "layer" in hook.split()[0]]
    assert "wait_for_save" in hooks


def test_a_step_without_tokens_calls_the_hooks_of_this_version(make_engine: MakeEngine) -> None:
    p, d = make_engine(**LOOPBACK, engine_id="P"), make_engine(**LOOPBACK, engine_id="D")
    prompt = prompt_of(20)
    leg = p.add_request(prompt, kv_transfer_params={"do_remote_decode": True})
    d.add_request(prompt, kv_transfer_params=p.run(leg)[0].kv_transfer_params)
    assert d.step() is False
    hooks = d.workers[0].connector.hooks
    assert "start_load_kv" in hooks
    assert ("wait_for_save" in hooks) == (VERSION >= (0, 31))


def test_the_scheduler_side_gets_every_rank_s_handshake(make_engine: MakeEngine) -> None:
    engine = make_engine(**LOOPBACK, tp_size=2)
    assert {rank: md.rank for rank, md in engine.connector.handshakes.items()} == {0: 0, 1: 1}
    ids = {worker.connector.engine_id for worker in engine.workers}
    assert ids == {engine.connector.engine_id}
