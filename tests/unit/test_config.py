"""Options: everything wrong is refused by name at start-up; peers are compared as addresses."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_llmdd_connector.config import LOOPBACK, ConnectorConfig, is_allowed_peer, read_config
from vllm_llmdd_connector.errors import ConfigError


@pytest.mark.parametrize("nothing", [None, {}])
def test_no_options_give_the_defaults(nothing: dict[str, Any] | None) -> None:
    assert read_config(nothing) == ConnectorConfig()


def test_given_options_are_taken_over() -> None:
    config = read_config(
        {
            "host": "10.0.0.2",
            "keys_dir": "/keys",
            "control_port": 7000,
            "allowed_peers": ["10.0.0.0/8"],
            "lease_s": 5,
        }
    )
    assert (config.host, config.control_port, config.lease_s) == ("10.0.0.2", 7000, 5.0)
    assert config.allowed_peers == ("10.0.0.0/8",)


def test_misspelt_key_is_refused_with_the_near_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'lease'; did you mean 'lease_s'\?"):
        read_config({"lease": 5})


def test_unknown_key_is_refused_with_all_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'qqqqq'; known keys: .*host, control_port"):
        read_config({"qqqqq": 1})


def test_key_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown key 3"):
        read_config({3: 1})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lease_s": "long"}, r"Expected `float`, got `str` - at `\$.lease_s`"),
        ({"lease_s": 0}, "lease_s is 0.0, it must be above 0"),
        ({"release_timeout_s": float("nan")}, "release_timeout_s is nan"),
        ({"request_timeout_s": float("inf")}, "request_timeout_s is inf"),
        ({"link_timeout_ms": -1}, "link_timeout_ms is -1"),
        ({"sync_kv_timeout_ms": 2**31}, "sync_kv_timeout_ms is 2147483648"),
        ({"unreserved_fraction": 1.5}, r"unreserved_fraction is 1\.5, it must be in \(0, 1\]"),
        ({"unreserved_fraction": 0}, r"unreserved_fraction is 0\.0, it must be in \(0, 1\]"),
        ({"integrity": "on"}, r"Invalid enum value 'on' - at `\$.integrity`"),
        ({"push": "yes"}, r"Expected `bool`, got `str` - at `\$.push`"),
        ({"max_leased_fraction": 1.5}, r"1\.5, it must be in \(0, 1\]"),
        ({"max_lease_s": 10, "lease_s": 20}, r"max_lease_s is 10\.0, below lease_s 20\.0"),
        ({"control_port": 65536}, r"65536, it must be in \[0, 65535\]"),
        ({"control_port": -1}, "control_port is -1"),
        ({"host": "0.0.0.0"}, "which peers cannot dial"),
        ({"host": "::1"}, "the engine speaks IPv4 only"),
        ({"allowed_peers": ["10.0.0.0/33"]}, "allowed_peers has '10.0.0.0/33'"),
        ({"allowed_peers": ["10.0.0"]}, "allowed_peers has '10.0.0'"),
        ({"allowed_peers": [""]}, "allowed_peers has ''"),
        ({"host": "prefill.example"}, "it must be an IP address"),
        ({"engine": "cuda"}, "Invalid enum value 'cuda'"),
    ],
)
def test_wrong_value_is_refused_with_name_and_value(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_config(options)


class TestAllowedPeer:
    @pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10"])
    def test_loopback_is_allowed_by_default(self, host: str) -> None:
        assert is_allowed_peer(host, LOOPBACK)

    @pytest.mark.parametrize(
        "host",
        [
            "10.0.0.1",
            "::ffff:127.0.0.1",
            "2130706433",
            "127.1",
            "localhost",
            "::1",
            "",
            "127.0.0.1 ",
        ],
    )
    def test_anything_else_is_not(self, host: str) -> None:
        assert not is_allowed_peer(host, LOOPBACK)

    @pytest.mark.parametrize("host", LOOPBACK)
    def test_text_of_a_network_is_no_host(self, host: str) -> None:
        """It was allowed as a literal entry, and dialling it ended the control thread."""
        assert not is_allowed_peer(host, LOOPBACK)

    def test_single_addresses_and_networks_can_be_listed(self) -> None:
        allowed = ("10.1.2.3", "192.168.7.9/24")
        for host in ("10.1.2.3", "192.168.7.1"):
            assert is_allowed_peer(host, allowed)
        for host in ("10.1.2.4", "192.168.8.1", "127.0.0.1"):
            assert not is_allowed_peer(host, allowed)
