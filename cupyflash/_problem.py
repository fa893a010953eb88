"""A call becomes a `Problem` and its `Operands`: validated here, once, over one table of shapes.

A `Problem` is frozen, hashable and holds no array: it decides the kernel. The `Operands` are the
arrays, viewed as the contract's (batch, length, heads, head_dim) whatever the caller's layout is.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ._array import HOST, ITEMSIZES, Array
from ._array.host import host_view
from ._scalars import factor, random_state, scalars
from ._tensor_map import MAX_STRIDE
from ._views import broadcast, overlap, overlaps_itself, permuted, strides_like
from .errors import InvalidArgument, InvalidType
from .masks import Band

__all__ = [
    "DESCALES", "LAYOUTS", "MODIFIERS", "Operands", "Problem", "describe", "host_metadata",
    "stand_in",
]  # fmt: skip

Shape = tuple[str, ...]
# The shapes that an array may have; equal words are equal sizes.
SHAPES: dict[str, tuple[Shape, ...]] = {
    "q": (("batch", "len_q", "heads_q", "head_dim"),),
    "k": (("batch", "len_k", "heads_k", "head_dim"),),
    "v": (("batch", "len_k", "heads_k", "head_dim_v"),),
    "out": (("batch", "len_q", "heads_q", "head_dim_v"),),
    "alibi_slopes": (("heads_q",), ("batch", "heads_q")),
    "learnable_sink": (("heads_q",),),
    "seqused_q": (("batch",),),
    "seqused_k": (("batch",),),
}
SCORES: Shape = ("batch", "heads_q", "len_q", "len_k")
DESCALES = ("q_descale", "k_descale", "v_descale")  # what fp8 inputs are multiplied by
# The shapes that arrays of fewer or smaller dimensions are broadcast to.
BROADCAST: dict[str, Shape] = {
    **dict.fromkeys(("attn_bias", "attn_mask"), SCORES),
    **dict.fromkeys(DESCALES, ("batch", "heads_k")),
}
LAYOUTS = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3)}  # each permutation undoes itself

FLOATS = ("float16", "bfloat16", "float32", "float64")
FLOAT8S = ("float8_e4m3fn", "float8_e5m2")
INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
DTYPES = {
    **dict.fromkeys(("q", "k", "v"), FLOATS + FLOAT8S),
    "alibi_slopes": ("float32",),
    "attn_bias": FLOATS,
    "attn_mask": ("bool",),
    "learnable_sink": FLOATS,
    **dict.fromkeys(DESCALES, ("float32",)),
    **dict.fromkeys(("seqused_q", "seqused_k"), INTEGERS),
}
METADATA = ("seqused_q", "seqused_k")  # may lie in host memory beside arrays of a GPU

# What a kernel may lack, beyond the band: names of arguments, in the order in which they act.
MODIFIERS = (
    "softcap", "alibi_slopes", "attn_bias", "attn_mask", "seqused_q", "seqused_k",
    "learnable_sink", "dropout_p",
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """One attention call without its arrays: all that the choice of a kernel may depend on."""

    dtype: str
    batch: int
    len_q: int
    len_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    scale: float
    band: Band
    softcap: float = 0.0
    dropout_p: float = 0.0
    modifiers: tuple[str, ...] = ()
    arch: int | None = None  # compute capability, 90 for 9.0; None is host memory
    width: int = 16  # bytes that one access to q, k, v and out may have
    odd_stride: int | None = None  # one of q, k, v or out, in bytes, that no tensor map holds
    op: str = "forward"

    @property
    def empty(self) -> bool:
        """Whether no query of any head is there to attend."""
        return self.batch * self.len_q * self.heads_q == 0

    @property
    def output_dtype(self) -> str:
        """The dtype of the output."""
        return output_dtype(self.dtype)

    @property
    def lse_dtype(self) -> str:
        """The dtype of the log-sum-exp."""
        return "float64" if self.dtype == "float64" else "float32"


class Operands(NamedTuple):
    """The arrays of a call as (batch, length, heads, head_dim); those of BROADCAST as such views.

    ``out`` has a null pointer until it is allocated, with those strides. ``rng_state`` is a pair of
    integers, or an array of the device.
    """

    q: Array
    k: Array
    v: Array
    out: Array
    alibi_slopes: Array | None = None
    attn_bias: Array | None = None
    attn_mask: Array | None = None
    seqused_q: Array | None = None
    seqused_k: Array | None = None
    learnable_sink: Array | None = None
    q_descale: Array | None = None
    k_descale: Array | None = None
    v_descale: Array | None = None
    rng_state: tuple[int, int] | Array | None = None


def describe(
    arrays: Mapping[str, Array],
    *,
    arch: int | None,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = (-1, -1),
    alignment: Any = "bottom_right",
    softcap: Any = 0.0,
    dropout_p: Any = 0.0,
    rng_state: Any = None,
    layout: Any = "bshd",
) -> tuple[Problem, Operands]:
    """Check a call and say what it is.

    Parameters
    ----------
    arrays : mapping of str to Array
        By argument name, in the caller's layout: q, k, v, and those of out, alibi_slopes,
        attn_bias, attn_mask, seqused_q, seqused_k, learnable_sink and the descales that the call
        has. Only metadata of host memory is read; a null pointer is right for an array that is not
        there yet.
    arch : int or None
        Compute capability of the arrays' device, None for host memory.
    softmax_scale, causal, window_size, alignment, softcap, dropout_p, rng_state, layout
        As `cupyflash.attention` takes them; `rng_state` may be an Array.

    Returns
    -------
    Problem, Operands
    """
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise InvalidArgument(f"`layout` must be 'bshd' or 'bhsd', got {layout!r}")
    band = Band.of(causal, window_size, alignment)
    _check_kinds(arrays)
    sizes, operands = _bind(arrays, LAYOUTS[layout])
    _check_heads(sizes["heads_q"], sizes["heads_k"])
    _check_lengths(operands, sizes)
    if "out" in operands:
        _check_out(operands)
    else:
        operands["out"] = permuted(_fresh(arrays["q"], sizes["head_dim_v"]), LAYOUTS[layout])
    dtype = arrays["q"].dtype
    numbers = scalars(softmax_scale, softcap, dropout_p, sizes["head_dim"], dtype)
    problem = Problem(
        dtype,
        **(sizes | numbers),
        band=band,
        modifiers=tuple(name for name in MODIFIERS if name in operands or numbers.get(name)),
        arch=arch,
        width=_width(operands, arch),
        odd_stride=_odd_stride(operands),
    )
    state = random_state(rng_state, problem.dropout_p > 0, arrays["q"].device)
    return problem, Operands(**operands, rng_state=state)


def stand_in(name: str, value: Any, q: Array) -> Array | None:
    """Return a record for a descale that is a number, beside q; None for any other argument."""
    if name not in DESCALES or factor(name, value) is None:
        return None
    return q._replace(pointer=0, shape=(), strides=(), dtype="float32", owner=None)


def host_metadata(x: Any, name: str) -> Any:
    """Return a list or tuple of lengths as an array, any other argument as it is."""
    if name not in METADATA or not isinstance(x, tuple | list):
        return x
    try:
        return np.asarray(x) if len(x) else np.zeros(0, np.int64)
    except (TypeError, ValueError):  # ragged, or of what is no number
        raise InvalidType(
            f"`{name}` must hold one integer per batch entry, got {x!r:.60}"
        ) from None


def output_dtype(dtype: str) -> str:
    """Return the dtype of the output for inputs of a dtype."""
    return "bfloat16" if dtype in FLOAT8S else dtype


def _check_kinds(arrays: Mapping[str, Array]) -> None:
    """Check frameworks, devices and dtypes: q decides."""
    q = arrays["q"]
    for name in DESCALES:
        if name in arrays and q.dtype not in FLOAT8S:
            raise InvalidArgument(
                f"`{name}` is only for fp8 inputs, these are {q.dtype}: leave it out"
            )
    for name, array in arrays.items():
        if name in METADATA and array.device == HOST:
            continue
        if (array.framework, array.device) != (q.framework, q.device):
            raise InvalidArgument(
                f"`{name}` is {_origin(array)} and `q` is {_origin(q)}: "
                "pass arrays of one framework on one device"
            )
    for name, array in arrays.items():
        expected = DTYPES.get(name, (output_dtype(q.dtype),))
        if array.dtype not in expected:
            if name in ("q", "k", "v") and array.dtype in ("int8", "uint8"):
                raise InvalidType(
                    f"`{name}` has dtype {array.dtype}: view the bits of fp8 numbers as "
                    f"{' or '.join(FLOAT8S)}, as ml_dtypes and the frameworks name them"
                )
            raise InvalidType(
                f"`{name}` has dtype {array.dtype}: expected {' or '.join(expected)}, convert it"
            )
        if name in ("k", "v") and array.dtype != q.dtype:
            raise InvalidType(
                f"`{name}` has dtype {array.dtype} and `q` {q.dtype}: convert one to the other"
            )


def _origin(array: Array) -> str:
    """Say what an array is and where it lies."""
    place = "in host memory" if array.device == HOST else f"on CUDA device {array.device}"
    return f"a {array.framework} array {place}"


def _bind(
    arrays: Mapping[str, Array], axes: tuple[int, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Bind the sizes as einsum binds letters; return them and the arrays in the contract's view."""
    sizes: dict[str, Any] = {}
    origin: dict[str, str] = {}
    operands: dict[str, Any] = {}
    for name, shapes in SHAPES.items():
        if name not in arrays:
            continue
        array = arrays[name]
        words = next((words for words in shapes if len(words) == len(array.shape)), None)
        if words is None:
            shown = " or ".join(_in_layout(words, axes) for words in shapes)
            raise InvalidArgument(f"`{name}` must have shape {shown}, got {array.shape}")
        operands[name] = permuted(array, axes) if len(words) == len(axes) else array
        for word, size in zip(words, operands[name].shape, strict=True):
            if sizes.setdefault(word, size) != size:
                raise InvalidArgument(
                    f"`{name}` of shape {array.shape} has {word} {size} and `{origin[word]}` has "
                    f"{sizes[word]}: they must be equal"
                )
            origin.setdefault(word, name)
    for name, words in BROADCAST.items():
        if name in arrays:
            shape = tuple(sizes[word] for word in words)
            operands[name] = broadcast(arrays[name], shape)
            if operands[name] is None:
                raise InvalidArgument(
                    f"`{name}` must broadcast to ({', '.join(words)}) = {shape}, "
                    f"got shape {arrays[name].shape}"
                )
    return sizes, operands


