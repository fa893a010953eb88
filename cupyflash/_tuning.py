"""Tile tables: the sizes that each kernel is compiled with, and the measurements that chose them.

A table's row holds, for one class of head dims, tiles from the largest to the smallest; the first
that fits the architecture's shared memory, and has registers for the policies, is taken.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ._modifiers import ELEMENTS, Policies

__all__ = [
    "HEAD_DIMS", "ForwardSm80", "Tiles", "fits", "forward_sm80", "head_dim_classes",
    "heads_per_group", "shared_limit", "weight_of",
]  # fmt: skip

# Classes of head dims: an array's own dimension is padded, in the kernel, to the next of these.
HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)
# Pairs (head_dim, head_dim_v) that are compiled as they are; others are padded to equal classes.
UNEQUAL = ((64, 128), (192, 128))

# CUDA C++ Programming Guide, "Technical specifications per compute capability": KiB of shared
# memory that one block may have.
SHARED_KIB = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}
SHARED_KIB_OF_OTHERS = 99

# Policies that take registers of a kernel's loop: positions, addresses, random numbers.
# Float64: of a bias or sink.
HEAVY = dict.fromkeys(("Alibi", "Bias", "Float64", "DenseMask", "Segments", "Dropout"), 1)
MANY = sum(HEAVY.values())


@dataclass(frozen=True)
class Tiles:
    """How a block of attention_fwd_sm80 divides its work."""

    warps: int  # of a block
    m_tiles: int  # 16-row tiles of a warp
    block_k: int  # keys of a block
    stages: int  # key blocks in shared memory at a time; fp32 has one, and a landing for half of it
    min_blocks: int  # blocks that registers must leave room for; 0 leaves registers to ptxas
    q_in_registers: bool = False
    heavy: int = 0  # how many HEAVY policies there are registers for


@dataclass(frozen=True)
class ForwardSm80:
    """``struct Config`` of attention_fwd_sm80, and what follows from it."""

    t: str
    mask: str
    score: str
    dropout: str
    sink: str
    sequences: str
    head_dim: int
    head_dim_v: int
    block_k: int
    warps: int
    m_tiles: int
    stages: int
    min_blocks: int
    width: int  # bytes of an access to global memory
    q_in_registers: bool
    positive_scale: bool
    params_bytes: int
    smem_bytes: int

    @property
    def block_q(self) -> int:
        """Rows of a tile of the output."""
        return self.warps * self.m_tiles * 16

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * 32


Table = dict[int | tuple[int, int], tuple[Tiles, ...]]  # by class, or by a pair of classes

# 16-bit elements. TFLOP/s on an H200, CUDA 13.0, bfloat16, 16k tokens, heads * head_dim = 2048, at
# length 8192 full, 8192 causal, 1024 full, 1024 causal, and FlashAttention-2 in the same run.
HALF: Table = {
    16: (Tiles(4, 2, 64, 2, 2, q_in_registers=True, heavy=1), Tiles(4, 2, 32, 2, 2, heavy=MANY)),
    32: (
        Tiles(4, 2, 64, 2, 2, q_in_registers=True),  # 237 236 222 181, FA2 217 207 197 152
        Tiles(4, 2, 64, 2, 2, heavy=1),
        Tiles(4, 2, 32, 2, 2, heavy=MANY),
    ),
    64: (
        Tiles(4, 2, 64, 2, 3),  # 324 327 301 256, FA2 288 276 270 202
        Tiles(4, 2, 64, 2, 2, q_in_registers=True),  # 312 309 280 226
        Tiles(4, 2, 64, 2, 2, heavy=1),
        Tiles(4, 2, 32, 2, 2, heavy=MANY),
    ),
    96: (
        Tiles(4, 2, 64, 2, 2),
        Tiles(4, 2, 64, 2, 1),
        Tiles(4, 2, 32, 2, 2, heavy=2),
        Tiles(4, 2, 32, 2, 1, heavy=2),
        Tiles(8, 1, 32, 2, 1, heavy=MANY),
    ),
    128: (
        Tiles(4, 2, 64, 2, 2),  # 381 363 344 278, FA2 342 302 309 236
        Tiles(4, 2, 48, 2, 1),  # 379 367 328 278 with two blocks; 64 keys spill on sm_80
        Tiles(4, 2, 32, 2, 2, heavy=2),  # 334 329 291 259 without any
        Tiles(4, 2, 32, 2, 1, heavy=2),
        Tiles(8, 1, 32, 2, 1, heavy=MANY),
    ),
    192: (Tiles(8, 1, 64, 2, 1, heavy=MANY), Tiles(4, 1, 32, 2, 1, heavy=MANY)),
    256: (
        Tiles(8, 1, 64, 2, 1),  # 319 316 289 252, FA2 325 286 306 241
        Tiles(8, 1, 32, 2, 1, heavy=MANY),
        Tiles(4, 1, 32, 2, 1, heavy=MANY),  # 290 296 266 243 with two blocks and none
    ),
    (64, 128): (
        Tiles(4, 2, 48, 2, 2),  # 64 keys spill
        Tiles(4, 2, 48, 2, 1),
        Tiles(4, 2, 32, 2, 2, heavy=2),
        Tiles(4, 2, 32, 2, 1, heavy=2),
        Tiles(8, 1, 32, 2, 1, heavy=MANY),
    ),
}
# fp32 as three bfloat16 planes. TFLOP/s as above, and memory-efficient attention in the same run.
SINGLE: Table = {
    16: (Tiles(4, 2, 32, 1, 2), Tiles(4, 1, 32, 1, 2, heavy=MANY)),
    32: (Tiles(4, 2, 32, 1, 2), Tiles(4, 1, 32, 1, 2, heavy=MANY)),
    64: (
        Tiles(8, 2, 32, 1, 1),  # 54.4 52.7 51.8 42.6, efficient 35.3 34.2 34.6 31.0
        Tiles(4, 2, 16, 1, 0),
        Tiles(8, 1, 32, 1, 1, heavy=MANY),
        Tiles(4, 1, 16, 1, 0, heavy=MANY),
    ),
    96: (Tiles(8, 1, 32, 1, 1, heavy=MANY), Tiles(4, 1, 16, 1, 1, heavy=MANY)),
    128: (
        Tiles(8, 1, 32, 1, 0, heavy=1),  # 45.7 46.8 42.9 39.6, efficient 45.0 45.6 43.8 39.4
        Tiles(8, 1, 16, 1, 0, heavy=MANY),
        Tiles(4, 1, 16, 1, 1, heavy=MANY),
    ),
    192: (
        Tiles(8, 1, 16, 1, 0, heavy=MANY),
        Tiles(4, 1, 16, 1, 1, heavy=MANY),
        Tiles(2, 1, 16, 1, 0, heavy=MANY),
    ),
    256: (Tiles(4, 1, 16, 1, 1, heavy=MANY), Tiles(1, 1, 16, 1, 1, heavy=MANY)),
}


def head_dim_classes(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Return the classes that two head dims, at most 256, are compiled for."""
    pair = tuple(min(size for size in HEAD_DIMS if size >= dim) for dim in (head_dim, head_dim_v))
    return (pair[0], pair[1]) if pair in UNEQUAL else (max(pair), max(pair))


