"""The named suites: which problems, against whom."""

from __future__ import annotations

from .case import Case
from .peers import PEERS
from .run import Group

TOKENS = 16384  # batch x length, as in the papers' tables
WIDTH = 2048  # heads x head_dim


def dense(dtype: str) -> tuple[Case, ...]:
    """Return head dims 64 and 128, lengths 1k and 8k, causal and full, of one amount of tokens."""
    return tuple(
        Case(dtype, TOKENS // length, length, length, WIDTH // dim, WIDTH // dim, dim, dim, mask)
        for dim in (64, 128)
        for length in (1024, 8192)
        for mask in ("full", "causal")
    )


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
