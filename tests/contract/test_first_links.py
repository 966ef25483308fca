"""First generation: link_clusters, unlink_clusters, check_link_status, switch_role."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from contract.cluster import free_port
from contract.engines import is_vendor
from contract.errors import refused, wait_until
from contract.fixtures import Linked, MakeFirst
from contract.memory import moved
from contract.peer import Peer


class TestLinks:
    def test_c76_prompt_may_not_link(self, make_first: MakeFirst) -> None:
        local = make_first("PROMPT")
        info = local._info(2, 1)
        status, statuses = local.datadist.link_clusters([info])
        assert (status.name, statuses) == ("LLM_PARAM_INVALID", [])

    def test_c77_list_and_overall_status(self, linked: Linked) -> None:
        """Vendor: the overall status stays a success when only refusals are in the list."""
        local, peer = linked
        again, repeated = local._info(2, peer.listen_port), local._info(2, peer.listen_port)
        closed = local._info(9, 1)
        status, statuses = local.datadist.link_clusters([again, repeated])
        assert [entry.name for entry in statuses] == ["LLM_ALREADY_LINK", "LLM_REPEAT_REQUEST"]
        assert status.name == ("LLM_SUCCESS" if is_vendor(local.api) else "LLM_ALREADY_LINK")
        status, statuses = local.datadist.link_clusters([again, closed])
        assert [entry.name for entry in statuses] == ["LLM_ALREADY_LINK", "LLM_LINK_FAILED"]
        assert status.name == "LLM_LINK_FAILED"

    def test_c77_number_of_clusters(self, make_first: MakeFirst) -> None:
        local = make_first()
        infos = [local._info(cluster_id, 1) for cluster_id in range(2, 19)]
        status, statuses = local.datadist.link_clusters(infos)
        assert (status.name, statuses) == ("LLM_CLUSTER_NUM_EXCEED_LIMIT", [])
        status, statuses = local.datadist.link_clusters(infos[:16])
        assert (status.name, len(statuses)) == ("LLM_LINK_FAILED", 16)

    def test_addresses_must_fit(self, make_first: MakeFirst) -> None:
        local = make_first()
        two, other = local._info(2, 1), local._info(3, 1)
        two.append_remote_ip_info("127.0.0.1", 2)
        other._local[0] = (other._local[0][0], 5)
        for infos in ([two], [local._info(2, 1), other]):
            status, statuses = local.datadist.link_clusters(infos)
            assert (status.name, statuses) == ("LLM_PARAM_INVALID", [])

    def test_silent_listener_times_out(self, make_first: MakeFirst, prompt: Peer) -> None:
        local = make_first()
        prompt.stop()
        try:
            status, statuses = local.datadist.link_clusters(
                [local._info(2, prompt.listen_port)], 200
            )
        finally:
            prompt.resume()
        assert status.name == "LLM_LINK_FAILED"
        assert [entry.name for entry in statuses] == ["LLM_WAIT_PROCESS_TIMEOUT"]

    def test_one_request_at_a_time(self, make_first: MakeFirst, prompt: Peer) -> None:
        local = make_first()
        infos = [local._info(2, prompt.listen_port)]
        links = local.native.first_links
        prompt.stop()
        try:
            waiting = threading.Thread(target=local.datadist.link_clusters, args=(infos, 1000))
            waiting.start()
            wait_until(links._running.locked)
            assert local.datadist.link_clusters(infos)[0].name == "LLM_PROCESSING_LINK"
            assert local.datadist.unlink_clusters(infos)[0].name == "LLM_PROCESSING_LINK"
            waiting.join()
        finally:
            prompt.resume()

    def test_c79_unlink_and_link_again(self, linked: Linked) -> None:
        local, peer = linked
        source, cache = peer.allocate_rows(), local.allocate_rows()
        key = local.api.CacheKeyByIdAndIndex(2, source)
        infos = [local._info(2, peer.listen_port), local._info(7, 1)]
        status, statuses = local.datadist.unlink_clusters(infos)
        assert status.name == "LLM_SUCCESS"
        assert [entry.name for entry in statuses] == ["LLM_SUCCESS", "LLM_NOT_YET_LINK"]
        with refused(local.api, "LLM_NOT_YET_LINK"):
            local.pull_cache(key, cache)
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
        local.pull_cache(key, cache)

    def test_unlink_with_another_address(self, linked: Linked) -> None:
        local, _ = linked
        status, statuses = local.datadist.unlink_clusters([local._info(2, 1)])
        assert status.name == "LLM_UNLINK_FAILED"
        assert [entry.name for entry in statuses] == ["LLM_PARAM_INVALID"]

    def test_c79_killed_peer_comes_back(
        self, linked: Linked, make_peer: Callable[..., Peer]
    ) -> None:
        local, peer = linked
        peer.kill()
        status, statuses = local.datadist.unlink_clusters([local._info(2, peer.listen_port)])
        assert status.name == "LLM_UNLINK_FAILED"
        assert [entry.name for entry in statuses] == ["LLM_NOTIFY_PROMPT_UNLINK_FAILED"]
        restarted = make_peer(2, role="PROMPT")
        assert local.link(2, restarted.listen_port).name == "LLM_SUCCESS"

    def test_c83_unlink_during_a_pull(self, linked: Linked) -> None:
        local, peer = linked
        source, cache = peer.allocate_rows(), local.allocate_rows()
        peer.stop()
        key = local.api.CacheKeyByIdAndIndex(2, source)
        pulling = threading.Thread(target=local.pull_cache, args=(key, cache))
        pulling.start()
        try:
            links = local.native.first_links
            wait_until(lambda: links._link_use.busy(2))
            info = local._info(2, peer.listen_port)
            status, statuses = local.datadist.unlink_clusters([info])
            assert [entry.name for entry in statuses] == ["LLM_LINK_BUSY"]
            assert status.name == "LLM_UNLINK_FAILED"
        finally:
            peer.resume()
            pulling.join()
        assert local.datadist.unlink_clusters([info])[0].name == "LLM_SUCCESS"

    def test_c80_check_link_status(self, make_first: MakeFirst, prompt: Peer) -> None:
        local = make_first(timeout_ms=300)
        with refused(local.api, "LLM_NOT_YET_LINK"):
            local.datadist.check_link_status(2)
        assert local.link(2, prompt.listen_port).name == "LLM_SUCCESS"
        local.datadist.check_link_status(2)
        prompt.kill()
        with refused(local.api, "LLM_FAILED"):
            local.datadist.check_link_status(2)
        with pytest.raises(TypeError):
            local.datadist.check_link_status("2")


class TestSwitchRole:
    def test_c82_roles_change_sides(
        self, make_first: MakeFirst, make_peer: Callable[..., Peer]
    ) -> None:
        peer = make_peer(2, role="PROMPT", may_switch=True)
        local = make_first(may_switch=True)
        role = local.api.LLMRole
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
        cache, theirs = local.allocate_rows(seed=100), peer.allocate_rows()
        address = {"llm.listenIpInfo": f"127.0.0.1:{free_port()}"}
        with refused(local.api, "LLM_EXIST_LINK"):
            local.switch_role(role.PROMPT, address)
        assert local.unlink_from(2, peer.listen_port, force=True).name == "LLM_SUCCESS"
        peer.unlink_from(1, 1, force=True)
        local.switch_role(role.PROMPT, address)
        peer.switch_role(role.DECODER)
        assert peer.link(1, local.port()).name == "LLM_SUCCESS"
        before = peer.dump(theirs)
        peer.pull_cache(local.api.CacheKeyByIdAndIndex(1, cache), theirs)
        assert peer.dump(theirs) == moved(before, local.dump(cache), [(0, 0, 256)])
        with refused(local.api):  # no longer a DECODER
            local.pull_cache(local.api.CacheKeyByIdAndIndex(2, theirs), cache)

    def test_c82_refusals(self, make_first: MakeFirst) -> None:
        local = make_first(may_switch=True)
        role = local.api.LLMRole
        with refused(local.api):
            local.switch_role(role.DECODER)
        with refused(local.api):
            local.switch_role(role.PROMPT)

    def test_c82_must_be_enabled(self, make_first: MakeFirst) -> None:
        local = make_first()
        with refused(local.api, "LLM_FEATURE_NOT_ENABLED"):
            local.switch_role(
                local.api.LLMRole.PROMPT, {"llm.listenIpInfo": f"127.0.0.1:{free_port()}"}
            )
