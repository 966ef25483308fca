"""The key set of the control channel: CURVE keys in a folder, made once and copied to each server.

The folder holds two pairs and a list. ``listen`` is the pair with which each server of the set
listens; whoever dials it has to know its public half, and so knows that a server of the set is at
the other end. ``dial`` is the pair with which a server dials, and ``accepted`` has the public
halves of those that a listening server lets in.
"""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth

from vllm_llmdd_connector.errors import ConfigError

LISTEN = "listen"
DIAL = "dial"
ACCEPTED = "accepted"
SECRET_SUFFIX = ".key_secret"
PUBLIC_SUFFIX = ".key"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """One CURVE pair in Z85, 40 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class KeySet:
    """What a server of a set needs to talk to the others."""

    listen: KeyPair
    dial: KeyPair
    accepted: frozenset[bytes]
    """Public keys, in Z85, of those that may dial."""


def make_key_set(folder: Path) -> None:
    """Write a new set; only this user can enter ``folder`` and read its files.

    Raises:
        ConfigError: the folder cannot be made, or holds something already: keys that servers use
        are not overwritten.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; name a new folder for the keys")
        folder.chmod(0o700)
        accepted = folder / ACCEPTED
        accepted.mkdir(mode=0o700)
        for name in (LISTEN, DIAL):
            public, secret = zmq.curve_keypair()
            _write(folder / f"{name}{SECRET_SUFFIX}", public, secret)
        _write(accepted / f"{DIAL}{PUBLIC_SUFFIX}", public, None)
    except OSError as error:
        raise ConfigError(f"cannot write keys to {folder}: {error}") from None


def load_key_set(folder: str) -> KeySet | None:
    """The set that option ``keys_dir`` names; None when it names none.

    Raises:
        ConfigError: a file is missing, is no key, or other users can read a secret or add a key.
    """
    if not folder:
        return None
    path = Path(folder)
    accepted = path / ACCEPTED
    listen, dial = (_read_pair(path / f"{name}{SECRET_SUFFIX}") for name in (LISTEN, DIAL))
    try:
        files = sorted(accepted.glob(f"*{PUBLIC_SUFFIX}"))
    except OSError as error:
        raise ConfigError(f"keys_dir: cannot read {accepted}: {error}") from None
    if not files:
        raise ConfigError(
            f"keys_dir: {accepted} has no *{PUBLIC_SUFFIX}, so nobody could dial this server; make "
            "a set with `llmdd keys DIR`"
        )
    for entry in (path, accepted, *files):
        _check_writers(entry)
    return KeySet(listen, dial, frozenset(_read(file)[0] for file in files))


def _check_writers(path: Path) -> None:
    """Who can write here decides who is let in."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o022 and not mode & stat.S_ISVTX:
        raise ConfigError(
            f"keys_dir: {path} has mode {mode:o}, so other users can put their own keys there; "
            "chmod go-w it, and look at which keys are accepted"
        )


def _write(path: Path, public: bytes, secret: bytes | None) -> None:
    """The certificate format of ZeroMQ's own tools."""
    lines = ["curve", f'    public-key = "{public.decode()}"']
    if secret is not None:
        lines.append(f'    secret-key = "{secret.decode()}"')
    # Created with its mode: there is no moment at which others could open it.
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write("\n".join(lines) + "\n")


def _read_pair(path: Path) -> KeyPair:
    public, secret = _read(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"keys_dir: {path} has mode {mode:o}, so other users can use it; chmod 600 it, and "
            "make a new set if somebody could have read it"
        )
    if secret is None or zmq.curve_public(secret) != public:
        raise ConfigError(f"keys_dir: {path} is no pair of keys; make a set with `llmdd keys DIR`")
    return KeyPair(public, secret)


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
        if any(len(key) != 40 for key in (public, secret) if key is not None):
            raise ValueError("a key has 40 characters")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"keys_dir: cannot read {path}: {error}; make a set with `llmdd keys DIR`"
        ) from None
    return public, secret
