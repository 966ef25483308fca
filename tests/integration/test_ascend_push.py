"""Engine ``ascend`` pushes: P here, D's in processes of their own, over the vendor's names.

The package ``llm_datadist`` is our engine behind ``fakes.strict_vendor``: it writes D's blocks
without reservations, and raises a ``Violation`` where the vendor's documentation forbids a call.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fakes.clock import PATIENCE_S, wait_for
from fakes.decode_process import DecodeProcess
from fakes.install import vendor_importable
from fakes.push_rank import LAYERS, Layout, Prompt, PushRank, idle, known, pusher_of
from fakes.rank import Prefill

from vllm_llmdd_connector.layout.blocks import WantedBlocks
from vllm_llmdd_connector.metadata import ReceiveJob

OPTIONS = {"link_timeout_ms": 2000, "sync_kv_timeout_ms": 1500}
SLOW_COPIES = 3_000_000
"""Bytes per second; a layer of eight blocks takes about 10 ms."""
NUM_ABORTS = 16
LATEST_ABORT_S = 0.06


@pytest.fixture(scope="module")
def processes() -> Iterator[list[DecodeProcess]]:
    """Two D's for all tests; one costs an import of vLLM."""
    with ThreadPoolExecutor(2) as pool:
        started = list(pool.map(lambda _: DecodeProcess(), range(2)))
    yield started
    for process in started:
        process.close()


class Pair:
    """P's rank, and two D's that are linked to it on first use."""

    def __init__(
        self, layout: Layout, processes: list[DecodeProcess], engine: str = "ascend"
    ) -> None:
        options = {**OPTIONS, "engine": engine}
        self.rank = PushRank("kv_producer", layout, **options)
        self.p = Prefill(self.rank)
        self.ds = processes
        self.whole_transfers = 0
        for process in processes:
            process.call("open", layout, **options)
        backend: Any = self.rank.worker._engine._backend  # type: ignore[union-attr]
        if (transfers := backend.layer_transfers) is not None:
            self._count(transfers)

    def _count(self, transfers: Any) -> None:
        transfer = transfers.transfer_layers

        def counted(*args: Any) -> Any:
            self.whole_transfers += 1
            return transfer(*args)

        transfers.transfer_layers = counted

    def prompt(self, number: int, num_blocks: int = 6) -> Prompt:
        first = 1 + number * num_blocks
        return Prompt(self.rank, f"t{number}", list(range(first, first + num_blocks)))

    def receive(self, number: int, dst_blocks: list[int], first: int = 0) -> ReceiveJob:
        """Have prompt ``number`` from its block ``first`` on pushed into these."""
        return ReceiveJob(
            request_id=f"r{number}",
            transfer_id=f"t{number}",
            claim_id=number + 1,
            control_address=("127.0.0.1", self.p.server.port),
            session=1,
            workers=(self.rank.endpoint,),
            groups=[WantedBlocks(dst_blocks, first)],
            loaded_blocks=dst_blocks,
            timeout_s=60.0,
        )

    def submit(self, d: int, number: int, dst_blocks: list[int]) -> None:
        self.ds[d].call("step", [self.receive(number, dst_blocks)], {})

    def step(self, *prompts: Prompt, production: int = 1) -> None:
        """One forward over these prompts, whole."""
        chunks = [prompt.chunk(len(prompt.blocks), production) for prompt in prompts]
        self.rank.step(chunks=chunks)
        for layer in LAYERS:
            for prompt in prompts:
                prompt.compute(layer)
            self.rank.worker.layer_computed(layer)
        self.rank.worker.forward_ended()

    def assert_arrived(self, d: int, prompt: Prompt, dst_blocks: list[int]) -> None:
        """Every block of every layer, as P has it."""
        assert self.ds[d].call("digests", *dst_blocks) == self.rank.digests(*prompt.blocks)

    def close(self) -> None:
        for process in self.ds:
            if process.is_alive():
                assert process.call("violations") == []
                process.call("close")
        self.p.close()


@pytest.fixture(params=["pairs", "single"])
def layout(request: pytest.FixtureRequest) -> Layout:
    layout: Layout = request.param
    return layout


@pytest.fixture
def pair(
    layout: Layout, processes: list[DecodeProcess], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    violations: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: violations.append(args.exc_value))
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    with vendor_importable(monkeypatch):
        pair = Pair(layout, processes)
        yield pair
        pair.close()
    assert violations == []


