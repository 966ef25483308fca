"""Argument checks of ``link``, ``unlink`` and ``query_register_mem_status``."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from vllm_llmdd_connector.datadist.checks import (
    check,
    check_elements,
    check_int64,
    check_type,
    check_uint32,
    check_uint64,
)

__all__ = ["check_comm_id", "check_members"]

_MAX_NAME = 127
_MEMBERS = range(2, 5)


def check_members(
    comm_name: str, cluster_rank_info: Mapping[int, int], rank_table: str
) -> list[tuple[int, int]]:
    """The members as (cluster, rank) in ascending order of their ranks."""
    check_type("comm_name", comm_name, str)
    check(
        1 <= len(comm_name) <= _MAX_NAME,
        f"comm_name has {len(comm_name)} characters, must have 1 to {_MAX_NAME}",
    )
    check_type("cluster_rank_info", cluster_rank_info, dict)
    check_elements("cluster_rank_info", cluster_rank_info.keys(), int)
    check_elements("cluster_rank_info", cluster_rank_info.values(), int)
    check_type("rank_table", rank_table, str)
    check(
        len(cluster_rank_info) in _MEMBERS,
        f"cluster_rank_info has {len(cluster_rank_info)} entries, must have 2 to 4",
    )
    for cluster_id, rank in cluster_rank_info.items():
        check_uint64("cluster_rank_info key", cluster_id)
        check_uint32("cluster_rank_info value", rank)
    members = list(cluster_rank_info.items())
    check(
        all(lower[1] < higher[1] for lower, higher in pairwise(members)),
        f"cluster_rank_info must list its ranks in ascending order: {cluster_rank_info}",
    )
    return members


def check_comm_id(comm_id: int) -> None:
    check_int64("comm_id", comm_id)
