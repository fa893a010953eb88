"""The named suites: which problems, against whom."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from ..errors import InvalidArgument
from .case import DTYPES, Case
from .modifiers import log_uniform
from .peers import PEERS, Peer
from .run import Effort, Group

TOKENS = 16384  # batch x length, as in the papers' tables
WIDTH = 2048  # heads x head_dim
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
MEMORY_LENGTHS = (512, 1024, 2048, 4096)
MASKS = ("full", "causal")
EQUAL = (1024,) * 16  # the lengths of packed sequences

# How long to measure where it is not `Effort()`: the Hopper suite has half a hundred problems.
EFFORTS = {
    "hopper": Effort(rounds=5, budget_s=0.025, preheat_s=0.15),
    "modifiers": Effort(rounds=7, budget_s=0.025),
    "varlen": Effort(rounds=7, budget_s=0.025),
    "backward": Effort(rounds=5, budget_s=0.025, preheat_s=0.15),
    "backward-generic": Effort(rounds=5, budget_s=0.025, preheat_s=0.15),
    "paper": Effort(rounds=5, budget_s=0.05, preheat_s=0.15),
    "deterministic": Effort(rounds=7, budget_s=0.025, preheat_s=0.15),
}


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


def peers(*names: str) -> tuple[Peer, ...]:
    """Return peers by name."""
    return tuple(PEERS[name] for name in names)


def hopper() -> tuple[Group, ...]:
    """Return what the Hopper kernel is held to: against all that is fast on that card."""
    everyone = peers("fa3", "fa4", "cudnn", "fa2")
    bf16 = dense("bf16", (64, 128, 256), LENGTHS)
    return (
        Group((*bf16, *long("bf16", 16, 2, 128, 128)), everyone),
        Group(dense("fp16", (128,), (8192,)), peers("fa4", "cudnn", "fa2")),
        Group(long("bf16", 16, 16, 192, 128), everyone),
        Group(dense("bf16", (128,), (8192,), ("window:1024,0",)), peers("fa4")),
        Group(dense("e4m3", (64, 128, 256), (8192,)), peers("fa3")),
    )


def backward() -> tuple[Group, ...]:
    """Return what the Hopper kernel of gradients is held to."""
    bf16 = dense("bf16", (64, 128, 256), LENGTHS)
    cases = (*bf16, *long("bf16", 16, 2, 128, 128))
    return (Group(cases, peers("fa4", "cudnn", "fa2"), backward=True),)


def backward_generic() -> tuple[Group, ...]:
    """Return what the generic kernel of gradients, forced, is held to: what runs everywhere too.

    The gradient of a bias is timed beside the call without a bias.
    """
    sm80 = "attention_bwd_sm80"
    biased = dataclasses.replace(square("bf16", 4, 4096, 16, 128, "full"), modifier="bias")
    return (
        Group(dense("bf16"), peers("fa2"), kernel=sm80, backward=True),
        Group(dense("fp32"), peers("efficient"), kernel=sm80, backward=True),
        Group((biased,), peers("efficient", "cudnn"), kernel=sm80, plain=True, backward=True),
    )


def paper() -> tuple[Group, ...]:
    """Return the row of FlashAttention's paper, both passes, and what memory they take by length.

    The scores of the longest length are 2 GiB, of which the plain formula has several copies.
    """
    everyone = peers("eager", "fa2", "fa4", "cudnn")
    row = square("fp16", 64, 1024, 16, 64, "full")
    lengths = tuple(square("fp16", 4, length, 16, 64, "full") for length in MEMORY_LENGTHS)
    return (Group((row, *lengths), everyone, passes=True),)


def deterministic() -> tuple[Group, ...]:
    """Return gradients in a fixed order of sums, beside our own in any order."""
    cases = dense("bf16", (64, 128, 256))
    ordered = tuple(dataclasses.replace(case, modifier="deterministic") for case in cases)
    return (Group(ordered, plain=True, backward=True),)


def modifiers() -> tuple[Group, ...]:
    """Return one problem with each modifier and mask, against all who have it and against itself.

    Each is timed beside our causal kernel without it.
    """
    causal = square("bf16", 4, 4096, 16, 128, "causal")

    def modified(modifier: str, *names: str, mask: str = "causal") -> Group:
        case = dataclasses.replace(causal, mask=mask, modifier=modifier)
        return Group((case,), peers(*names), plain=True)

    return (
        Group((causal,), peers("fa3", "fa4", "cudnn", "fa2", "flex")),
        modified("softcap:30", "fa3", "fa4", "flex"),
        modified("alibi", "fa4", "flex"),
        modified("sink", "fa4", "flex"),
        modified("dropout:0.1", "cudnn", "efficient", "fa2"),
        modified("bias", "fa4", "cudnn", "efficient", "flex"),
        modified("", "fa4", "flex", mask="window:1024,0"),
        modified("mask", "cudnn", "efficient", "flex"),
        modified("documents", "flex"),
        modified("prefix:1024", "flex", mask="full"),
    )


def varlen() -> tuple[Group, ...]:
    """Return packed sequences, of one length and of many."""
    drawn = log_uniform(32, 8192, 32768, seed=2026)
    cases = (packed(lengths, mask) for mask in ("causal", "full") for lengths in (EQUAL, drawn))
    return (Group(tuple(cases), peers("fa4", "fa3", "fa2", "flex")),)


def packed(lengths: tuple[int, ...], mask: str) -> Case:
    """Return bf16 self-attention of packed sequences."""
    case = square("bf16", len(lengths), max(lengths), 16, 128, mask)
    return dataclasses.replace(case, lengths=lengths)


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
        ``bf16 .* S8192 .* D128 causal``; the text of 8-bit ones also has the word ``fp8``.
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
            cases=tuple(case for case in group.cases if pattern.search(text(case))),
            peers=tuple(peer for peer in group.peers if peer.name in kept),
            kernel=kernel or group.kernel,
        )
        for group in groups
    ]
    return tuple(group for group in found if group.cases)


def text(case: Case) -> str:
    """Return the text that `rows` is looked for in."""
    return f"{case} fp8" if DTYPES[case.dtype].itemsize == 1 else str(case)


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
        "backward": backward(),
        "backward-generic": backward_generic(),
        "paper": paper(),
        "deterministic": deterministic(),
        "modifiers": modifiers(),
        "varlen": varlen(),
        # What a warm call costs: the problem is so small that Python is all of it.
        "host": (
            Group(
                (square("bf16", 1, 64, 4, 64, "full"), square("bf16", 1, 64, 4, 64, "causal")),
                (PEERS["sdpa"],),
                frameworks=("torch", "cupy"),
            ),
        ),
        # The path without a GPU.
        "cpu": tuple(
            Group(
                tuple(
                    square(dtype, 1, 2048, 8, 64, mask)
                    for dtype in ("fp32", "bf16")
                    for mask in ("full", "causal")
                ),
                (PEERS["sdpa"],),
                device="cpu",
                backward=gradients,
            )
            for gradients in (False, True)
        ),
    }
