"""What acts on the scores of a call, as the kernels take it: CUDA types, and the bytes of Params.

Every kernel's Params end with those of its mask, score, dropout, sink and sequences, in this order,
as whole 8-byte words. A policy that is not there has one word that nobody reads.
"""

import math
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ._array import ITEMSIZES, Array
from ._philox import rescale, threshold
from ._problem import Operands, Problem
from .masks import Band, Mask, PrefixLM, Segments

__all__ = [
    "ELEMENTS",
    "HEADERS",
    "LOG2_E",
    "SIZES",
    "SMALLEST_NORMAL",
    "Policies",
    "pack",
    "pack_sequences",
    "pack_sink",
    "places",
    "policies",
    "softcap",
]

WORD = 8  # bytes
UNUSED = bytes(WORD)
ELEMENTS = {  # in CUDA
    "float16": "Float16", "bfloat16": "Bfloat16", "float32": "Float32", "float64": "Float64",
}  # fmt: skip

# Params of the policies, in C: cuda/masks, cuda/scores, cuda/tile.
BAND = struct.Struct("<4i")
DENSE = struct.Struct("<Q4q2i")  # of DenseMask and Bias
DENSE_MASK_BYTES = 40  # of an object
INTEGERS = struct.Struct("<Qq2i")
PREFIX_LM = struct.Struct("<2i")  # after its integers
SEGMENT_IDS = struct.Struct("<Q2q")  # of queries, or of keys
SEGMENTS = struct.Struct("<2i")  # after both
SOFTCAP = struct.Struct("<8f")
ALIBI = struct.Struct("<Q2q2i")
DROPOUT = struct.Struct("<3QIf2i")
SINK = struct.Struct("<Qq")

# Bytes of Params of each policy.
SIZES = {
    "Band": BAND.size,
    "PrefixLM": INTEGERS.size + PREFIX_LM.size,
    "Segments": 2 * SEGMENT_IDS.size + SEGMENTS.size,
    "DenseMask": DENSE.size,
    "Softcap": SOFTCAP.size,
    "Alibi": ALIBI.size,
    "Bias": DENSE.size,
    "Dropout": DROPOUT.size,
    "Sink": SINK.size,
    "Used": 2 * INTEGERS.size,
    "Packed": 4 * INTEGERS.size,
    **dict.fromkeys(("Identity", "KeepAll", "NoSink", "Dense"), WORD),
}
# tanh(x) / x in powers of x^2, off by 5.5e-7 of it up to NEAR_END: a minimax fit.
NEAR = (0.99999946, -0.33326317, 0.13190293, -0.04440222)
NEAR_END = 0.5
NEAR_SCORE = 128.0  # beyond it 5.5e-7 of a score would show beside one that is exact
LOG2_E = math.log2(math.e)
SMALLEST_NORMAL, LARGEST = 2.0**-126, 2.0**127  # of fp32
# Where each type is defined, beyond the masks' own.
HEADERS = {
    "All": "masks/all.cuh",
    "DenseMask": "masks/dense_mask.cuh",
    **dict.fromkeys(("Identity", "Chain"), "scores/score.cuh"),
    "Softcap": "scores/softcap.cuh",
    "Alibi": "scores/alibi.cuh",
    "Bias": "scores/bias.cuh",
    **dict.fromkeys(("KeepAll", "Dropout"), "tile/dropout.cuh"),
    **dict.fromkeys(("NoSink", "Sink"), "tile/sink.cuh"),
    **dict.fromkeys(("Dense", "Used", "Packed"), "tile/sequences.cuh"),
}


@dataclass(frozen=True)
class Policies:
    """The CUDA types of a kernel's policies."""

    mask: str
    score: str
    dropout: str
    sink: str
    sequences: str
    mask_bytes: int  # of an object of the mask

    @property
    def params_bytes(self) -> int:
        """The bytes that `pack` makes."""
        types = (self.mask, self.score, self.dropout, self.sink, self.sequences)
        return sum(SIZES.get(name, 0) for name in re.findall(r"\w+", " ".join(types)))


