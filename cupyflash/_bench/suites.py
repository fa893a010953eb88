"""The named suites: which problems, against whom."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from ..errors import InvalidArgument
from .case import Case
from .peers import PEERS, Peer
from .run import Effort, Group

TOKENS = 16384  # batch x length, as in the papers' tables
WIDTH = 2048  # heads x head_dim
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
MASKS = ("full", "causal")

# How long to measure where it is not `Effort()`: the Hopper suite has half a hundred problems.
EFFORTS = {"hopper": Effort(rounds=5, budget_s=0.025, preheat_s=0.15)}


def dense(
    dtype: str,
    dims: Iterable[int] = (64, 128),
    lengths: Iterable[int] = (1024, 8192),
    masks: Iterable[str] = MASKS,
) -> tuple[Case, ...]:
    """Return self-attention of one amount of tokens and one width, without grouped heads."""
    return tuple(
        square(dtype, TOKENS // length, length, WIDTH // dim, dim, mask)
        for dim in dims
        for length in lengths
        for mask in masks
    )


def long(dtype: str, heads: int, heads_k: int, dim: int, dim_v: int) -> tuple[Case, ...]:
    """Return self-attention of length 8k, full and causal."""
    length = 8192
    return tuple(
        Case(dtype, TOKENS // length, length, length, heads, heads_k, dim, dim_v, mask)
        for mask in MASKS
    )


def hopper() -> tuple[Group, ...]:
    """Return what the Hopper kernel is held to: against all that is fast on that card."""

    def peers(*names: str) -> tuple[Peer, ...]:
        return tuple(PEERS[name] for name in names)

    everyone = peers("fa3", "fa4", "cudnn", "fa2")
    bf16 = dense("bf16", (64, 128, 256), LENGTHS)
    return (
        Group((*bf16, *long("bf16", 16, 2, 128, 128)), everyone),
        Group(dense("fp16", (128,), (8192,)), peers("fa4", "cudnn", "fa2")),
        Group(long("bf16", 16, 16, 192, 128), everyone),
        Group(dense("bf16", (128,), (8192,), ("window:1024,0",)), peers("fa4")),
        Group(dense("e4m3", (64, 128, 256), (8192,)), peers("fa3")),
    )


def narrowed(
    groups: Iterable[Group],
    *,
    rows: str = "",
    peers: str = "",
    without: str = "",
    kernel: str | None = None,
) -> tuple[Group, ...]:
    """Return a part of some groups.

    Parameters
    ----------
    groups
        Of a suite.
    rows
        Regular expression that is found in the text of the cases to keep, like
        ``bf16 .* S8192 .* D128 causal``.
    peers, without
        Comma lists of the only peers to keep, and of those to leave out; "none" keeps none.
    kernel
        Force this kernel of ours.
    """
    try:
        pattern = re.compile(rows)
    except re.error as error:
        raise InvalidArgument(
            f"`rows` must be a regular expression, got {rows!r}: {error}"
        ) from None
    names = set(filter(None, f"{peers},{without}".split(",")))
    if unknown := names - {*PEERS, "none"}:
        raise InvalidArgument(f"`peers` must be of {', '.join(PEERS)}, got {min(unknown)!r}")
    kept = set(peers.split(",")) if peers else set(PEERS)
    kept -= set(without.split(","))
    found = [
        dataclasses.replace(
            group,
            cases=tuple(case for case in group.cases if pattern.search(str(case))),
            peers=tuple(peer for peer in group.peers if peer.name in kept),
            kernel=kernel or group.kernel,
        )
        for group in groups
    ]
    return tuple(group for group in found if group.cases)


def square(dtype: str, batch: int, length: int, heads: int, dim: int, mask: str) -> Case:
    """Return a self-attention without grouped heads."""
    return Case(dtype, batch, length, length, heads, heads, dim, dim, mask)


def suites() -> dict[str, tuple[Group, ...]]:
    """Return every suite by name."""
    sm80 = "attention_fwd_sm80"
    return {
        # The generic kernel, forced, against what runs everywhere too.
        "generic": (
            Group(dense("bf16"), (PEERS["fa2"],), kernel=sm80),
            Group(dense("fp32"), (PEERS["efficient"],), kernel=sm80),
        ),
        "hopper": hopper(),
        # What a warm call costs: the problem is so small that Python is all of it.
        "host": (
            Group(
                (square("bf16", 1, 64, 4, 64, "full"), square("bf16", 1, 64, 4, 64, "causal")),
                (PEERS["sdpa"],),
                frameworks=("torch", "cupy"),
            ),
        ),
        # The path without a GPU.
        "cpu": (
            Group(
                tuple(
                    square(dtype, 1, 2048, 8, 64, mask)
                    for dtype in ("fp32", "bf16")
                    for mask in ("full", "causal")
                ),
                (PEERS["sdpa"],),
                device="cpu",
            ),
        ),
    }
