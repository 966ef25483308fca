"""What counts as right: pure functions that return the problems found, none when all is well.

Two questions are kept apart. Did the KV bytes that D decodes with equal those P computed? That is
answered by digests, block by block and layer by layer. And does D say what a single server says?
That is answered by tokens and logprobs, which alone would prove little: a small model often says
the same with wrong KV.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from client import Token

NEAR_TIE_NATS = 0.1
"""Where one server's two best tokens are closer than this, another may choose the second: sums
depend on how many tokens are computed together, and D computes the last one of a prompt alone."""

LOGPROB_TOLERANCE = 0.05
"""How far the same token's logprob may differ between the two, for the same reason."""


@dataclass(frozen=True)
class Digests:
    """One line of the connector's `kv_digest` files: a run of blocks of one layer."""

    side: str
    request_id: str
    transfer_id: str
    rank: int
    layer: str
    first_block: int
    digests: tuple[str, ...]

    def positions(self) -> dict[tuple[int, str, int], str]:
        """Digest by (rank, layer, position of the block in the prompt)."""
        return {
            (self.rank, self.layer, self.first_block + offset): digest
            for offset, digest in enumerate(self.digests)
        }


@dataclass(frozen=True)
class Expected:
    """What must have been moved for a request: the same blocks on every rank and layer."""

    first_block: int
    blocks: int
    layers: int
    ranks: int = 1

    def positions(self) -> int:
        return self.blocks * self.layers * self.ranks


@dataclass(frozen=True)
class TextVerdict:
    """`compared` tokens were compared; `near_tie` is where comparison ended early, if it did."""

    compared: int
    near_tie: int | None
    problems: tuple[str, ...]


def read_digests(folder: Path) -> list[Digests]:
    """Read all complete lines of all workers' files."""
    lines = []
    for path in sorted(folder.glob("*.jsonl")):
        text = path.read_text()
        for line in text[: text.rfind("\n") + 1].splitlines():
            fields = json.loads(line)
            fields["digests"] = tuple(fields["digests"])
            lines.append(Digests(**fields))
    return lines


def check_digests(lines: Iterable[Digests], request_id: str, expected: Expected) -> list[str]:
    """Compare what D received for a request with what P sent under the same transfer id.

    `request_id` is the X-Request-Id: vLLM's own ids contain it. The numbers of positions, layers
    and ranks are checked too, so that a line that is missing on either side cannot pass.
    """
    lines = list(lines)
    received = [x for x in lines if x.side == "recv" and request_id in x.request_id]
    transfers = {x.transfer_id for x in received}
    if expected.blocks == 0:
        return [f"{len(received)} layers received, expected none"] if received else []
    if len(transfers) != 1:
        return [f"D received under {len(transfers)} transfer ids, expected 1"]
    sent = [x for x in lines if x.side == "send" and x.transfer_id in transfers]
    return _check_extent(received, expected) + _compare(received, sent)


def _check_extent(received: Sequence[Digests], expected: Expected) -> list[str]:
    problems = []
    positions = [position for line in received for position in line.positions()]
    if len(positions) != len(set(positions)):
        problems.append("D reports a block of a layer twice")
    if len(positions) != expected.positions():
        problems.append(f"D reports {len(positions)} blocks, expected {expected.positions()}")
    for name, count, wanted in (
        ("layers", len({line.layer for line in received}), expected.layers),
        ("ranks", len({line.rank for line in received}), expected.ranks),
    ):
        if count != wanted:
            problems.append(f"D reports {count} {name}, expected {wanted}")
    end = expected.first_block + expected.blocks
    outside = {p for _, _, p in positions if not expected.first_block <= p < end}
    if outside:
        problems.append(
            f"D reports blocks {sorted(outside)} outside [{expected.first_block}, {end})"
        )
    return problems


def _compare(received: Sequence[Digests], sent: Sequence[Digests]) -> list[str]:
    source = {key: digest for line in sent for key, digest in line.positions().items()}
    missing, wrong = [], []
    for line in received:
        for key, digest in line.positions().items():
            if key not in source:
                missing.append(key)
            elif source[key] != digest:
                wrong.append(key)
    problems = []
    for what, keys in (("differ from P's", wrong), ("were not reported by P", missing)):
        if keys:
            rank, layer, block = keys[0]
            problems.append(
                f"{len(keys)} blocks {what}, the first: rank {rank}, {layer}, block {block}"
            )
    return problems


def check_tokens(got: Sequence[Token], reference: Sequence[Token]) -> TextVerdict:
    """Compare D's tokens with a single server's, up to a near tie of the latter."""
    for index, (ours, theirs) in enumerate(zip(got, reference, strict=False)):
        if ours.name != theirs.name:
            return _at_difference(index, ours, theirs)
        distance = abs(ours.logprob - theirs.logprob)
        if distance > LOGPROB_TOLERANCE:
            problem = f"logprob of token {index} differs by {distance:.3f} nat"
            return TextVerdict(index + 1, None, (problem,))
    if len(got) != len(reference):
        problem = f"{len(got)} tokens, a single server gives {len(reference)}"
        return TextVerdict(min(len(got), len(reference)), None, (problem,))
    if not got:
        return TextVerdict(0, None, ("no token came with a logprob",))
    return TextVerdict(len(got), None, ())


def _at_difference(index: int, ours: Token, theirs: Token) -> TextVerdict:
    gap = theirs.top[0] - theirs.top[1] if len(theirs.top) > 1 else float("inf")
    if gap <= NEAR_TIE_NATS:
        return TextVerdict(index, index, ())
    problem = f"token {index} is {ours.name}, a single server's is {theirs.name} by {gap:.2f} nat"
    return TextVerdict(index, None, (problem,))
