"""Tile tables of the generic backward kernel: the sizes that it is compiled with.

A table's row holds, for one class of head dims, tiles from the largest to the smallest; the first
that fits the architecture's shared memory, and has registers for the policies, is taken.
"""

import math
from dataclasses import dataclass

from ._modifiers import ELEMENTS, Policies
from ._tuning import fits, head_dim_classes, shared_limit, weight_of

__all__ = ["BackwardSm80", "Tiles", "backward_sm80", "shared_bytes"]


@dataclass(frozen=True)
class Tiles:
    """How a block of attention_bwd_sm80 divides its work."""

    block_q: int  # queries of a step
    block_k: int  # keys of a block
    warp_q: int  # queries of which a warp makes P and dS at a time
    warp_k: int  # keys of a warp
    sharers: int  # warps that share their keys: each has a part of the queries, then of the columns
    warps_q: int  # warps along the queries of dQ; the others are along its columns
    ds_buffers: int  # tiles of dS in shared memory: two save a barrier
    min_blocks: int  # blocks that registers must leave room for; 0 leaves registers to ptxas
    stages: int = 2  # tiles of Q and dO in shared memory: with two the next is on its way
    heavy: int = 0  # how much HEAVY there are registers for

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.block_k // self.warp_k * self.sharers * 32


@dataclass(frozen=True)
class BackwardSm80:
    """``struct Config`` of attention_bwd_sm80, and what follows from it."""

    t: str
    mask: str
    score: str
    dropout: str
    sink: str
    sequences: str
    order: str  # of the sums of dQ
    head_dim: int
    head_dim_v: int
    block_q: int
    block_k: int
    warp_q: int
    warp_k: int
    sharers: int
    warps_q: int
    stages: int
    ds_buffers: int
    min_blocks: int
    width: int  # bytes of an access to global memory
    deterministic: bool
    natural: bool  # LSE
    params_bytes: int
    smem_bytes: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.block_k // self.warp_k * self.sharers * 32


Table = dict[int | tuple[int, int], tuple[Tiles, ...]]  # by class, or by a pair of classes

# Policies that take registers of a kernel's loop, and how much of them.
HEAVY = {"Alibi": 1, "Bias": 2, "Float64": 1, "DenseMask": 1, "Segments": 1, "Dropout": 1}
MANY = sum(HEAVY.values())

# 16-bit elements.
HALF: Table = {
    16: (
        Tiles(64, 128, 32, 32, 1, 4, 2, 2, heavy=2),
        Tiles(64, 128, 32, 32, 1, 4, 2, 1, heavy=2),
        Tiles(64, 128, 16, 32, 1, 4, 2, 2, heavy=MANY),
        Tiles(64, 128, 16, 32, 1, 4, 2, 1, heavy=MANY),
    ),
    32: (
        Tiles(64, 128, 32, 32, 1, 2, 2, 2, heavy=1),
        Tiles(64, 128, 32, 32, 1, 2, 2, 1, heavy=1),
        Tiles(64, 128, 16, 32, 1, 2, 2, 2, heavy=MANY),
        Tiles(64, 128, 16, 32, 1, 2, 2, 1, heavy=MANY),
    ),
    64: (
        Tiles(64, 128, 32, 32, 1, 2, 2, 2, heavy=1),
        Tiles(64, 128, 32, 32, 1, 2, 2, 1, heavy=1),
        Tiles(64, 64, 32, 16, 1, 2, 2, 2, heavy=MANY),
        Tiles(64, 64, 32, 16, 1, 2, 2, 1, heavy=MANY),
    ),
    96: (
        Tiles(64, 128, 32, 32, 2, 4, 2, 1, heavy=2),
        Tiles(64, 64, 32, 32, 2, 2, 2, 1, heavy=2),
        Tiles(64, 64, 32, 16, 2, 4, 2, 1, heavy=MANY),
    ),
    128: (
        Tiles(64, 128, 32, 32, 2, 2, 2, 1, heavy=1),
        Tiles(64, 128, 32, 32, 2, 2, 1, 1, heavy=1),
        Tiles(64, 64, 32, 16, 2, 2, 2, 1, heavy=MANY),
        Tiles(32, 64, 16, 16, 2, 2, 2, 1, heavy=MANY),
    ),
    192: (
        Tiles(64, 64, 16, 32, 4, 2, 2, 1, heavy=MANY),
        Tiles(64, 64, 16, 32, 4, 2, 1, 1, heavy=MANY),
        Tiles(32, 32, 16, 16, 2, 2, 2, 1, heavy=MANY),
    ),
    256: (
        Tiles(64, 64, 16, 32, 4, 2, 2, 1, heavy=3),
        Tiles(32, 64, 16, 16, 2, 2, 2, 1, heavy=MANY),
        Tiles(32, 32, 16, 16, 2, 2, 1, 1, stages=1, heavy=MANY),
    ),
}
# fp32, as three bfloat16 planes: 16 x 16 pieces of P and dS, whose planes take three times the
# registers.
SINGLE: Table = {
    16: (
        Tiles(64, 64, 16, 16, 1, 4, 2, 2, heavy=MANY),
        Tiles(64, 64, 16, 16, 1, 4, 2, 1, heavy=MANY),
    ),
    32: (
        Tiles(32, 64, 16, 16, 1, 2, 2, 3, heavy=MANY),
        Tiles(32, 64, 16, 16, 1, 2, 2, 1, heavy=MANY),
    ),
    64: (
        Tiles(64, 32, 16, 16, 4, 2, 2, 2, heavy=MANY),
        Tiles(64, 32, 16, 16, 4, 2, 2, 1, heavy=MANY),
        Tiles(64, 32, 16, 16, 4, 2, 2, 1, stages=1, heavy=MANY),
    ),
    96: (
        Tiles(32, 32, 16, 16, 2, 2, 2, 2, heavy=MANY),
        Tiles(32, 32, 16, 16, 2, 2, 2, 1, heavy=4),
        Tiles(32, 32, 16, 16, 2, 2, 1, 1, heavy=MANY),
    ),
    128: (
        Tiles(64, 32, 16, 16, 4, 2, 2, 1, heavy=MANY),
        Tiles(64, 32, 16, 16, 4, 2, 2, 1, stages=1, heavy=MANY),
        Tiles(64, 16, 16, 16, 4, 2, 2, 1, stages=1, heavy=MANY),
    ),
    192: (
        Tiles(64, 32, 16, 16, 4, 2, 2, 1, stages=1, heavy=MANY),
        Tiles(32, 32, 16, 16, 4, 2, 2, 1, heavy=MANY),
        Tiles(32, 16, 16, 16, 4, 2, 2, 1, stages=1, heavy=MANY),
    ),
    256: (
        Tiles(64, 32, 16, 16, 4, 2, 2, 1, stages=1, heavy=MANY),
        Tiles(32, 32, 16, 16, 4, 2, 2, 1, stages=1, heavy=MANY),
        Tiles(16, 16, 16, 16, 4, 1, 1, 1, stages=1, heavy=MANY),
    ),
}


