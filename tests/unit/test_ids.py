"""Identities: a restarted process is another cluster."""

from __future__ import annotations

from vllm_llmdd_connector.ids import (
    CLUSTER_ID_BITS,
    cluster_id,
    new_claim_id,
    new_instance,
    new_secret,
)


def test_cluster_id_is_stable_and_fits_in_48_bits() -> None:
    first = cluster_id("engine", "instance", 0)
    assert first == cluster_id("engine", "instance", 0)
    assert 0 < first < 2**CLUSTER_ID_BITS


def test_engine_process_start_and_rank_each_make_another_cluster() -> None:
    ids = {
        cluster_id(engine, instance, rank)
        for engine in ("engine", "engine2")
        for instance in ("a", "b")
        for rank in range(8)
    }
    assert len(ids) == 32


def test_parts_are_not_run_together() -> None:
    assert cluster_id("a", "bc", 1) != cluster_id("ab", "c", 1)


def test_drawn_words_do_not_repeat_and_claims_fit_in_63_bits() -> None:
    assert len({new_instance() for _ in range(100)} | {new_secret() for _ in range(100)}) == 200
    claims = {new_claim_id() for _ in range(100)}
    assert len(claims) == 100
    assert all(0 < claim < 2**63 for claim in claims)
