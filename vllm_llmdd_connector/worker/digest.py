"""Debug option ``kv_digest``: digests of KV blocks as they leave P and as they arrive at D.

One JSON line per request and region; comparing the two sides' lines proves, per layer and block,
that what D computes with is what P computed. Slow on purpose: it reads every byte once more.
"""

import ctypes
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from vllm_llmdd_connector.layout.kv_layout import CachePlan


class DigestLog:
    """Appends to one file per process in the folder that the option names."""

    def __init__(self, folder: str, role: str, tp_rank: int) -> None:
        path = Path(folder)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = path / f"{role}-rank{tp_rank}-{os.getpid()}.jsonl"
        self._tp_rank = tp_rank

    def write(
        self,
        side: str,
        request_id: str,
        transfer_id: str,
        plan: CachePlan,
        first_block: int,
        blocks: Sequence[int],
    ) -> None:
        """Digest ``blocks`` of every region of ``plan``; ``first_block`` is their place in the
        prompt."""
        lines = [
            json.dumps(
                {
                    "side": side,
                    "request_id": request_id,
                    "transfer_id": transfer_id,
                    "rank": self._tp_rank,
                    "layer": region.name,
                    "first_block": first_block,
                    "digests": [
                        _digest(region.base + block * region.block_len, region.block_len)
                        for block in blocks
                    ],
                }
            )
            for region in plan.regions
        ]
        with open(self._path, "a", opener=_private) as file:
            file.write("\n".join(lines) + "\n")


def _private(path: str, flags: int) -> int:
    """Digests tell which prompts are equal, and transfer ids are secrets while they live."""
    return os.open(path, flags, 0o600)


def _digest(address: int, length: int) -> str:
    view = (ctypes.c_char * length).from_address(address)
    return hashlib.blake2b(view, digest_size=16).hexdigest()