def _in_layout(words: Shape, axes: tuple[int, ...]) -> str:
    """Write a shape as the caller's layout has it."""
    ordered = [words[axis] for axis in axes] if len(words) == len(axes) else words
    return f"({', '.join(ordered)}{',' if len(ordered) == 1 else ''})"


def _check_heads(heads_q: int, heads_k: int) -> None:
    if heads_q and (heads_k == 0 or heads_q % heads_k):
        raise InvalidArgument(
            f"`k` has {heads_k} heads and `q` has {heads_q}: "
            "heads of q must be a multiple of heads of k"
        )


def _check_lengths(operands: Mapping[str, Array], sizes: Mapping[str, int]) -> None:
    """Check the values of lengths that lie in host memory; those of a device are never read."""
    for name, word in (("seqused_q", "len_q"), ("seqused_k", "len_k")):
        array = operands.get(name)
        if array is None or array.device != HOST or not array.pointer:
            continue
        for entry, length in enumerate(host_view(array).tolist()):
            if not 0 <= length <= sizes[word]:
                raise InvalidArgument(
                    f"`{name}[{entry}]` must be from 0 to {word} = {sizes[word]}, got {length}"
                )


def _check_out(operands: Mapping[str, Array]) -> None:
    """Check that ``out`` can be written without changing an input."""
    out = operands["out"]
    if out.readonly:
        raise InvalidArgument("`out` is read-only: pass a writable array")
    if out.shape[3] > 1 and out.strides[3] != 1:
        raise InvalidArgument(
            f"`out` must have a contiguous last dimension, got stride {out.strides[3]}: "
            "pass a C-contiguous array"
        )
    if overlaps_itself(out):
        raise InvalidArgument(
            f"`out` must not overlap itself, got strides {out.strides} for shape {out.shape}: "
            "pass a C-contiguous array"
        )
    for name, array in operands.items():
        if name != "out" and overlap(out, array):
            raise InvalidArgument(f"`out` must not overlap `{name}`: pass an array of its own")


