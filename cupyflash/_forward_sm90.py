"""The host's side of cuda/kernels/attention_fwd_sm90.cu: what it takes, its Params, its launch."""

import struct

from . import _unit
from ._array import ITEMSIZES, Array
from ._forward import (
    heads_per_group,
    refuse_dtype,
    refuse_lengths,
    tiles,
)
from ._launch import MAPS_BYTES, OUTPUTS, Launch
from ._modifiers import LOG2_E, pack, places, policies
from ._problem import Operands, Problem
from ._sm90 import padded, refuse_dims, refuse_strides, tensor_maps
from ._tensor_map import TensorMap
from ._tuning_sm90 import (
    HEAD_DIMS,
    TYPES,
    ForwardSm90,
    count,
    extent,
    forward_sm90,
    head_dim_classes,
)

__all__ = ["DTYPES", "NAME", "config", "launch", "refusal"]

NAME = "attention_fwd_sm90"
DTYPES: tuple[str, ...] = tuple(TYPES)
ROOMY_DIM = 128  # up to here 16 bits leave registers to several modifiers where lengths vary
MAX_TILES = 2**30  # the next tile of a block, past the last, stays in 32 bits

# What follows the tensor maps and the pointers in Params: the strides of out; what 8-bit inputs
# are multiplied by, a pointer and two strides each; 7 integers; the scale. Then come the policies'
# own, and padding to the alignment of a map.
REST = struct.Struct("<3qQ2qQ2qQ2q7if")
POLICIES_OFFSET = MAPS_BYTES + OUTPUTS.size + REST.size

ROWS_Q, ROWS_OUT = 64, 16  # of a copy: what a consumer multiplies, what one of its warps stores


def refusal(problem: Problem) -> str | None:
    """Return why the kernel does not take a problem, as the rest of a sentence, or None."""
    return (
        refuse_dtype(problem, DTYPES)
        or _refuse_dims(problem)
        or _refuse_sequences(problem)
        or _refuse_memory(problem)
        or refuse_lengths(problem)
        or _refuse_tiles(problem)
    )


def _refuse_dims(problem: Problem) -> str | None:
    if reason := refuse_dims(problem):
        return reason
    if head_dim_classes(problem.dtype, problem.head_dim, problem.head_dim_v) is None:
        return (
            f"needs head_dim and head_dim_v of one class ({', '.join(map(str, HEAD_DIMS))}), "
            f"64 and 128, or 192 and 128, got {problem.head_dim} and {problem.head_dim_v}"
        )
    return None


def _refuse_sequences(problem: Problem) -> str | None:
    if problem.packed and problem.batch == 0 and not problem.empty:
        return "needs a sequence, got none"  # a tile would have no entry of the masks' arrays
    chosen = policies(problem)
    scarce = max(problem.head_dim, problem.head_dim_v) > ROOMY_DIM and ITEMSIZES[problem.dtype] > 1
    if scarce and chosen.sequences != "Dense" and count(chosen) > 1:
        return (
            f"takes lengths that vary with one of softcap, ALiBi, bias, masks and dropout at head "
            f"dims above {ROOMY_DIM}, got {count(chosen)}"
        )
    return None


def _refuse_memory(problem: Problem) -> str | None:
    """Return why no tensor maps describe the arrays, or None."""
    if problem.empty:
        return None
    return refuse_strides(problem, "q, k, v and out")


def _refuse_tiles(problem: Problem) -> str | None:
    if (count := tiles(problem, config(problem).block_q)) > MAX_TILES:
        return f"computes at most {MAX_TILES} tiles, this needs {count}"
    return None


def config(problem: Problem) -> ForwardSm90:
    """Return the configuration that the unit of a problem is rendered from."""
    chosen = policies(problem)
    return forward_sm90(
        problem.dtype,
        problem.head_dim,
        problem.head_dim_v,
        policies=chosen,
        extent=extent(max(problem.len_q, problem.len_k), bounded=problem.band.bounded),
        params_bytes=padded(POLICIES_OFFSET + chosen.params_bytes),
    )


def launch(problem: Problem, operands: Operands, lse: int = 0) -> Launch:
    """Return the launch of a problem; ``lse`` is a pointer or 0."""
    chosen = config(problem)
    return Launch(
        unit=_unit.render(NAME, chosen),
        symbol=NAME,
        arch=f"sm_{problem.arch}a",  # "a": with the instructions that no other architecture has
        grid=(tiles(problem, chosen.block_q), 1, 1),
        block=(chosen.threads, 1, 1),
        shared_bytes=chosen.smem_bytes,
        params=_pack(problem, operands, lse),
        maps=_maps(problem, operands, chosen.block_k),
        persistent=True,
        tickets=True,
        places=places(problem, operands, POLICIES_OFFSET),
    )


def _pack(problem: Problem, operands: Operands, lse: int) -> bytes:
    """Return the bytes of Params, with room for the tensor maps; tiles are taken in turn."""
    chosen = policies(problem)
    if problem.empty:
        return bytes(padded(POLICIES_OFFSET + chosen.params_bytes))  # no block reads them
    # Tiles of one length need no order.
    group = heads_per_group(problem) if problem.band.bounded or problem.packed else 1
    params = (
        bytes(MAPS_BYTES)
        + OUTPUTS.pack(operands.out.pointer, lse, 0)
        + REST.pack(
            *operands.out.strides[:3],
            *_descale(operands.q_descale),
            *_descale(operands.k_descale),
            *_descale(operands.v_descale),
            problem.batch,
            problem.len_q,
            problem.len_k,
            problem.heads_q,
            problem.heads_k,
            problem.head_dim_v,
            group,
            problem.scale * (LOG2_E if chosen.score == "Identity" else 1.0),
        )
        + pack(problem, operands)
    )
    return params.ljust(padded(POLICIES_OFFSET + chosen.params_bytes), b"\0")


def _descale(x: Array | None) -> tuple[int, int, int]:
    """Return what Params hold of a descale: its address, 0 for none, and two strides."""
    return (0, 0, 0) if x is None else (x.pointer, x.strides[0], x.strides[1])


def _maps(problem: Problem, operands: Operands, block_k: int) -> tuple[tuple[int, TensorMap], ...]:
    """Return the tensor maps of q, k, v and out."""
    if problem.empty:
        return ()
    return tensor_maps(operands[:4], (ROWS_Q, block_k, block_k, ROWS_OUT))
