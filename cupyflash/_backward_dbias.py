"""The host's side of cuda/kernels/attention_bwd_dbias.cu and attention_bwd_dbias_sum.cu.

A block makes a tile of the gradient of the bias. Where there are few tiles with many steps each,
several blocks share one: their sums lie in the scratch, at most `BLOCKS` tiles of fp32, and a
second kernel adds them.
"""

import dataclasses
import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

from . import _modifiers, _unit
from ._array import ITEMSIZES, Array, contiguous_strides
from ._backward_delta import stat_rows
from ._backward_shared import without_sink
from ._launch import Launch
from ._problem import Operands, Problem
from ._problem_backward import Backward
from ._tuning_dbias import Dbias, dbias

__all__ = ["BLOCKS", "NAME", "SUM_NAME", "DbiasSum", "Split", "config", "launches", "split"]

NAME, SUM_NAME = "attention_bwd_dbias", "attention_bwd_dbias_sum"
# Params: q, k, v, dout, lse, delta, dbias; strides of the first four (batch, row, head); sizes,
# those of dbias, parts; the scale.
PARAMS = struct.Struct("<7Q12q14if4x")
NAMES = ("q", "k", "v", "dout", "lse")  # whose addresses come first
DELTA = 8 * len(NAMES)  # where that of delta follows
RESULT = DELTA + 8  # and that of what is written
SUM_PARAMS = struct.Struct("<2Qqi4x")
SUM_THREADS = 256
BLOCKS = 512  # a few for each multiprocessor of any GPU
MAX_GRID = 2**31 - 1  # CUDA C++ Programming Guide, Compute Capabilities: x-dimension of a grid
WRITE_BYTES = 8  # at once, at most: what the address of a new array is a multiple of


class Split(NamedTuple):
    """How many parts the sum of every tile has."""

    entries: int  # of batch entries x heads
    blocks: int  # of the queries or keys of each of them

    @property
    def parts(self) -> int:
        """All of them."""
        return self.entries * self.blocks


@dataclass(frozen=True)
class DbiasSum:
    """``struct Config`` of attention_bwd_dbias_sum."""

    out: str
    params_bytes: int


def config(problem: Problem, result: Array) -> Dbias:
    """Return the configuration that the unit of a problem is rendered from.

    Parameters
    ----------
    problem : Problem
        The call.
    result : Array
        The record of dbias, of four axes.
    """
    assert problem.arch is not None
    policies = _modifiers.policies(without_sink(problem))
    chosen = dbias(
        problem.dtype,
        problem.head_dim,
        problem.head_dim_v,
        problem.arch,
        policies=policies,
        out=_modifiers.ELEMENTS[result.dtype],
        width=problem.width,
        write=_write(result, result.dtype),
        params_bytes=PARAMS.size + policies.params_bytes,
    )
    if split(problem, result.shape, chosen).parts == 1:
        return chosen
    return dataclasses.replace(
        chosen, out=_modifiers.ELEMENTS["float32"], write=_write(result, "float32")
    )


