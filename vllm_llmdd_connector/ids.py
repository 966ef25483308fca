"""Identities: clusters, process starts, claims.

Nothing here is configured by hand: a restarted process must become another cluster, so that no peer
mistakes its memory for its predecessor's.
"""

import hashlib
import secrets

CLUSTER_ID_BITS = 48


def new_instance() -> str:
    """A random name for this process start, 16 hex digits.

    Hex, not an integer: routers written in other languages turn large JSON integers into floats.
    """
    return secrets.token_hex(8)


def new_secret() -> str:
    """A random word that only P's answer and P itself know; 16 hex digits."""
    return secrets.token_hex(8)


def new_transfer_id() -> str:
    """A random name for one prefill, drawn by D when it asks for it itself; 32 hex digits.

    Only those know it that D's post has reached, so it is a secret too.
    """
    return secrets.token_hex(16)


def new_claim_id() -> int:
    """A random id for one D request's claim on a lease; 63 bits, never 0."""
    return secrets.randbits(63) | 1


def cluster_id(engine_id: str, instance: str, tp_rank: int) -> int:
    """The LLM-DataDist cluster id of one worker: 48 bits, never 0, new for every process start."""
    text = f"{engine_id}\0{instance}\0{tp_rank}".encode()
    digest = hashlib.blake2b(text, digest_size=CLUSTER_ID_BITS // 8).digest()
    return int.from_bytes(digest, "big") or 1