only_pairs = pytest.mark.parametrize("layout", ["pairs"], indirect=True)


def test_layers_leave_as_they_are_computed_and_arrive_byte_exact(pair: Pair) -> None:
    prompt, into = pair.prompt(0), [9, 3, 12, 4, 5, 30]
    pair.submit(0, 0, into)
    known(pair.rank, 1)
    pair.rank.step(chunks=[prompt.chunk(4, 1)])
    for layer in LAYERS:
        prompt.run_layer(layer, 0, 4)
        expected = pair.rank.digests(*prompt.blocks[:4])[layer]
        wait_for(lambda: pair.ds[0].call("digests", *into[:4])[layer] == expected, layer)  # noqa: B023
    pair.rank.worker.forward_ended()
    pair.rank.step(chunks=[prompt.chunk(6, 1)])
    for layer in LAYERS[:2]:
        prompt.run_layer(layer, 4)
    for layer in LAYERS[2:]:
        prompt.compute(layer, 4)
    pair.rank.worker.forward_ended()
    received, failed = pair.ds[0].call("wait", "r0")
    assert (received, failed) == ({"r0"}, {})
    pair.assert_arrived(0, prompt, into)
    assert bool(pair.whole_transfers) is (len(pair.rank.tensors[LAYERS[0]]) == 2)


def test_two_decode_servers_at_once_and_one_in_the_middle_of_a_forward(pair: Pair) -> None:
    first, second = pair.prompt(0), pair.prompt(1)
    pair.submit(0, 0, [1, 2, 3, 4, 5, 6])
    known(pair.rank, 1)
    pair.rank.step(chunks=[first.chunk(6, 1), second.chunk(6, 2)])
    for layer in LAYERS[:2]:
        first.compute(layer)
        second.compute(layer)
        pair.rank.worker.layer_computed(layer)
    pair.submit(1, 1, [8, 9, 10, 11, 12, 13])
    known(pair.rank, 2)
    for layer in LAYERS[2:]:
        first.compute(layer)
        second.compute(layer)
        pair.rank.worker.layer_computed(layer)
    pair.rank.worker.forward_ended()
    for d, number, prompt, into in ((0, 0, first, range(1, 7)), (1, 1, second, range(8, 14))):
        assert pair.ds[d].call("wait", f"r{number}") == ({f"r{number}"}, {})
        pair.assert_arrived(d, prompt, list(into))


def test_four_requests_of_one_decode_server(pair: Pair) -> None:
    prompts = [pair.prompt(number) for number in range(4)]
    into = [list(range(1 + 6 * number, 7 + 6 * number)) for number in (3, 1, 0, 2)]
    for number in range(4):
        pair.submit(0, number, into[number])
    known(pair.rank, 4)
    chunks = [prompt.chunk(6, number + 1) for number, prompt in enumerate(prompts)]
    pair.rank.step(chunks=chunks)
    for layer in LAYERS:
        for prompt in prompts:
            prompt.compute(layer)
        pair.rank.worker.layer_computed(layer)
    pair.rank.worker.forward_ended()
    names = [f"r{number}" for number in range(4)]
    assert pair.ds[0].call("wait", *names) == (set(names), {})
    for number, prompt in enumerate(prompts):
        pair.assert_arrived(0, prompt, into[number])


class TestPreemption:
    @only_pairs
    def test_prompt_that_is_preempted_in_the_middle_arrives_from_its_next_production(
        self, pair: Pair
    ) -> None:
        prompt, into = pair.prompt(0), [9, 3, 12, 4, 5, 30]
        pair.submit(0, 0, into)
        known(pair.rank, 1)
        pair.rank.step(chunks=[prompt.chunk(4, 1)])
        for layer in LAYERS[:2]:
            prompt.run_layer(layer, 0, 4)
        pair.rank.worker.forward_ended()
        again = Prompt(pair.rank, "t0", [20, 21, 22, 23, 24, 25])
        for block in prompt.blocks:
            pair.rank.fill(block, 77)
        pair.rank.step(voids=[1])
        pair.step(again, production=2)
        assert pair.ds[0].call("wait", "r0") == ({"r0"}, {})
        pair.assert_arrived(0, again, into)

    @only_pairs
    def test_prompt_that_is_preempted_after_its_last_chunk_arrives_once(self, pair: Pair) -> None:
        """D copies so slowly that the void comes before ``Done``."""
        prompt, into = pair.prompt(0), [9, 3, 12, 4, 5, 30]
        pair.ds[0].call("slow_down", SLOW_COPIES)
        pair.submit(0, 0, into)
        known(pair.rank, 1)
        pair.step(prompt)
        pair.rank.step(voids=[1])
        for block in prompt.blocks:
            pair.rank.fill(block, 77)
        pair.ds[0].call("slow_down", 0)
        again = Prompt(pair.rank, "t0", [20, 21, 22, 23, 24, 25])
        pair.step(again, production=2)
        assert pair.ds[0].call("wait", "r0") == ({"r0"}, {})
        pair.assert_arrived(0, again, into)


