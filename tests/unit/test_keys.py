"""Key sets: who can read them, what is refused, and the command that makes them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from fakes.other_user import as_other_user, needs_root, open_folder

from vllm_llmdd_connector import cli, keys
from vllm_llmdd_connector.config import read_config
from vllm_llmdd_connector.control.keys import load_key_set, make_key_set
from vllm_llmdd_connector.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "keys"
    make_key_set(made)
    return made


def modes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder.parent)): oct(stat.S_IMODE(path.stat().st_mode))
        for path in [folder, *folder.rglob("*")]
    }


class TestMaking:
    def test_only_this_user_can_enter_and_read_whatever_the_umask(self, tmp_path: Path) -> None:
        umask = os.umask(0)
        try:
            make_key_set(tmp_path / "keys")
        finally:
            os.umask(umask)
        assert modes(tmp_path / "keys") == {
            "keys": "0o700",
            "keys/accepted": "0o700",
            "keys/accepted/dial.key": "0o600",
            "keys/dial.key_secret": "0o600",
            "keys/listen.key_secret": "0o600",
        }

    def test_set_is_read_as_it_was_written_and_accepts_its_own_dialers(self, folder: Path) -> None:
        made = load_key_set(str(folder))
        assert made is not None
        assert made.accepted == {made.dial.public}
        assert made.listen.public != made.dial.public
        assert made.listen.secret.decode() not in repr(made)

    def test_two_sets_have_nothing_in_common(self, folder: Path, tmp_path: Path) -> None:
        make_key_set(tmp_path / "other")
        first, second = load_key_set(str(folder)), load_key_set(str(tmp_path / "other"))
        assert first is not None
        assert second is not None
        assert first.accepted.isdisjoint(second.accepted)
        assert first.listen.public != second.listen.public

    def test_keys_that_servers_use_are_not_overwritten(self, folder: Path) -> None:
        before = load_key_set(str(folder))
        with pytest.raises(ConfigError, match="is not empty"):
            make_key_set(folder)
        assert load_key_set(str(folder)) == before

    def test_folder_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match=r"cannot write keys to .*/file/keys"):
            make_key_set(tmp_path / "file" / "keys")


class TestReading:
    def test_no_folder_is_no_set(self) -> None:
        assert load_key_set("") is None

    @pytest.mark.parametrize("name", ["listen", "dial"])
    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
    def test_secret_that_others_can_use_is_refused(
        self, folder: Path, name: str, mode: int
    ) -> None:
        (folder / f"{name}.key_secret").chmod(mode)
        with pytest.raises(ConfigError, match=rf"{name}.key_secret has mode {mode:o}.* chmod 600"):
            load_key_set(str(folder))

    @pytest.mark.parametrize("name", [".", "accepted", "accepted/dial.key"])
    def test_set_to_which_others_can_add_a_key_is_refused(self, folder: Path, name: str) -> None:
        """Who can write there could let itself in."""
        place = folder / name
        place.chmod(0o770)
        with pytest.raises(ConfigError, match=r"has mode 770, so other users .* chmod go-w"):
            load_key_set(str(folder))

    @pytest.mark.parametrize(
        "text",
        ["", "no key at all", 'public-key = "short"\nsecret-key = "short"\n', "public-key =\xff"],
    )
    def test_what_is_no_key_is_refused_by_file(self, folder: Path, text: str) -> None:
        (folder / "dial.key_secret").write_text(text)
        with pytest.raises(ConfigError, match=r"dial\.key_secret"):
            load_key_set(str(folder))

    def test_halves_of_two_pairs_are_refused(self, folder: Path) -> None:
        one = (folder / "dial.key_secret").read_text().splitlines()
        other = (folder / "listen.key_secret").read_text().splitlines()
        (folder / "dial.key_secret").write_text("\n".join([*one[:2], other[2]]))
        with pytest.raises(ConfigError, match="is no pair of keys"):
            load_key_set(str(folder))

    @pytest.mark.parametrize("gone", ["dial.key_secret", "listen.key_secret"])
    def test_missing_file_is_named(self, folder: Path, gone: str) -> None:
        (folder / gone).unlink()
        with pytest.raises(ConfigError, match=gone):
            load_key_set(str(folder))

    def test_set_that_lets_nobody_in_is_refused(self, folder: Path) -> None:
        (folder / "accepted" / "dial.key").unlink()
        with pytest.raises(ConfigError, match="nobody could dial this server"):
            load_key_set(str(folder))

    @needs_root
    def test_another_user_s_process_cannot_read_them(self) -> None:
        with open_folder() as shared:
            (shared / "open").write_text("can be read")
            assert as_other_user((shared / "open").read_text) == "can be read"
            make_key_set(shared / "keys")
            for name in ("dial.key_secret", "listen.key_secret", "accepted/dial.key"):
                told = as_other_user((shared / "keys" / name).read_text)
                assert told.startswith("PermissionError"), name


class TestOption:
    @pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1"])
    def test_loopback_needs_no_keys(self, host: str) -> None:
        assert read_config({"host": host}).keys_dir == ""

    def test_other_addresses_need_them(self) -> None:
        with pytest.raises(ConfigError, match=r"host is 10\.0\.0\.2.*llmdd keys.*allow_plaintext"):
            read_config({"host": "10.0.0.2"})

    @pytest.mark.parametrize("option", [{"keys_dir": "/keys"}, {"allow_plaintext": True}])
    def test_or_one_explicit_word(self, option: dict[str, object]) -> None:
        assert read_config({"host": "10.0.0.2", **option}).host == "10.0.0.2"


class TestCommand:
    def test_llmdd_keys_makes_a_set_and_says_where_it_goes(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["keys", str(tmp_path / "keys")]) == 0
        assert f'"keys_dir": "{tmp_path}/keys"' in capsys.readouterr().out
        assert load_key_set(str(tmp_path / "keys")) is not None

    def test_module_does_the_same(self, tmp_path: Path) -> None:
        assert keys.main([str(tmp_path / "keys")]) == 0
        assert load_key_set(str(tmp_path / "keys")) is not None

    def test_failure_is_one_line_and_a_status(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["keys", str(folder)]) == 1
        assert capsys.readouterr().err == (
            f"llmdd keys: {folder} is not empty; name a new folder for the keys\n"
        )
