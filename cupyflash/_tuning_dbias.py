"""Tile table of attention_bwd_dbias; the kernel's page has what chose its sizes."""

import math
from dataclasses import dataclass

from ._modifiers import ELEMENTS, Policies
from ._tuning import fits, shared_limit, weight_of

__all__ = ["HALF", "SINGLE", "Dbias", "Tiles", "chunk_of", "dbias", "shared_bytes"]

# Columns of a chunk; in fp32, of three planes, half of them are more products. Each chunk costs a
# barrier and what starts its copies, about as much as 8 columns do.
CHUNKS = {"float32": (32, 16), "float16": (64, 48, 32, 16), "bfloat16": (64, 48, 32, 16)}
CHUNK_COST = 8
# Bytes of Shared beside tiles and statistics: three steps, the cursor, the part.
STEPS_BYTES = 3 * 72 + 7 * 4 + 6 * 4


@dataclass(frozen=True)
class Tiles:
    """How a block divides its work."""

    warps: int  # of a block
    m_tiles: int  # 16-row tiles of a warp
    block_k: int  # keys of a block
    stages: int  # chunks in shared memory at a time; fp32 has one, and a landing
    min_blocks: int  # blocks that registers must leave room for; 0 leaves registers to ptxas
    heavy: int = 0  # for what sum of HEAVY there are registers


@dataclass(frozen=True)
class Dbias:
    """``struct Config`` of attention_bwd_dbias, and what follows from it."""

    t: str
    out: str
    mask: str
    score: str
    dropout: str
    sequences: str
    block_k: int
    warps: int
    m_tiles: int
    chunk: int
    stages: int
    min_blocks: int
    width: int  # bytes of an access to global memory
    write: int  # elements of dBias that are written at once
    params_bytes: int
    smem_bytes: int

    @property
    def block_q(self) -> int:
        """Queries of a tile."""
        return self.warps * self.m_tiles * 16

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * 32


# Policies that take registers beside the bias; an address for each pair takes most.
HEAVY = {"Softcap": 1, "Alibi": 1, "Segments": 1, "Dropout": 1, "Float64": 1, "DenseMask": 2}
MANY = sum(HEAVY.values())
HALF = (
    Tiles(4, 2, 64, 3, 2),
    Tiles(4, 1, 64, 3, 3, heavy=1),
    Tiles(4, 1, 64, 3, 2, heavy=MANY),
    Tiles(8, 1, 64, 3, 1, heavy=MANY),  # a multiprocessor of 100 KiB
)
SINGLE = (Tiles(4, 1, 64, 1, 2, heavy=MANY),)


def chunk_of(dtype: str, head_dim: int, head_dim_v: int) -> int:
    """Return the columns of a chunk, of which both products have whole ones."""

    def cost(chunk: int) -> int:
        chunks = sum(max(1, -(-dim // chunk)) for dim in (head_dim, head_dim_v))
        return chunks * (chunk + CHUNK_COST)

    return min(CHUNKS[dtype], key=cost)


def shared_bytes(dtype: str, chunk: int, tiles: Tiles) -> int:
    """Return ``sizeof(Shared)``."""
    planes = 3 if dtype == "float32" else 1
    block_q = 16 * tiles.warps * tiles.m_tiles
    slots = tiles.stages * planes * 2 * chunk * (block_q + tiles.block_k)
    sums = 4 * block_q * (tiles.block_k + 4)
    landing = 4 * chunk * (block_q + tiles.block_k) if planes > 1 else 32
    statistics = 2 * 2 * 4 * block_q
    return -(-(max(slots, sums) + landing + statistics + STEPS_BYTES) // 16) * 16


def dbias(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    arch: int,
    *,
    policies: Policies,
    out: str,
    width: int,
    write: int,
    params_bytes: int,
) -> Dbias:
    """Return the configuration of attention_bwd_dbias.

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
    out : str
        The CUDA type of what is written.
    width : int
        Bytes of the widest access that pointers and strides of the inputs allow.
    write : int
        Elements that may be written at once.
    params_bytes : int
        Bytes of Params.
    """
    itemsize = 4 if dtype == "float32" else 2
    chunk = chunk_of(dtype, head_dim, head_dim_v)
    heavy = weight_of(policies, HEAVY)
    tiles = next(
        tiles
        for tiles in (SINGLE if dtype == "float32" else HALF)
        if tiles.heavy >= heavy
        and fits(shared_bytes(dtype, chunk, tiles), tiles.min_blocks, shared_limit(arch))
    )
    return Dbias(
        t=ELEMENTS[dtype],
        out=out,
        mask=policies.mask,
        score=policies.score,
        dropout=policies.dropout,
        sequences=policies.sequences,
        block_k=tiles.block_k,
        warps=tiles.warps,
        m_tiles=tiles.m_tiles,
        chunk=chunk,
        stages=tiles.stages,
        min_blocks=tiles.min_blocks,
        width=math.gcd(width, head_dim * itemsize, head_dim_v * itemsize),
        write=write,
        params_bytes=params_bytes,
        smem_bytes=shared_bytes(dtype, chunk, tiles),
    )
