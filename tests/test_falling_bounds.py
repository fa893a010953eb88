"""Bounds of packed queries that fall, as only those that the host has not seen may.

A sequence is then empty, or begins before the end of another: a row of one sequence is computed as
its, one of several as one of theirs, one of none is written as zeros, and nothing else is touched.
Gradients of such a call are of no use, but they too touch nothing else, and end.
"""

import itertools

import numpy as np
import pytest
from emulated import SEEDS, needs_compiler, run
from gradients import poisoned
from harness import GPU_KERNEL, HOPPER

import cupyflash
from cupyflash import _accuracy, _backward_sm80, _backward_sm90, _problem

pytestmark = needs_compiler

TOTAL, KEYS = 420, 150
BOUNDS = (
    (300, 360, 0, 90),  # a later sequence lies before an earlier one, and between them is none
    (250, 40, 140, 140),  # the first bound is not the least
    (10, 350, 60),  # the last is not the greatest
    (420, 300, 129, 128, 0),  # nothing but falls
    (0, 200, 70, 260, 400),  # rows of two sequences
    (5, 420, 0, 420, 400, 401),  # rows of two, and of one that lies in another
    (2**40, 130, -7, 64, 2**40, 1),  # beyond the arrays
    (*range(0, 40, 2), 300, *range(100, 180, 2)),  # more than a warp has lanes
)


@pytest.fixture(autouse=True)
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host not check bounds, as it cannot check those of a device."""
    monkeypatch.setattr(_problem, "_values", lambda array: None)


@pytest.mark.parametrize("used", [False, True], ids=["all", "used"])
@pytest.mark.parametrize("kernel", [GPU_KERNEL, HOPPER])
@pytest.mark.parametrize("bounds", BOUNDS, ids=lambda bounds: str(bounds[:6]))
def test_every_row_is_written_by_its_sequence(
    bounds: tuple[int, ...], kernel: str, used: bool
) -> None:
    rng = np.random.default_rng(len(bounds))
    shapes = ((TOTAL, 2, 64), (KEYS, 1, 64), (KEYS, 1, 64))
    q, k, v = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
    count = len(bounds) - 1
    cu_k = np.linspace(0, KEYS, count + 1).astype(np.int64)
    limits = rng.integers(0, 100, count) if used else np.full(count, TOTAL)
    options = {"seqused_q": limits} if used else {}
    out, lse = run(
        q, k, v, cu_seqlens_q=np.array(bounds), cu_seqlens_k=cu_k, **options, causal=True,
        kernel=kernel, seed=2,
    )  # fmt: skip

    # Of a row of several sequences each element is one of theirs: whoever writes last.
    right = [np.zeros(x.shape, np.bool_) for x in (out, lse)]
    none = np.ones(TOTAL, np.bool_)
    for b, (first, end) in enumerate(itertools.pairwise(np.clip(bounds, 0, TOTAL).tolist())):
        if first >= end:
            continue
        none[first:end] = False
        rows, unused = slice(first, min(first + limits[b], end)), slice(first + limits[b], end)
        keys = slice(cu_k[b], cu_k[b + 1])
        alone = _accuracy.expected(q[None, rows], k[None, keys], v[None, keys], causal=True)
        with np.errstate(invalid="ignore"):  # -inf - -inf
            right[0][rows] |= np.abs(out[rows] - alone.out[0]) <= alone.bound[0]
            right[1][:, rows] |= np.abs(lse[:, rows] - alone.lse[0]) <= alone.lse_bound[0]
        right[1][:, rows] |= lse[:, rows] == alone.lse[0]
        right[0][unused] |= out[unused] == 0
        right[1][:, unused] |= np.isneginf(lse[:, unused])
    assert right[0][~none].all()
    assert right[1][:, ~none].all()
    assert not out[none].any()
    assert np.isneginf(lse[:, none]).all()


EVEN = tuple(range(0, 901, 300))
MANY = 41  # sequences: a warp finds them in two steps, where it may miss the first tiles of one
BOUNDS_OF_GRADIENTS = {
    "queries share rows": ((0, 300, 0, 300), EVEN),
    "queries share counters": ((250, 40, 300, 140), EVEN),
    "keys lack blocks": (
        tuple(300 * b // MANY for b in range(MANY + 1)),
        (*[0] * 31, 900, 0, *[900] * (MANY - 32)),
    ),
    "keys share rows": ((0, 100, 200, 300), (0, 900, 0, 900)),
}


@pytest.mark.parametrize(
    ("kernel", "dim"),
    [(_backward_sm80.NAME, 64), (_backward_sm90.NAME, 64), (_backward_sm90.NAME, 256)],
)
@pytest.mark.parametrize(
    ("bounds_q", "bounds_k"), BOUNDS_OF_GRADIENTS.values(), ids=BOUNDS_OF_GRADIENTS
)
def test_ordered_gradients_wait_for_nobody(
    bounds_q: tuple[int, ...], bounds_k: tuple[int, ...], kernel: str, dim: int
) -> None:
    """What a block would wait for may come out of order, or never."""
    rng = np.random.default_rng(3)
    q, dout = (rng.standard_normal((300, 2, dim)).astype(np.float16) for _ in range(2))
    k, v = (rng.standard_normal((900, 1, dim)).astype(np.float16) for _ in range(2))
    count = len(bounds_q) - 1
    own = {
        "cu_seqlens_q": np.array(bounds_q),
        "cu_seqlens_k": np.array(bounds_k),
        "seqused_q": rng.integers(100, 1000, count),  # more than many have
        "seqused_k": rng.integers(100, 2000, count),
    }
    out, lse = cupyflash.attention_varlen(q, k, v, return_lse=True, kernel="cpu", **own)
    for seed in SEEDS[:2]:
        with poisoned("cpu"), cupyflash.emulate(seed=seed):
            found = cupyflash.attention_backward(
                dout, q, k, v, out, lse, kernel=kernel, deterministic=True, **own
            )
        written = {"dq": bounds_q, "dk": bounds_k, "dv": bounds_k}
        for name, bounds in written.items():
            if list(bounds) == sorted(bounds):
                assert np.isfinite(getattr(found, name)).all(), name