class TestAbort:
    def changed_blocks(self, pair: Pair) -> int:
        """Abort requests at random moments of their pushes, each second time with another push
        beside; how often a block that was given to another request changed afterwards."""
        dice = random.Random(1)
        into = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16]]
        changed = 0
        pair.ds[0].call("slow_down", SLOW_COPIES)
        for number in range(NUM_ABORTS):
            names = [2 * number, 2 * number + 1][: 1 + number % 2]
            prompts = [pair.prompt(side, 8) for side in range(len(names))]
            for name, prompt, blocks in zip(names, prompts, into, strict=False):
                prompt.transfer_id = f"t{name}"
                pair.submit(0, name, blocks)
            chunks = [p.chunk(8, name + 1) for name, p in zip(names, prompts, strict=True)]
            pair.rank.step(chunks=chunks)
            for layer in LAYERS:
                pair.rank.worker.layer_computed(layer)
            time.sleep(dice.uniform(0, LATEST_ABORT_S))
            pair.ds[0].call("abort_and_fill", f"r{names[0]}", into[0], number + 1)
            pair.rank.worker.forward_ended()
            pair.ds[0].call("wait", *(f"r{name}" for name in names))
            idle(pair.rank)
            changed += not pair.ds[0].call("holds", into[0], number + 1)
        pair.ds[0].call("slow_down", 0)
        return changed

    def test_blocks_of_an_aborted_request_stay_as_their_next_owner_left_them(
        self, pair: Pair
    ) -> None:
        assert self.changed_blocks(pair) == 0

    @pytest.mark.parametrize("waits", [True, False])
    def test_p_s_last_word_is_what_prevents_it(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch, waits: bool
    ) -> None:
        """A call is under way at P, and has written nothing yet, when D gives the blocks up. If P
        did not wait for it, it would write into those of another request."""
        carrier: Any = pusher_of(pair.rank)._carrier
        if not waits:
            monkeypatch.setattr(carrier, "when_quiet", lambda is_meant, tell: tell())
        entered, go_on = hold_writes(pair, monkeypatch)
        prompt, into = pair.prompt(0), [9, 3, 12, 4, 5, 30]
        pair.submit(0, 0, into)
        known(pair.rank, 1)
        pair.step(prompt)
        assert entered.wait(PATIENCE_S)
        pair.ds[0].call("step", [], {"r0": ""})
        if waits:
            wait_for(lambda: carrier._when_written, "D's Cancel")
            assert pair.ds[0].call("reported") == set()
            go_on.set()
        pair.ds[0].call("wait", "r0")
        pair.ds[0].call("fill", into, 99)
        go_on.set()
        idle(pair.rank)
        assert pair.ds[0].call("holds", into, 99) is waits


