"""What the Hopper and the backward kernels moved and multiplied on the emulator, by formulas.

Which pairs are seen is asked of the definition of a band, pair by pair.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest
import test_backward_sm90
import test_emulated_backward
from cases import Case
from emulated import needs_compiler
from gradients import seeds_of
from harness import HOPPER

import cupyflash
from cupyflash._backward_delta import ADDED_ROWS, STAT_ROWS
from cupyflash._emulator.stats import Stats

pytestmark = needs_compiler

PRODUCT = 16 * 8 * 16  # multiplications of a warp's product; a warpgroup's has 64 rows, 16 deep


class Walked(NamedTuple):
    """Sums over the blocks of keys, and the heads of queries that walk them."""

    keys: int  # of the blocks with a query, for every head of keys
    blocks: int
    steps: int  # tiles of queries that see a key of a block
    rows: int  # of these tiles, that exist
    granules: int  # of ADDED_ROWS of them, with a row that exists
    pieces: int  # of a tile, of piece_q queries and piece_k keys, with a pair that is seen


def seen(case: Case) -> np.ndarray:
    """Return which query sees which key."""
    i, j = np.ogrid[: case.len_q, : case.len_k]
    shift = 0 if case.alignment == "top_left" else case.len_k - case.len_q
    left, right = (n if n is not None and n >= 0 else 10**6 for n in case.window_size)
    right = min(right, 0) if case.causal else right
    return (j >= i + shift - left) & (j <= i + shift + right)


def walked(case: Case, block_q: int, block_k: int, piece_q: int, piece_k: int) -> Walked:
    pairs = seen(case)
    found = np.zeros(6, int)
    for k in range(0, case.len_k, block_k):
        tiles = [q for q in range(0, case.len_q, block_q)
                 if pairs[q : q + block_q, k : k + block_k].any()]  # fmt: skip
        rows = sum(min(block_q, case.len_q - q) for q in tiles)
        granules = sum(-(-min(block_q, case.len_q - q) // ADDED_ROWS) for q in tiles)
        pieces = sum(
            bool(pairs[q + i : q + i + piece_q, k + j : k + j + piece_k].any())
            for q in tiles
            for i in range(0, block_q, piece_q)
            for j in range(0, block_k, piece_k)
        )
        keys = min(block_k, case.len_k - k) if tiles else 0
        by_head = np.array([len(tiles), rows, granules, pieces]) * case.heads_q
        found += [keys * case.heads_k, bool(tiles) * case.heads_k, *by_head]
    return Walked(*map(int, found * case.batch))


BANDS: tuple[dict[str, Any], ...] = (
    {}, {"causal": True}, {"window_size": (70, 20)}, {"causal": True, "alignment": "top_left"},
)  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "dim", "band"),
    [
        *(("float16", dim, band) for dim in (64, 128) for band in BANDS),
        *(("float8_e4m3fn", dim, BANDS[2]) for dim in (64, 256)),
    ],
    ids=str,
)
def test_the_hopper_forward_kernel(dtype: str, dim: int, band: dict[str, Any]) -> None:
    case = Case(251, 300, dim, dim, dtype, heads_q=2, heads_k=1, **band)
    q, k, v = (x.host for x in case.arrays())
    with cupyflash.emulate() as session:
        cupyflash.attention(q, k, v, kernel=HOPPER, **case.options)
    config = cupyflash.explain(
        len_q=251, len_k=300, heads_q=2, heads_k=1, head_dim=dim, dtype=dtype, kernel=HOPPER,
        arch=90, **case.options,
    ).config  # fmt: skip
    block_k, block_q = config["block_k"], 64 * config["consumers"]
    got, pairs = session.stats[HOPPER], seen(case)

    def blocks(q: int, rows: int) -> list[int]:
        """Return the blocks of keys that rows of Q see."""
        return [k for k in range(0, 300, block_k) if pairs[q : q + rows, k : k + block_k].any()]

    tiles = {q: blocks(q, block_q) for q in range(0, 251, block_q)}
    own = sum(len(blocks(q, 64)) for q in range(0, 251, 64))  # of a warpgroup
    rows = sum(min(block_q, 251 - q) for q, keys in tiles.items() if keys)
    keys = sum(min(block_k, 300 - k) for found in tiles.values() for k in found)
    asked = sum(bool(found) for found in tiles.values())
    loaded = sum(map(len, tiles.values()))
    size = q.itemsize
    loaded_rows = 2 * (asked * block_q + 2 * loaded * block_k)
    assert got.tiles_loaded_bytes == loaded_rows * max(dim * size, 128)  # of whole panels
    assert got.global_read_bytes == 2 * (rows + 2 * keys) * dim * size
    assert got.global_written_bytes == 2 * 251 * dim * 2 + 4  # and the tickets are zeros again
    deep = 32 // size  # of a product
    assert got.wgmma == 2 * own * (dim // deep + config["parts"] * block_k // deep)  # S, then P V


def counted(kernel: str, case: Case) -> dict[str, Stats]:
    """Return what each launch of a backward call did."""
    q, k, v = (x.host for x in case.arrays())
    dout, dlse = seeds_of(q, v)
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **case.options)
    with cupyflash.emulate() as session:
        cupyflash.attention_backward(
            dout, q, k, v, out, lse, dlse=dlse, kernel=kernel, **case.options
        )
    return session.stats


def config_of(kernel: str, case: Case) -> dict[str, object]:
    return cupyflash.explain(
        len_q=case.len_q, len_k=case.len_k, heads_q=case.heads_q, heads_k=case.heads_k,
        head_dim=case.head_dim, head_dim_v=case.head_dim_v, dtype=case.dtype, backward=True,
        kernel=kernel, arch=90, **case.options,
    ).config  # fmt: skip


def check_around(
    stats: dict[str, Stats], case: Case, dq: str, columns: int, *, counters: bool = False
) -> None:
    """Hold the launches before and after the kernel itself against what they read and write.

    Zeros are written for the sums of dQ, of so many columns, or for the counters of who adds.
    """
    rows = case.batch * case.heads_q * case.len_q
    stat_rows = case.batch * case.heads_q * -(-case.len_q // STAT_ROWS) * STAT_ROWS
    delta = stats["attention_bwd_delta"]
    # O, dO, the LSE and its gradient; then two statistics and zeros.
    assert delta.global_read_bytes == rows * (2 * case.head_dim_v * 2 + 8)
    zeros = 4 * (stat_rows // ADDED_ROWS + 1) if counters else 4 * stat_rows * columns
    assert delta.global_written_bytes == 8 * stat_rows + zeros
    assert stats[dq].global_written_bytes == rows * case.head_dim * 2


@pytest.mark.parametrize("case", test_emulated_backward.CLASSES, ids=lambda case: case.id)
def test_the_generic_kernel(case: Case) -> None:
    kernel = test_emulated_backward.KERNEL
    stats = counted(kernel, case)
    config = config_of(kernel, case)
    block_q, block_k, dim, dim_v = (
        config[name] for name in ("block_q", "block_k", "head_dim", "head_dim_v")
    )
    got, itemsize = stats[kernel], 2
    at = walked(case, block_q, block_k, config["warp_q"], config["warp_k"])
    dims, own = dim + dim_v, case.head_dim + case.head_dim_v
    assert got.blocks == case.batch * case.heads_k * -(-case.len_k // block_k)
    loaded = (at.blocks * block_k + at.steps * block_q) * dims * itemsize
    assert got.tiles_loaded_bytes == loaded + at.steps * block_q * 8
    read = (at.keys + at.rows) * own * itemsize + at.steps * block_q * 8
    assert got.global_read_bytes == read
    kept = case.batch * case.heads_k * case.len_k * own * itemsize  # dK and dV
    assert got.global_written_bytes == kept + at.granules * ADDED_ROWS * dim * 4
    scores = at.pieces * config["warp_q"] * config["warp_k"] * dims  # S and dP
    sums = at.steps * block_q * block_k * (dims + dim)  # dK, dV and dQ
    assert got.mma == (scores + sums) // PRODUCT
    check_around(stats, case, "attention_bwd_dq", dim)


@pytest.mark.parametrize("case", test_backward_sm90.CLASSES[1::2], ids=lambda case: case.id)
def test_the_hopper_kernels(case: Case) -> None:
    kernel = test_backward_sm90.KERNEL
    stats = counted(kernel, case)
    config = config_of(kernel, case)
    block_q, dim = config["block_q"], config["head_dim"]
    block_k = 64 if dim > 128 else 128
    (name,) = stats.keys() - {"attention_bwd_delta", "attention_bwd_dq_sm90"}
    got, itemsize = stats[name], 2
    at = walked(case, block_q, block_k, block_q, block_k)
    blocks = case.batch * case.heads_k * -(-case.len_k // block_k)
    assert got.blocks == blocks
    loaded = (blocks * block_k + at.steps * block_q) * 2 * dim * itemsize
    assert got.tiles_loaded_bytes == loaded + at.steps * block_q * 8
    keys = case.batch * case.heads_k * case.len_k  # K and V are loaded whoever sees them
    own = (case.head_dim + case.head_dim_v) * itemsize
    assert got.global_read_bytes == (keys + at.rows) * own + at.steps * block_q * 8
    assert got.global_written_bytes == keys * own + at.steps * block_q * dim * 4
    # Of S, dP, dK, dV and dQ: products of 64 rows and so many columns, 16 deep. Where groups share
    # the columns of dK and dV, each has half of them.
    columns = (64, block_q, *[dim // 2 if dim > 128 else dim] * 2, 64)
    tile = block_q * block_k * dim
    assert got.wgmma == at.steps * sum(tile // (64 * n * 16) for n in columns)
    check_around(stats, case, "attention_bwd_dq_sm90", dim, counters=dim <= 128)
