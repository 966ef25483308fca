"""``kv_layout`` on torch CPU tensors: regions are exactly the bytes of the layers' blocks."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from vllm_llmdd_connector.errors import ConfigError
from vllm_llmdd_connector.layout.kv_layout import CachePlan, group_geometry, plan_caches

NUM_BLOCKS = 6
SHAPE = (NUM_BLOCKS, 2, 4, 8)
"""``[num_blocks, kv_heads, block_size, 2 * head_size]``, as on vLLM's CPU build."""
BLOCK_LEN = 2 * 4 * 8 * 2
"""Bytes of a bfloat16 block of that shape."""


def tensor(shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """Every element differs from its neighbours."""
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.int16).view(torch.bfloat16).view(shape)


def plan_one(kv_caches: dict[str, Any]) -> list[CachePlan]:
    return plan_caches([list(kv_caches)], kv_caches, NUM_BLOCKS)


def bytes_of(block: torch.Tensor) -> bytes:
    return bytes(block.contiguous().view(torch.int8).numpy().tobytes())


def region_block(plan: CachePlan, region: int, block: int) -> bytes:
    where = plan.regions[region]
    return ctypes.string_at(where.base + block * where.block_len, where.block_len)


class TestOneTensorPerLayer:
    def test_layers_of_equal_blocks_are_regions_of_one_cache(self) -> None:
        kv_caches = {"a": tensor(), "b": tensor()}
        (plan,) = plan_one(kv_caches)
        assert (plan.model_id, plan.group_index, plan.num_blocks) == (0, 0, NUM_BLOCKS)
        assert plan.block_len == BLOCK_LEN
        assert [region.name for region in plan.regions] == ["a", "b"]
        for index, cache in enumerate(kv_caches.values()):
            for block in range(NUM_BLOCKS):
                assert region_block(plan, index, block) == bytes_of(cache[block])

    def test_layers_one_behind_another_in_one_storage_are_one_region_each(self) -> None:
        storage = tensor((2, *SHAPE))
        (plan,) = plan_one({"a": storage[0], "b": storage[1]})
        assert plan.regions[1].base - plan.regions[0].base == NUM_BLOCKS * BLOCK_LEN

    def test_layers_side_by_side_in_each_block_are_one_region(self) -> None:
        """vLLM 0.29 and later: layer ``l`` of block ``b`` lies at ``l`` strides in row ``b``."""
        storage = tensor((NUM_BLOCKS, 3, *SHAPE[1:]))
        (plan,) = plan_one({name: storage[:, i] for i, name in enumerate("abc")})
        (region,) = plan.regions
        assert (region.name, region.base) == ("a+b+c", storage.data_ptr())
        assert plan.block_len == 3 * BLOCK_LEN
        assert region_block(plan, 0, 4) == bytes_of(storage[4])

    def test_order_of_the_layers_does_not_matter_for_rows(self) -> None:
        storage = tensor((NUM_BLOCKS, 2, *SHAPE[1:]))
        (plan,) = plan_one({"second": storage[:, 1], "first": storage[:, 0]})
        assert plan.regions[0].name == "first+second"

    def test_two_storages_of_rows_are_two_regions(self) -> None:
        first, second = (tensor((NUM_BLOCKS, 2, *SHAPE[1:])) for _ in range(2))
        (plan,) = plan_one(
            {"a": first[:, 0], "b": first[:, 1], "c": second[:, 0], "d": second[:, 1]}
        )
        assert {region.base for region in plan.regions} == {first.data_ptr(), second.data_ptr()}

    def test_inner_order_of_a_block_is_free(self) -> None:
        cache = tensor((NUM_BLOCKS, 4, 2, 8)).permute(0, 2, 1, 3)
        (plan,) = plan_one({"a": cache})
        assert plan.block_len == BLOCK_LEN

    def test_layers_of_different_block_lengths_get_a_cache_each(self) -> None:
        plans = plan_one({"a": tensor(), "b": tensor((NUM_BLOCKS, 4, 4, 8)), "c": tensor()})
        assert [plan.model_id for plan in plans] == [0, 1]
        assert [len(plan.regions) for plan in plans] == [2, 1]
        assert [plan.block_len for plan in plans] == [BLOCK_LEN, 2 * BLOCK_LEN]