def hold_writes(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> tuple[threading.Event, threading.Event]:
    """P's calls stop before they write: the first event says so, the second one lets them go on."""
    entered, go_on = threading.Event(), threading.Event()
    engine: Any = pair.rank.worker._engine
    push_layer, push_layers = engine.push_layer, engine.push_layers

    def hold() -> None:
        entered.set()
        assert go_on.wait(PATIENCE_S)

    def held_layer(*args: Any) -> None:
        hold()
        push_layer(*args)

    def held_layers(*args: Any) -> Any:
        *others, wait_for_layer = args

        def held_wait(layer: int) -> bool:
            is_computed = bool(wait_for_layer(layer))
            hold()
            return is_computed

        return push_layers(*others, held_wait)

    monkeypatch.setattr(engine, "push_layer", held_layer)
    monkeypatch.setattr(engine, "push_layers", held_layers)
    return entered, go_on


class TestOrder:
    @only_pairs
    def test_pull_waits_for_the_push_of_its_link(self, pair: Pair) -> None:
        prompt = pair.prompt(1)
        job = pair.p.hold(7)
        pair.submit(0, 1, [1, 2, 3, 9, 10, 11])
        known(pair.rank, 1)
        pair.rank.step(chunks=[prompt.chunk(6, 1)])
        prompt.run_layer(LAYERS[0])
        pair.ds[0].call("step", [job], {})
        for layer in LAYERS[1:]:
            prompt.run_layer(layer)
        pair.rank.worker.forward_ended()
        assert pair.ds[0].call("wait", "r1", "d7") == ({"r1", "d7"}, {})
        pair.assert_arrived(0, prompt, [1, 2, 3, 9, 10, 11])
        assert pair.ds[0].call("digests", 5, 4) == pair.rank.digests(1, 2)


class TestDeath:
    """The last ones: a D's process is stopped, then killed."""

    def submit_all(self, pair: Pair) -> list[Prompt]:
        prompts = [pair.prompt(number, 4) for number in range(4)]
        for number in (0, 1, 2):
            pair.submit(1, number, list(range(1 + 4 * number, 5 + 4 * number)))
        pair.submit(0, 3, [1, 2, 3, 4])
        known(pair.rank, 4)
        chunks = [prompt.chunk(4, number + 1) for number, prompt in enumerate(prompts)]
        pair.rank.step(chunks=chunks)
        for prompt in prompts:
            prompt.compute(LAYERS[0])
        pair.rank.worker.layer_computed(LAYERS[0])
        return prompts

    def finish(self, pair: Pair, prompts: list[Prompt]) -> None:
        for layer in LAYERS[1:]:
            for prompt in prompts:
                prompt.compute(layer)
            pair.rank.worker.layer_computed(layer)
        pair.rank.worker.forward_ended()
        assert pair.ds[0].call("wait", "r3") == ({"r3"}, {})
        pair.assert_arrived(0, prompts[3], [1, 2, 3, 4])

    def failed_calls(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
        """How many calls over a link have failed."""
        engine: Any = pair.rank.worker._engine
        push_layer, failures = engine.push_layer, list[Exception]()

        def recorded(*args: Any) -> None:
            try:
                push_layer(*args)
            except Exception as error:
                failures.append(error)
                raise

        monkeypatch.setattr(engine, "push_layer", recorded)
        return lambda: len(failures)

    @only_pairs
    def test_stopped_server_costs_another_one_a_single_timeout_and_comes_back(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        num_failed = self.failed_calls(pair, monkeypatch)
        prompts = self.submit_all(pair)
        stopped = pair.ds[1]
        wait_for(lambda: stopped.call("digests", 1) != {}, "an answer")
        stopped.stop()
        self.finish(pair, prompts)
        idle(pair.rank)
        assert num_failed() == 1
        stopped.resume()
        received, failed = stopped.call("wait", "r0", "r1", "r2")
        assert received == set()
        assert set(failed) == {"r0", "r1", "r2"}
        assert all("LLM_TIMEOUT" in reason for reason in failed.values()), failed
        again = pair.prompt(4, 4)
        pair.submit(1, 4, [20, 21, 22, 23])
        pair.step(again, production=9)
        assert "r4" in stopped.call("wait", "r4")[0]
        pair.assert_arrived(1, again, [20, 21, 22, 23])

    def test_stopped_server_comes_back_on_the_host_engine_too(
        self, processes: list[DecodeProcess]
    ) -> None:
        """Its link was never made anew, and every later push to it failed."""
        pair = Pair("single", processes, "host")
        stopped, first, second = pair.ds[1], pair.prompt(0), pair.prompt(1)
        pair.submit(1, 0, [1, 2, 3, 4, 5, 6])
        known(pair.rank, 1)
        stopped.stop()
        pair.step(first)
        idle(pair.rank)
        stopped.resume()
        failed = stopped.call("wait", "r0")[1]
        assert "LLM_TIMEOUT" in failed["r0"]
        pair.submit(1, 1, [8, 9, 10, 11, 12, 13])
        pair.step(second, production=2)
        assert stopped.call("wait", "r1")[0] == {"r1"}
        pair.assert_arrived(1, second, [8, 9, 10, 11, 12, 13])
        pair.close()

    @only_pairs
    def test_killed_server_costs_another_one_nothing(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        num_failed = self.failed_calls(pair, monkeypatch)
        prompts = self.submit_all(pair)
        pair.ds[1].kill()
        self.finish(pair, prompts)
        idle(pair.rank)
        assert num_failed() == 1
