"""What peers refuse, in their words: each raises `Unfit`."""

from __future__ import annotations

from collections.abc import Iterable

from .case import Case
from .runner import Unfit


def refuse_lacking(case: Case, features: Iterable[str]) -> None:
    """Refuse a modifier or packing that is not among the features of a peer."""
    if lacking := sorted(case.features - set(features)):
        words = {"packed": "packed sequences", "mask": "dense masks"}
        raise Unfit(f"it has no {' and no '.join(words.get(name, name) for name in lacking)}")


def refuse_grouped(case: Case) -> None:
    """Refuse grouped heads."""
    if case.heads_q != case.heads_k:
        raise Unfit("it takes no grouped heads")


def refuse_windows(case: Case) -> None:
    """Refuse a window on behalf of a peer that has none."""
    if case.mask not in ("full", "causal"):
        raise Unfit("it has no sliding windows")


def refuse_rectangular_causal(case: Case) -> None:
    """Refuse a causal mask whose diagonal the peer puts elsewhere."""
    if case.mask == "causal" and case.len_q != case.len_k and case.alignment != "top_left":
        raise Unfit("its causal mask is aligned to the top left")


def refuse_dtypes(case: Case, *taken: str) -> None:
    """Refuse a dtype that is not among those the peer takes."""
    if case.dtype not in taken:
        raise Unfit(f"it takes {' and '.join(taken)}, not {case.dtype}")