Part = tuple[str | int | None, bytes]  # what its first word is the address of
Places = tuple[tuple[str | int, int], ...]  # what is where in Params


def policies(problem: Problem) -> Policies:
    """Return the types that a problem's kernel is compiled with."""
    masks = _masks(problem)
    types = [mask.cuda_type(*dtypes) for mask, dtypes in masks]
    mask_bytes = sum(mask.cuda_bytes for mask, _ in masks)
    if "attn_mask" in problem.modifiers:
        types.append("DenseMask")
        mask_bytes += DENSE_MASK_BYTES
    dtypes = {name: ELEMENTS.get(dtype, "") for name, dtype in problem.dtypes}
    scores = []
    if problem.softcap:
        scores.append("Softcap")
    if "alibi_slopes" in problem.modifiers:
        scores.append("Alibi")
    if "attn_bias" in problem.modifiers:
        scores.append(f"Bias<{dtypes['attn_bias']}, {problem.bias_read}>")
    sink = "learnable_sink" in problem.modifiers
    used = "seqused_q" in problem.modifiers or "seqused_k" in problem.modifiers
    return Policies(
        mask=_joined("All", types),
        score=_joined("Chain", scores) if scores else "Identity",
        dropout="Dropout" if problem.dropout_p else "KeepAll",
        sink=f"Sink<{dtypes['learnable_sink']}>" if sink else "NoSink",
        sequences="Packed" if problem.packed else "Used" if used else "Dense",
        mask_bytes=mask_bytes,
    )


def _joined(template: str, types: list[str]) -> str:
    return types[0] if len(types) == 1 else f"{template}<{', '.join(types)}>"


def _masks(problem: Problem) -> list[tuple[Mask, tuple[str, ...]]]:
    """Return the masks that hide anything, the cheapest test first, with dtypes; one at least."""
    others = list(zip(problem.masks, problem.mask_dtypes, strict=True))
    if problem.band.bounded or not (others or "attn_mask" in problem.modifiers):
        return [(problem.band, ()), *others]
    return others


def pack(problem: Problem, operands: Operands) -> bytes:
    """Return the bytes of Params of mask, score, dropout, sink and sequences."""
    return b"".join(part for _, part in _parts(problem, operands))


def places(problem: Problem, operands: Operands, start: int) -> Places:
    """Return where Params hold what may change between calls, if those of policies begin at start.

    By name of an operand, or by number of an array of masks, all of them counted: the offset of its
    address. With ``rng_state`` two words follow, the seed and the offset where the address is 0.
    """
    return _places(_parts(problem, operands), start)


def pack_sequences(problem: Problem, operands: Operands, start: int) -> tuple[bytes, Places]:
    """Return the bytes of Params of sequences alone, and what `places` does for them."""
    parts = tuple(_sequence_parts(problem, operands))
    return b"".join(part for _, part in parts), _places(parts, start)


def pack_sink(operands: Operands, start: int) -> tuple[bytes, Places]:
    """Return the bytes of Params of the sink alone, and what `places` does for it."""
    part = _sink_part(operands)
    return part[1], _places((part,), start)


def _places(parts: Iterable[Part], start: int) -> Places:
    found = []
    for key, part in parts:
        if key is not None:
            found.append((key, start))
        start += len(part)
    return tuple(found)


def _parts(problem: Problem, operands: Operands) -> Iterator[Part]:
    yield from _mask_parts(problem, operands)
    yield from _score_parts(problem, operands)
    if problem.dropout_p:
        yield "rng_state", _dropout(problem, operands)
    else:
        yield None, UNUSED
    yield _sink_part(operands)
    yield from _sequence_parts(problem, operands)