def shared_limit(arch: int) -> int:
    """Return the bytes of shared memory that one block may have on a compute capability."""
    return 1024 * SHARED_KIB.get(arch, SHARED_KIB_OF_OTHERS)


def shared_bytes(dtype: str, head_dim: int, head_dim_v: int, mask_bytes: int, tiles: Tiles) -> int:
    """Return ``sizeof(Shared)`` of attention_fwd_sm80, of whose head dims these are the classes."""
    itemsize, planes = (4, 3) if dtype == "float32" else (2, 1)
    block_q = tiles.warps * tiles.m_tiles * 16
    rows_k = tiles.stages * tiles.block_k
    inputs = 2 * planes * (block_q * head_dim + rows_k * (head_dim + head_dim_v))
    staging = block_q * (head_dim_v * itemsize + 16)
    landing = max(_landing(tiles, dim) for dim in (head_dim, head_dim_v)) if planes > 1 else 16
    surroundings = 48 + 2 * 8 + mask_bytes + 4  # the place, two addresses, the mask, a position
    return max(inputs, staging) + _aligned(surroundings, 16) + landing


def _landing(tiles: Tiles, columns: int) -> int:
    """Return the bytes where a tile lands: 32 for each chunk of 8 that a thread may move."""
    threads, chunks = tiles.warps * 32, columns // 8
    lanes = chunks // 3 if chunks % 3 == 0 else chunks
    visits = max(1, tiles.block_k * lanes // threads)
    return 32 * threads * (chunks // lanes) * visits


def forward_sm80(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    arch: int,
    *,
    policies: Policies,
    width: int,
    positive_scale: bool,
    params_bytes: int,
) -> ForwardSm80:
    """Return the configuration of attention_fwd_sm80.

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
    positive_scale : bool
        Whether the scale in base 2 is a positive normal fp32 number.
    params_bytes : int
        Bytes of Params.
    """
    element = ELEMENTS[dtype]
    itemsize = 4 if dtype == "float32" else 2
    dims = head_dim_classes(head_dim, head_dim_v)
    table = SINGLE if dtype == "float32" else HALF
    rows = table.get(dims, table[max(dims)])
    sizes = {tiles: shared_bytes(dtype, *dims, policies.mask_bytes, tiles) for tiles in rows}
    heavy = weight_of(policies, HEAVY)
    able = [(tiles, size) for tiles, size in sizes.items() if tiles.heavy >= heavy]
    tiles = _first_that_fits(able, shared_limit(arch), arch)
    return ForwardSm80(
        t=element,
        mask=policies.mask,
        score=policies.score,
        dropout=policies.dropout,
        sink=policies.sink,
        sequences=policies.sequences,
        head_dim=dims[0],
        head_dim_v=dims[1],
        block_k=tiles.block_k,
        warps=tiles.warps,
        m_tiles=tiles.m_tiles,
        stages=tiles.stages,
        min_blocks=tiles.min_blocks,
        width=math.gcd(width, head_dim * itemsize, head_dim_v * itemsize),
        q_in_registers=tiles.q_in_registers,
        positive_scale=positive_scale,
        params_bytes=params_bytes,
        smem_bytes=sizes[tiles],
    )


def _first_that_fits(sizes: Iterable[tuple[Tiles, int]], limit: int, arch: int) -> Tiles:
    """Return the first tiles whose promised blocks fit a multiprocessor."""
    for tiles, size in sizes:
        if fits(size, tiles.min_blocks, limit):
            return tiles
    raise AssertionError(f"no tiles fit compute capability {arch}")


def weight_of(policies: Policies, heavy: Mapping[str, int]) -> int:
    """Return how much of what takes registers the policies of a kernel's loop are."""
    types = " ".join((policies.mask, policies.score, policies.dropout))
    return sum(heavy.get(name, 0) for name in re.findall(r"\w+", types))


def fits(size: int, blocks: int, limit: int) -> bool:
    """Return whether a multiprocessor holds so many blocks, of which one may have `limit` bytes."""
    # It has a KiB more than a block may have, and every block takes one.
    return max(1, blocks) * (size + 1024) <= limit + 1024


def heads_per_group(
    len_k: int, head_dim: int, head_dim_v: int, itemsize: int, heads: int, least: int
) -> int:
    """Return how many heads share the L2 cache, see ``Work`` in cuda/tile/work.cuh.

    ``least``, and as many more as have K and V of 32 MiB together (H200, 60 MB of L2); groups of
    nearly one size.
    """
    one = max(1, len_k * (head_dim + head_dim_v) * itemsize)
    most = max(least, (32 << 20) // one)
    groups = -(-heads // most)
    return max(1, -(-heads // max(1, groups)))


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