def shared_bytes(dtype: str, head_dim: int, head_dim_v: int, tiles: Tiles) -> int:
    """Return ``sizeof(Shared)`` of attention_bwd_sm80, of whose head dims these are the classes."""
    itemsize, padding = (4, 4) if dtype == "float32" else (2, 0)  # elements of padding of a row
    block_q, block_k = tiles.block_q, tiles.block_k
    rows = block_k + tiles.stages * block_q
    exchanged = (tiles.ds_buffers + (tiles.sharers > 1)) * block_k * (block_q + padding)
    statistics = 4 * 4 * block_q
    inputs = itemsize * (rows * (head_dim + head_dim_v + 2 * padding) + exchanged) + statistics
    outputs = block_k * ((head_dim + head_dim_v) * itemsize + 2 * 16)
    surroundings = 48 + 4 * 12 + 4  # the place, four steps, the number of a block
    return max(inputs, outputs) + -(-surroundings // 16) * 16


def backward_sm80(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    arch: int,
    *,
    policies: Policies,
    width: int,
    deterministic: bool,
    natural: bool,
    params_bytes: int,
) -> BackwardSm80:
    """Return the configuration of attention_bwd_sm80.

    Parameters
    ----------
    dtype : {"float16", "bfloat16", "float32"}
        Element type.
    head_dim, head_dim_v : int
        The arrays' own, at most 256.
    arch : int
        Compute capability, 90 for 9.0.
    policies : Policies
        The CUDA types of what acts on the scores.
    width : int
        Bytes of the widest access that pointers and strides allow.
    deterministic : bool
        Whether dQ is summed in a fixed order.
    natural : bool
        Whether the LSE is as it was given and not in units of log 2.
    params_bytes : int
        Bytes of Params.
    """
    element = ELEMENTS[dtype]
    itemsize = 4 if dtype == "float32" else 2
    dims = head_dim_classes(head_dim, head_dim_v)
    table = SINGLE if dtype == "float32" else HALF
    heavy = weight_of(policies, HEAVY)
    sizes = {
        tiles: shared_bytes(dtype, *dims, tiles)
        for tiles in table.get(dims, table[max(dims)])
        if tiles.heavy >= heavy
    }
    limit = shared_limit(arch)
    tiles = next(tiles for tiles, size in sizes.items() if fits(size, tiles.min_blocks, limit))
    return BackwardSm80(
        t=element,
        mask=policies.mask,
        score=policies.score,
        dropout=policies.dropout,
        sink=policies.sink,
        sequences=policies.sequences,
        order="ThreadOrder" if arch >= 90 else "LaneOrder",
        head_dim=dims[0],
        head_dim_v=dims[1],
        block_q=tiles.block_q,
        block_k=tiles.block_k,
        warp_q=tiles.warp_q,
        warp_k=tiles.warp_k,
        sharers=tiles.sharers,
        warps_q=tiles.warps_q,
        stages=tiles.stages,
        ds_buffers=tiles.ds_buffers,
        min_blocks=tiles.min_blocks,
        width=math.gcd(width, head_dim * itemsize, head_dim_v * itemsize),
        deterministic=deterministic,
        natural=natural,
        params_bytes=params_bytes,
        smem_bytes=sizes[tiles],
    )