def _fresh(q: Array, head_dim_v: int) -> Array:
    """Return the output to allocate, in the caller's layout: q's order of dimensions if dense."""
    shape = (*q.shape[:3], head_dim_v)
    return q._replace(
        pointer=0,
        shape=shape,
        strides=strides_like(q, shape),
        dtype=output_dtype(q.dtype),
        readonly=False,
        owner=None,
    )


def _width(operands: Mapping[str, Array], arch: int | None) -> int:
    """Return the bytes of the widest access, at most 16, that every row of every array allows."""
    width = 16
    for name in ("q", "k", "v", "out"):
        array, itemsize = operands[name], ITEMSIZES[operands[name].dtype]
        if array.pointer % itemsize and arch is not None:
            raise InvalidArgument(
                f"`{name}` starts at address {array.pointer:#x}, which is no multiple of the "
                f"{itemsize} bytes of its dtype: pass an aligned array"
            )
        width = math.gcd(width, array.pointer)
        for stride, size in zip(array.strides[:3], array.shape[:3], strict=True):
            width = math.gcd(width, stride * itemsize if size > 1 else 0)
    return width


def _odd_stride(operands: Mapping[str, Array]) -> int | None:
    """Return the first stride, in bytes, that is not from 1 to what a tensor map holds."""
    for name in ("q", "k", "v", "out"):
        array = operands[name]
        for stride, size in zip(array.strides[:3], array.shape[:3], strict=True):
            step = stride * ITEMSIZES[array.dtype]
            if size > 1 and not 0 < step < MAX_STRIDE:
                return step
    return None