class TestSeveralTensorsPerLayer:
    @pytest.mark.parametrize("kind", [tuple, list])
    def test_k_and_v_are_regions_of_their_own(self, kind: type) -> None:
        k, v = tensor(), tensor()
        (plan,) = plan_one({"a": kind([k, v])})
        assert [(r.name, r.base) for r in plan.regions] == [
            ("a#0", k.data_ptr()),
            ("a#1", v.data_ptr()),
        ]

    def test_tuple_of_one_is_the_tensor_itself(self) -> None:
        cache = tensor()
        assert plan_one({"a": (cache,)}) == plan_one({"a": cache})

    def test_leading_dimension_of_two_is_k_and_v(self) -> None:
        cache = tensor((2, *SHAPE))
        (plan,) = plan_one({"a": cache})
        assert [region.base for region in plan.regions] == [
            cache[0].data_ptr(),
            cache[1].data_ptr(),
        ]
        assert region_block(plan, 1, 5) == bytes_of(cache[1, 5])

    def test_k_and_v_side_by_side_in_each_block_are_one_region(self) -> None:
        cache = tensor((NUM_BLOCKS, 2, 4, 2, 8))
        (plan,) = plan_one({"a": (cache[:, 0], cache[:, 1])})
        assert plan.regions[0].name == "a#0+a#1"
        assert plan.block_len == 2 * BLOCK_LEN

    def test_layer_of_k_and_v_is_one_step_of_a_transfer(self) -> None:
        (plan,) = plan_caches(
            [["a", "b"]], {"a": (tensor(), tensor()), "b": (tensor(), tensor())}, NUM_BLOCKS
        )
        assert (plan.tensors_per_layer, plan.num_layers) == (2, 2)
        (single,) = plan_caches([["a", "b"]], {"a": tensor(), "b": tensor()}, NUM_BLOCKS)
        assert (single.tensors_per_layer, single.num_layers) == (1, 2)

    def test_parts_of_different_lengths_as_in_mla_get_a_cache_each(self) -> None:
        latent, rope = tensor((NUM_BLOCKS, 4, 1, 64)), tensor((NUM_BLOCKS, 4, 1, 8))
        assert [plan.block_len for plan in plan_one({"a": (latent, rope)})] == [512, 64]


class TestKernelBlocks:
    def test_s27_wrong_output_none_with_smaller_kernel_blocks(self) -> None:
        cache = tensor((NUM_BLOCKS * 4, 2, 1, 8))
        (plan,) = plan_one({"a": cache})
        assert (plan.num_blocks, plan.block_len) == (NUM_BLOCKS, 4 * 2 * 8 * 2)
        assert region_block(plan, 0, 2) == bytes_of(cache[8:12])

    def test_they_show_in_the_geometry(self) -> None:
        whole = group_geometry("Full", 4, ["a"], {"a": tensor((NUM_BLOCKS, 4, 16))}, NUM_BLOCKS)
        small = group_geometry("Full", 4, ["a"], {"a": tensor((NUM_BLOCKS * 4, 16))}, NUM_BLOCKS)
        assert whole.parts[0].block_len == small.parts[0].block_len
        assert whole != small

    def test_gaps_between_them_are_refused(self) -> None:
        cache = tensor((NUM_BLOCKS * 4, 2, 16))[:, 0]
        with pytest.raises(ConfigError, match="4 kernel blocks in a block with gaps"):
            plan_one({"a": cache})


class TestSharing:
    def test_layers_that_share_their_kv_are_one_region(self) -> None:
        cache = tensor()
        (plan,) = plan_one({"owner": cache, "reader": cache, "other": tensor()})
        assert [region.name for region in plan.regions] == ["owner", "other"]

    @pytest.mark.parametrize("shared", [0, 1, 2])
    def test_any_layer_of_a_row_may_be_shared(self, shared: int) -> None:
        """The row's last layer, shared, was taken for the start of another row and refused."""
        storage = tensor((NUM_BLOCKS, 3, *SHAPE[1:]))
        layers = {name: storage[:, i] for i, name in enumerate("abc")}
        plans = plan_one({**layers, "reader": storage[:, shared]})
        assert plans == plan_one(layers)

    def test_groups_that_overlay_the_same_memory_keep_their_own_caches(self) -> None:
        cache = tensor()
        plans = plan_caches([["full"], ["window"]], {"full": cache, "window": cache}, NUM_BLOCKS)
        assert [(plan.model_id, plan.group_index) for plan in plans] == [(0, 0), (1, 1)]
        assert plans[0].regions[0].base == plans[1].regions[0].base


