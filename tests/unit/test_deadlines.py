"""Time limits: one place has them all, and the page that lists them is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from vllm_llmdd_connector.config import OPTION_NAMES, read_config
from vllm_llmdd_connector.deadlines import (
    DEADLINE_OPTIONS,
    MIN_RENEWAL_S,
    Deadlines,
    drain_limit_s,
)
from vllm_llmdd_connector.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vllm_llmdd_connector"
OWN_UNITS = {"s": "s", "ms": "ms", "lease": "times"}
NOT_LIMITS = frozenset({"datadist", "trace"})
"""The API's own time-outs are its caller's; the trace writer waits for nobody."""


def rows(page: Path, first_word: str) -> list[list[str]]:
    """The cells of a page's table rows that begin with an option in back quotes."""
    lines = [line for line in page.read_text().splitlines() if line.startswith(f"| `{first_word}")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


class TestPage:
    def test_configuration_lists_each_limit_once_with_default_unit_and_side(self) -> None:
        defaults = Deadlines()
        listed = {row[0].strip("`"): row for row in rows(ROOT / "docs" / "configuration.md", "")}
        for option in DEADLINE_OPTIONS:
            _, default, unit, side, bounds, _ = listed[option]
            assert float(default.strip("`")) == getattr(defaults, option), option
            assert unit == OWN_UNITS[option.rpartition("_")[2]], option
            assert side in ("P", "D", "both"), option
            assert bounds, option

    @pytest.mark.parametrize("page", ["docs/configuration.md", "README.md"])
    def test_every_option_is_listed(self, page: str) -> None:
        named = set(re.findall(r"`(\w+)`", " ".join(row[0] for row in rows(ROOT / page, ""))))
        hidden = {"prefill", "decode"}
        assert set(OPTION_NAMES) - named - hidden == set()


class TestOnePlace:
    def test_no_other_file_of_the_connector_has_a_limit_of_its_own(self) -> None:
        own = re.compile(r"^ *_?[A-Za-z_]+_M?[Ss](: \w+)? = [0-9.]+$", re.MULTILINE)
        found = [
            (path.name, match[0])
            for path in sorted(PACKAGE.rglob("*.py"))
            if path.name != "deadlines.py"
            and path.relative_to(PACKAGE).parts[0] not in NOT_LIMITS
            and (match := own.search(path.read_text()))
        ]
        zeros = [entry for entry in found if not entry[1].endswith("= 0.0")]
        assert zeros == []


class TestWords:
    @pytest.mark.parametrize(
        ("options", "option", "words"),
        [
            ({}, "first_contact_timeout_s", "within 5 s (raise first_contact_timeout_s)"),
            ({"lease_s": 0.25}, "lease_s", "within 0.25 s (raise lease_s)"),
            ({}, "link_timeout_ms", "within 3000 ms (raise link_timeout_ms)"),
        ],
    )
    def test_an_error_names_limit_and_option(
        self, options: dict[str, Any], option: str, words: str
    ) -> None:
        assert Deadlines(**options).within(option) == words


class TestValues:
    @pytest.mark.parametrize("renewals", [1, 0.5])
    def test_a_lease_that_would_end_before_its_renewal_is_refused(self, renewals: float) -> None:
        with pytest.raises(ConfigError, match=r"renewals_per_lease is .* set it above 1"):
            read_config({"renewals_per_lease": renewals})

    def test_renewals_share_the_lease(self) -> None:
        assert Deadlines(renewals_per_lease=5).renewal_s(30) == 6

    def test_a_p_with_absurd_leases_does_not_keep_d_busy(self) -> None:
        """A D renewed without pause whatever a P had called its lease."""
        assert Deadlines().renewal_s(1e-9) == MIN_RENEWAL_S

    @pytest.mark.parametrize(("timeout_s", "limit_s"), [(0, 0), (1, 0.5), (10, 5), (30, 25)])
    def test_a_stopping_server_leaves_time_for_an_end_in_order(
        self, timeout_s: float, limit_s: float
    ) -> None:
        assert drain_limit_s(timeout_s) == limit_s