def split(problem: Problem, shape: tuple[int, ...], chosen: Dbias) -> Split:
    """Return how many blocks share a tile, so that there are about `BLOCKS` if there can be."""
    batches, heads, rows, columns = shape
    tiles = batches * heads * -(-rows // chosen.block_q) * -(-columns // chosen.block_k)
    wanted = max(1, BLOCKS // tiles)
    entries = (problem.batch if batches == 1 else 1) * (problem.heads_q if heads == 1 else 1)
    blocks = 1
    if 1 in (rows, columns):
        length, tile = (
            (problem.len_q, chosen.block_q) if rows == 1 else (problem.len_k, chosen.block_k)
        )
        if problem.packed:  # as if all sequences had one length
            length = -(-length // max(1, problem.batch))
        blocks = -(-length // tile)
    if not entries * blocks:
        return Split(1, 1)
    entry_parts = _parts(entries, wanted)
    return Split(entry_parts, _parts(blocks, wanted // entry_parts))


def launches(
    problem: Problem,
    operands: Operands,
    backward: Backward,
    *,
    delta: int,
    scratch_offset: int,
) -> tuple[int, tuple[Launch, ...]]:
    """Return the launches that write all elements of dbias.

    Parameters
    ----------
    problem, operands : Problem, Operands
        The call; rows of q, k, v and dout allow accesses of ``problem.width`` bytes.
    backward : Backward
        Of which dout and lse are read and dbias is written, which is C-contiguous.
    delta : int
        Where in the scratch the statistics of that name are, in bytes, as `_backward_delta.launch`
        takes them.
    scratch_offset : int
        From where on the scratch may be used, a multiple of 16.

    Returns
    -------
    scratch : int
        How many bytes of it are used.
    launches : tuple of Launch
        In the order in which they run, once the statistics are made.
    """
    result = backward.dbias
    assert result is not None
    count = math.prod(result.shape)
    if not count:
        return 0, ()
    if problem.empty:  # a sum of no parts
        return 0, (_sum(problem, result, 0, scratch_offset),)
    main = _main(problem, operands, backward, delta)
    parts = split(problem, result.shape, config(problem, result)).parts
    if parts == 1:
        return 0, (dataclasses.replace(main, places=(*main.places, ("dbias", RESULT))),)
    return 4 * count * parts, (
        dataclasses.replace(main, scratch=(*main.scratch, (RESULT, scratch_offset))),
        _sum(problem, result, parts, scratch_offset),
    )


def _main(problem: Problem, operands: Operands, backward: Backward, delta: int) -> Launch:
    """Return the launch of attention_bwd_dbias, without the place of what it writes."""
    result = backward.dbias
    assert result is not None
    dense = zip(result.shape, contiguous_strides(result.shape), strict=True)
    assert result.strides == tuple(0 if n == 1 else step for n, step in dense)
    chosen = config(problem, result)
    parts = split(problem, result.shape, chosen)
    batches, heads, rows, columns = result.shape
    tiles = batches * heads * -(-rows // chosen.block_q) * -(-columns // chosen.block_k)
    assert tiles <= MAX_GRID
    arrays = (operands.q, operands.k, operands.v, backward.dout)
    bare = without_sink(problem), operands._replace(learnable_sink=None)
    params = PARAMS.pack(
        *(x.pointer for x in (*arrays, backward.lse)),
        0,
        result.pointer,
        *(stride for x in arrays for stride in x.strides[:3]),
        problem.batch,
        problem.len_q,
        problem.len_k,
        problem.heads_q,
        problem.heads_k,
        problem.head_dim,
        problem.head_dim_v,
        stat_rows(problem),
        *result.shape,
        *parts,
        problem.scale,
    )
    return Launch(
        unit=_unit.render(NAME, chosen),
        symbol=NAME,
        arch=f"sm_{problem.arch}",
        grid=(tiles * parts.parts, 1, 1),
        block=(chosen.threads, 1, 1),
        shared_bytes=chosen.smem_bytes,
        params=params + _modifiers.pack(*bare),
        places=(
            *((name, 8 * i) for i, name in enumerate(NAMES)),
            *_modifiers.places(*bare, PARAMS.size),
        ),
        scratch=((DELTA, delta),),
    )


def _sum(problem: Problem, result: Array, parts: int, scratch_offset: int) -> Launch:
    """Return the launch of attention_bwd_dbias_sum."""
    count = math.prod(result.shape)
    return Launch(
        unit=_unit.render(SUM_NAME, DbiasSum(_modifiers.ELEMENTS[result.dtype], SUM_PARAMS.size)),
        symbol=SUM_NAME,
        arch=f"sm_{problem.arch}",
        grid=(-(-count // SUM_THREADS), 1, 1),
        block=(SUM_THREADS, 1, 1),
        shared_bytes=0,
        params=SUM_PARAMS.pack(0, result.pointer, count, parts),
        places=(("dbias", 8),),
        scratch=((0, scratch_offset),) if parts else (),
    )


def _parts(count: int, wanted: int) -> int:
    """Return in how many parts of one size, the last one apart, to divide so many things."""
    if count <= 1 or wanted <= 1:
        return 1
    return -(-count // -(-count // wanted))


def _write(result: Array, dtype: str) -> int:
    """Return how many neighbours of a row of dbias may be written at once."""
    return math.gcd(result.shape[-1], WRITE_BYTES // ITEMSIZES[dtype])