class TestLayersOfRegions:
    """A region is computed when all layers that it names are; a push waits for that."""

    def test_part_names_its_layer(self) -> None:
        (plan,) = plan_one({"a": (tensor(), tensor()), "b": (tensor(), tensor())})
        assert [(region.name, region.layers) for region in plan.regions] == [
            ("a#0", ("a",)),
            ("a#1", ("a",)),
            ("b#0", ("b",)),
            ("b#1", ("b",)),
        ]

    def test_joined_row_names_every_layer_in_it(self) -> None:
        storage = tensor((NUM_BLOCKS, 2, *SHAPE[1:]))
        (plan,) = plan_one({"a": storage[:, 0], "b": storage[:, 1]})
        assert [region.layers for region in plan.regions] == [("a", "b")]

    def test_shared_region_names_the_first_layer_which_writes_it(self) -> None:
        cache = tensor()
        (plan,) = plan_one({"writer": cache, "reader": cache})
        assert [region.layers for region in plan.regions] == [("writer",)]


class TestRefusal:
    def test_layer_without_a_tensor_is_named(self) -> None:
        with pytest.raises(ConfigError, match="layer lost of the KV cache has no registered"):
            plan_caches([["lost"]], {}, NUM_BLOCKS)

    def test_number_of_blocks_that_does_not_fit_is_named_with_the_shape(self) -> None:
        with pytest.raises(ConfigError, match=r"shape \[7, 2, 4, 8\]: .* 6 blocks"):
            plan_one({"a": tensor((7, 2, 4, 8))})

    def test_gaps_inside_a_block_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="gaps inside a block"):
            plan_one({"a": tensor()[..., :4]})

    def test_broadcast_tensor_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="gaps inside a block"):
            plan_one({"a": tensor()[:, :1].expand(SHAPE)})

    def test_rows_with_a_layer_of_another_group_between_are_refused(self) -> None:
        storage = tensor((NUM_BLOCKS, 3, *SHAPE[1:]))
        with pytest.raises(ConfigError, match="use a layout with one region per layer"):
            plan_one({"a": storage[:, 0], "c": storage[:, 2]})

    def test_row_that_ends_early_is_refused(self) -> None:
        storage = tensor((NUM_BLOCKS, 3, *SHAPE[1:]))
        with pytest.raises(ConfigError, match=f"only {2 * BLOCK_LEN} of them"):
            plan_one({"a": storage[:, 0], "b": storage[:, 1]})


class TestGeometry:
    def test_geometry_says_what_both_sides_must_have(self) -> None:
        geometry = group_geometry("Full", 4, ["a", "b"], {"a": tensor(), "b": tensor()}, NUM_BLOCKS)
        assert (geometry.kind, geometry.block_size, geometry.layers) == ("Full", 4, ("a", "b"))
        (part,) = geometry.parts
        assert (part.dtype, part.shape, part.block_len) == ("bfloat16", (1, 2, 4, 8), BLOCK_LEN)

    def test_number_of_blocks_does_not_show(self) -> None:
        small = group_geometry("Full", 4, ["a"], {"a": tensor()}, NUM_BLOCKS)
        large = group_geometry("Full", 4, ["a"], {"a": tensor((12, 2, 4, 8))}, 12)
        assert small == large

    def test_order_inside_a_block_shows(self) -> None:
        plain = group_geometry("Full", 4, ["a"], {"a": tensor()}, NUM_BLOCKS)
        turned = tensor((NUM_BLOCKS, 4, 2, 8)).permute(0, 2, 1, 3)
        assert plain != group_geometry("Full", 4, ["a"], {"a": turned}, NUM_BLOCKS)

    def test_dtype_of_equal_size_shows(self) -> None:
        plain = group_geometry("Full", 4, ["a"], {"a": tensor()}, NUM_BLOCKS)
        half = tensor().view(torch.float16)
        assert plain != group_geometry("Full", 4, ["a"], {"a": half}, NUM_BLOCKS)