def _mask_parts(problem: Problem, operands: Operands) -> Iterator[Part]:
    count = 0
    arrays = iter(operands.masks)
    for mask, _ in _masks(problem):
        own = () if mask is problem.band else next(arrays)
        if isinstance(mask, Band):
            yield None, BAND.pack(*mask.operands(problem.len_q, problem.len_k), 0)
        elif isinstance(mask, PrefixLM):
            (prefix,) = own
            yield count, _integers(prefix)
            yield None, PREFIX_LM.pack(mask.alignment == "bottom_right", 0)
        elif isinstance(mask, Segments):
            q, k = own
            yield count, SEGMENT_IDS.pack(q.pointer, *q.strides)
            yield count + 1, SEGMENT_IDS.pack(k.pointer, *k.strides)
            yield None, SEGMENTS.pack(*(_extent(problem, x.shape[1]) for x in own))
        else:
            raise AssertionError(f"Params of {type(mask).__name__} are not known")
        count += len(own)
    if operands.attn_mask is not None:
        yield "attn_mask", _dense(problem, operands.attn_mask)


def _score_parts(problem: Problem, operands: Operands) -> Iterator[Part]:
    if problem.softcap:
        yield None, softcap(problem.softcap, problem.scale)
    if (slopes := operands.alibi_slopes) is not None:
        batch, head = (0, *slopes.strides)[-2:]
        bottom_right = problem.band.alignment == "bottom_right"
        yield "alibi_slopes", ALIBI.pack(slopes.pointer, batch, head, bottom_right, 0)
    if operands.attn_bias is not None:
        yield "attn_bias", _dense(problem, operands.attn_bias)
    if not (problem.softcap or slopes is not None or operands.attn_bias is not None):
        yield None, UNUSED


def softcap(cap: float, scale: float) -> bytes:
    """Return Params of Softcap; its series is of scores before the scale, in units of log 2."""
    square, power, series = (scale / cap) * (scale / cap), scale * LOG2_E, []
    for coefficient in NEAR:
        series.append(coefficient * power)
        power *= square
    normal = all(SMALLEST_NORMAL <= abs(c) < LARGEST for c in series)
    reach = min(NEAR_END * cap, NEAR_SCORE) ** 2 / (scale * scale) if normal else -1.0
    return SOFTCAP.pack(cap, 2 / cap, *(series if normal else [0.0] * len(NEAR)), reach, 0.0)


def _dropout(problem: Problem, operands: Operands) -> bytes:
    state = operands.rng_state
    drops, factor = threshold(problem.dropout_p), rescale(problem.dropout_p)
    if isinstance(state, Array):
        words = state.shape[0] if ITEMSIZES[state.dtype] == WORD else -state.shape[0]
        return DROPOUT.pack(state.pointer, 0, 0, drops, factor, words, 0)
    seed, offset = state or (0, 0)
    return DROPOUT.pack(0, seed, offset, drops, factor, 0, 0)


def _sink_part(operands: Operands) -> Part:
    if (sink := operands.learnable_sink) is not None:
        return "learnable_sink", SINK.pack(sink.pointer, sink.strides[0])
    return None, UNUSED


def _sequence_parts(problem: Problem, operands: Operands) -> Iterator[Part]:
    if operands.cu_seqlens_q is operands.seqused_q is operands.seqused_k is None:
        yield None, UNUSED
        return
    bounds = ("cu_seqlens_q", "cu_seqlens_k") if problem.packed else ()
    for name in (*bounds, "seqused_q", "seqused_k"):
        lengths = getattr(operands, name)
        yield (name, _integers(lengths)) if lengths is not None else (None, bytes(INTEGERS.size))


def _integers(x: Array) -> bytes:
    """Return what the kernels read integers of any width by, along the last axis."""
    return INTEGERS.pack(x.pointer, x.strides[-1], ITEMSIZES[x.dtype], x.dtype[0] == "i")


def _dense(problem: Problem, x: Array) -> bytes:
    """Return what a bias or mask of all scores is read by."""
    rows, columns = (_extent(problem, length) for length in x.shape[2:])
    return DENSE.pack(x.pointer, *x.strides, rows, columns)


def _extent(problem: Problem, length: int) -> int:
    """Return how many positions of an array a sequence must not exceed, 0 where it cannot."""
    return length if problem.packed and length > 1 else 0
