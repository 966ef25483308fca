"""When layers and chunks leave: as soon as they are computed, and not before."""

from __future__ import annotations

import pytest
from pairs import MakePair, Pair, prompt_of

FIRST = "transfer-1"
NUM_LAYERS = 4


def reserve_inside_the_forward(pair: Pair, at_layer: int, transfer_id: str = FIRST) -> list[int]:
    """Have D reserve before P computes this layer of its next forward.

    Before each later layer all layers computed so far have to arrive, while P's forward goes on.
    Returns the list of layers for which that has been seen.
    """
    seen: list[int] = []

    def before(layer: int) -> None:
        if layer == at_layer and not seen:
            pair.step_d_until_reserved(transfer_id)
        if at_layer <= layer and len(seen) < NUM_LAYERS:
            pair.wait_for_copies(transfer_id, layer)
            seen.append(layer)

    pair.p.workers[0].before_layer = before
    return seen


class TestLayers:
    @pytest.mark.parametrize("at_layer", range(NUM_LAYERS))
    def test_s24_wrong_output_none_when_layers_leave_one_by_one(
        self, make_pair: MakePair, at_layer: int
    ) -> None:
        """D reserves in the middle of P's only forward."""
        pair = make_pair()
        prompt = prompt_of(60)
        seen = reserve_inside_the_forward(pair, at_layer)
        request_id = pair.push_after_announcement(prompt)
        pair.p.step()
        assert seen == list(range(at_layer, NUM_LAYERS))
        assert pair.network.violations == []
        assert pair.is_right(prompt, pair.run(request_id)[0])
        pair.finish()

    def test_s25_wrong_output_none_without_layer_hooks(self, make_pair: MakePair) -> None:
        pair = make_pair()
        pair.p.workers[0].use_layer_hooks = False
        prompt = prompt_of(60)

        def before(layer: int) -> None:
            if layer == 0:
                pair.step_d_until_reserved(FIRST)
            assert pair.journal.num_copies(FIRST) == 0

        pair.p.workers[0].before_layer = before
        request_id = pair.push_after_announcement(prompt)
        pair.p.step()
        pair.p.workers[0].before_layer = lambda layer: None
        pair.wait_for_copies(FIRST, NUM_LAYERS)
        assert pair.is_right(prompt, pair.run(request_id)[0])
        pair.finish()

    def test_two_reservations_and_two_prompts_share_a_forward(self, make_pair: MakePair) -> None:
        """Two D requests want the same prompt, a third one another prompt of the same step."""
        pair = make_pair(p={"max_num_batched_tokens": 256}, d={"enable_prefix_caching": False})
        prompts = [prompt_of(60), prompt_of(75, 2)]
        transfers = [pair.new_transfer(prompt) for prompt in prompts]
        ids = [pair.push_d(prompts[index], transfers[index]) for index in (0, 0, 1)]
        for transfer_id in transfers:
            pair.run_until(lambda name=transfer_id: name in pair.handovers._by_transfer)
        for prompt, transfer_id in zip(prompts, transfers, strict=True):
            pair.push_p(prompt, transfer_id)

        def before(layer: int) -> None:
            if layer == 2:
                pair.d.run_until(lambda: len(pair.journal.reserves) == 3)
                for transfer_id, number in zip(transfers, (2, 1), strict=True):
                    pair.wait_for_copies(transfer_id, number * layer)

        pair.p.workers[0].before_layer = before
        pair.p.step()
        pair.p.workers[0].before_layer = lambda layer: None
        for index, result in zip((0, 0, 1), pair.run(*ids), strict=True):
            assert pair.is_right(prompts[index], result)
        assert len(pair.journal.dones) == 3
        pair.finish()


class TestChunks:
    @pytest.mark.parametrize("length", [97, 100, 112])
    def test_full_blocks_in_the_middle_and_the_rest_at_the_end(
        self, make_pair: MakePair, length: int
    ) -> None:
        """Chunks of 40 tokens end inside blocks of 16."""
        pair = make_pair(p={"max_num_batched_tokens": 40})
        prompt = prompt_of(length)
        request_id = pair.push_after_announcement(prompt)
        pair.p.step()
        pair.step_d_until_reserved(FIRST)
        pair.wait_for_copies(FIRST, NUM_LAYERS)
        pair.p.step()
        pair.wait_for_copies(FIRST, 2 * NUM_LAYERS)
        assert [call.dst_positions for call in pair.network.pushes] == [(0, 1), (2, 3, 4)]
        pair.p.step()
        pair.wait_for_copies(FIRST, 3 * NUM_LAYERS)
        num_blocks = -(-(length - 1) // 16)
        assert pair.network.pushes[-1].dst_positions == tuple(range(5, num_blocks))
        assert pair.is_right(prompt, pair.run(request_id)[0])
        pair.finish()

    @pytest.mark.parametrize("length", [65, 81])
    def test_a_last_chunk_of_one_token(self, make_pair: MakePair, length: int) -> None:
        """In the first case D wants nothing that the last chunk computes."""
        pair = make_pair(p={"max_num_batched_tokens": length - 1})
        prompt = prompt_of(length)
        request_id = pair.push_after_announcement(prompt)
        pair.p.step()
        pair.step_d_until_reserved(FIRST)
        assert pair.is_right(prompt, pair.run(request_id)[0])
        assert len(pair.journal.dones) == 1
        pair.finish()

    def test_done_before_the_last_chunk_lets_p_go_on(self, make_pair: MakePair) -> None:
        """D has all that it wants after four of five chunks, and is through before P ends."""
        pair = make_pair(p={"max_num_batched_tokens": 16})
        prompt = prompt_of(65)
        request_id = pair.push_after_announcement(prompt)
        for _ in range(4):
            pair.p.step()
        assert pair.is_right(prompt, pair.d.run(request_id)[0])
        pair.finish()

    def test_layers_of_each_chunk_leave_inside_its_forward(self, make_pair: MakePair) -> None:
        pair = make_pair(p={"max_num_batched_tokens": 32})
        prompt = prompt_of(90)
        request_id = pair.push_after_announcement(prompt)
        pair.p.step()
        pair.step_d_until_reserved(FIRST)
        for chunk in (1, 2):
            arrived = chunk * NUM_LAYERS
            pair.wait_for_copies(FIRST, arrived)
            pair.p.workers[0].before_layer = lambda layer, arrived=arrived: pair.wait_for_copies(
                FIRST, arrived + layer
            )
            pair.p.step()
        pair.p.workers[0].before_layer = lambda layer: None
        assert pair.is_right(prompt, pair.run(request_id)[0])
        pair.finish()
