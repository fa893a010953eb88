"""A call becomes a `Problem` and its `Operands`: validated here, once, over one table of shapes.

A `Problem` is frozen, hashable and holds no array: it decides the kernel. The `Operands` are the
arrays, viewed as the contract's (batch, length, heads, head_dim) whatever the caller's layout is;
packed sequences are one batch entry there.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ._array import HOST, ITEMSIZES, Array, normal_strides
from ._array.host import host_view
from ._scalars import factor, flag, random_state, scalars
from ._tensor_map import MAX_STRIDE
from ._views import broadcast, overlap, overlaps_itself, permuted, strides_like
from .errors import InvalidArgument, InvalidType, shown
from .masks import Band, Mask, Segments

__all__ = [
    "DESCALES", "LAYOUTS", "MODIFIERS", "Extent", "Form", "Operands", "Problem", "access_width",
    "checked", "describe", "extents", "forms", "fresh", "host_metadata", "is_metadata", "one_entry",
    "recheck", "shapes", "stand_in",
]  # fmt: skip

Shape = tuple[str, ...]
# The shapes that an array may have; equal words are equal sizes.
SHAPES: dict[str, tuple[Shape, ...]] = {
    "q": (("batch", "len_q", "heads_q", "head_dim"),),
    "k": (("batch", "len_k", "heads_k", "head_dim"),),
    "v": (("batch", "len_k", "heads_k", "head_dim_v"),),
    "out": (("batch", "len_q", "heads_q", "head_dim_v"),),
    "dout": (("batch", "len_q", "heads_q", "head_dim_v"),),
    "lse": (("batch", "heads_q", "len_q"),),
    "dlse": (("batch", "heads_q", "len_q"),),
    "alibi_slopes": (("heads_q",), ("batch", "heads_q")),
    "learnable_sink": (("heads_q",),),
    "seqused_q": (("batch",),),
    "seqused_k": (("batch",),),
}
# Those of packed sequences, where they differ; the batch is the number of sequences.
PACKED: dict[str, tuple[Shape, ...]] = {
    "cu_seqlens_q": (("batch + 1",),),
    "cu_seqlens_k": (("batch + 1",),),
    "q": (("total_q", "heads_q", "head_dim"),),
    "k": (("total_k", "heads_k", "head_dim"),),
    "v": (("total_k", "heads_k", "head_dim_v"),),
    "out": (("total_q", "heads_q", "head_dim_v"),),
    "dout": (("total_q", "heads_q", "head_dim_v"),),
    "lse": (("heads_q", "total_q"),),
    "dlse": (("heads_q", "total_q"),),
}
SCORES: Shape = ("batch", "heads_q", "len_q", "len_k")
ALIGNMENT = 8  # bytes that a plan may rely on in the address of an array of a modifier
DESCALES = ("q_descale", "k_descale", "v_descale")  # what fp8 inputs are multiplied by
# The shapes that arrays of fewer or smaller dimensions are broadcast to. Of packed sequences, the
# axes of POSITIONS have the size 1 or as many positions as there are in any sequence.
BROADCAST: dict[str, Shape] = {
    **dict.fromkeys(("attn_bias", "attn_mask"), SCORES),
    **dict.fromkeys(DESCALES, ("batch", "heads_k")),
}
POSITIONS = ("len_q", "len_k")
SIZES = ("batch", *POSITIONS, "heads_q", "heads_k", "head_dim", "head_dim_v")
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
    **dict.fromkeys(("seqused_q", "seqused_k", "cu_seqlens_q", "cu_seqlens_k"), INTEGERS),
}
RESULTS = ("out", "dout", "lse", "dlse")  # of the forward pass, and their gradients
# The arrays that kernels of each operation read by rows, or write so: the first may have a tensor
# map, the others have none.
ROWS = {"forward": (("q", "k", "v", "out"), ()), "backward": (("q", "k", "v", "dout"), ("out",))}
# May lie in host memory beside arrays of a GPU, as may the arrays of masks.
METADATA = ("seqused_q", "seqused_k", "cu_seqlens_q", "cu_seqlens_k")

# What a kernel may lack, beyond the band: names of arguments, in the order in which they act.
MODIFIERS = (
    "softcap", "alibi_slopes", "attn_bias", "mask", "segment_ids", "attn_mask", "cu_seqlens_q",
    "cu_seqlens_k", "seqused_q", "seqused_k", "learnable_sink", "dropout_p",
)  # fmt: skip


class Form(NamedTuple):
    """One mask of a call, without its arrays."""

    argument: str  # that it came by
    mask: Mask  # static
    names: tuple[str, ...]  # of its arrays, in the order of Mask.shapes


class Extent(NamedTuple):
    """How many positions an array has, for packed sequences."""

    name: str
    word: str  # "len_q" or "len_k"
    size: int


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
    masks: tuple[Mask, ...] = ()  # beyond the band, without their arrays
    mask_dtypes: tuple[tuple[str, ...], ...] = ()  # of those arrays
    dtypes: tuple[tuple[str, str], ...] = ()  # of the arrays of modifiers, by name
    bias_read: int = 0  # neighbours in a row of attn_bias that may be read at once; 0: none are
    packed: bool = False  # sequences lie in arrays of len_q and len_k rows; batch counts them
    arch: int | None = None  # compute capability, 90 for 9.0; None is host memory
    # Bytes that one access may have to q, k, v, out and, backward, to dout, dq, dk and dv.
    width: int = 16
    # A stride of q, k, v, and out or, backward, dout, in bytes, that no tensor map holds.
    odd_stride: int | None = None
    op: str = "forward"  # or "backward"
    deterministic: bool = False  # backward: whether no bit may depend on the order of blocks
    wanted: tuple[str, ...] = ()  # backward: of "dbias" and "dsink", beside dq, dk and dv

    @property
    def empty(self) -> bool:
        """Whether no query of any head is there to attend."""
        return (self.packed or self.batch) * self.len_q * self.heads_q == 0

    @property
    def output_dtype(self) -> str:
        """The dtype of the output."""
        return output_dtype(self.dtype)

    @property
    def lse_dtype(self) -> str:
        """The dtype of the log-sum-exp."""
        return lse_dtype(self.dtype)


class Operands(NamedTuple):
    """The arrays of a call as (batch, length, heads, head_dim); those of BROADCAST as such views.

    Packed sequences are one batch entry of q, k, v and out. ``out`` has a null pointer until it is
    allocated, with those strides. ``rng_state`` is a pair of integers, or an array of the device.
    ``masks`` are the arrays of each of Problem.masks.
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
    cu_seqlens_q: Array | None = None
    cu_seqlens_k: Array | None = None
    masks: tuple[tuple[Array, ...], ...] = ()


def describe(arrays: Mapping[str, Array], **options: Any) -> tuple[Problem, Operands]:
    """Check a forward call and say what it is; the parameters are those of `checked`."""
    problem, operands = checked("forward", arrays, **options)
    return problem, Operands(**operands)


def checked(
    op: str,
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
    deterministic: Any = False,
    masks: Iterable[Form] = (),
) -> tuple[Problem, dict[str, Any]]:
    """Check what the calls of every operation have in common.

    Parameters
    ----------
    op : {"forward", "backward"}
        Where ``out`` is written, or read beside dout, lse and dlse.
    arrays : mapping of str to Array
        By argument name, in the caller's layout: q, k, v, and those of out, dout, lse, dlse,
        alibi_slopes, attn_bias, attn_mask, seqused_q, seqused_k, learnable_sink, the descales and
        the arrays of masks that the call has; cu_seqlens_q and cu_seqlens_k where sequences are
        packed. Only metadata of host memory is read; a null pointer is right for an array that is
        not there yet.
    arch : int or None
        Compute capability of the arrays' device, None for host memory.
    softmax_scale, causal, window_size, alignment, softcap, dropout_p, rng_state, layout
        As `cupyflash.attention` takes them; `rng_state` may be an Array.
    deterministic
        Likewise; of a forward pass it is checked only.
    masks : iterable of Form
        What `forms` returns.

    Returns
    -------
    Problem
    operands : dict of str to object
        The fields of `Operands`, and dout, lse and dlse as such views.
    """
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise InvalidArgument(f"`layout` must be 'bshd' or 'bhsd', got {shown(layout)}")
    band = Band.of(causal, window_size, alignment)
    band, rest = _merged(band, masks, aligned="alibi_slopes" in arrays)
    packed = _is_packed(arrays)
    if packed and layout != "bshd":
        raise InvalidArgument(
            f"`layout` must be 'bshd' for packed sequences, which are (total, heads, head_dim), "
            f"got {shown(layout)}"
        )
    axes = (0, 1, 2) if packed else LAYOUTS[layout]
    _check_kinds(arrays)
    sizes, operands = _bind(arrays, shapes(packed), axes)
    _check_heads(sizes["heads_q"], sizes["heads_k"])
    longest = _check_lengths(operands, sizes, packed)
    for name, words in BROADCAST.items():
        if name in arrays:
            operands[name] = _spread(arrays[name], name, words, sizes, longest)
    for form in rest:
        _check_one_dtype(form, arrays)
    mask_operands = tuple(
        tuple(
            _spread(arrays[name], name, words, sizes, longest)
            for name, words in zip(form.names, form.mask.shapes.values(), strict=True)
        )
        for form in rest
    )
    if "out" not in operands:
        operands["out"] = permuted(fresh(arrays["q"], sizes["head_dim_v"]), axes)
    elif op == "forward":
        recorded = {"rng_state": rng_state} if isinstance(rng_state, Array) else {}
        _check_out({**arrays, **operands, **recorded})
    if arch is not None:
        _check_alignment(arrays)
    if packed:
        whole = [name for name in ("q", "k", "v", *RESULTS) if name in operands]
        operands |= {name: one_entry(operands[name]) for name in whole}
    mapped, others = ([operands[name] for name in names] for names in ROWS[op])
    deterministic = flag("deterministic", deterministic)
    dtype = arrays["q"].dtype
    numbers = scalars(softmax_scale, softcap, dropout_p, sizes["head_dim"], dtype)
    present = {*operands, *(form.argument for form in rest)}
    problem = Problem(
        dtype,
        **({word: sizes[word] for word in SIZES} | numbers),
        band=band,
        modifiers=tuple(name for name in MODIFIERS if name in present or numbers.get(name)),
        masks=tuple(form.mask for form in rest),
        mask_dtypes=tuple(tuple(x.dtype for x in own) for own in mask_operands),
        dtypes=tuple((name, operands[name].dtype) for name in MODIFIERS if name in operands),
        bias_read=_readable(operands["attn_bias"]) if "attn_bias" in operands else 0,
        packed=packed,
        arch=arch,
        width=access_width(mapped + others),
        odd_stride=_odd_stride(mapped),
        op=op,
        deterministic=deterministic and op == "backward",
    )
    state = random_state(rng_state, problem.dropout_p > 0, arrays["q"].device)
    return problem, {**operands, "rng_state": state, "masks": mask_operands}


def recheck(problem: Problem, extents: Iterable[Extent], metadata: Mapping[str, Array]) -> None:
    """Check other values of the host's metadata for a problem that was described before.

    Parameters
    ----------
    problem : Problem
        What `describe` returned.
    extents : iterable of Extent
        What `extents` returned.
    metadata : mapping of str to Array
        All metadata that lies in host memory, of the same shapes as before.
    """
    sizes = {"len_q": problem.len_q, "len_k": problem.len_k}
    longest = _check_lengths(metadata, sizes, problem.packed)
    for extent in extents:
        _check_extent(extent, longest)


def extents(problem: Problem, operands: Operands, masks: Iterable[Form]) -> tuple[Extent, ...]:
    """Return how far the arrays reach that have the positions of packed sequences."""
    if not problem.packed:
        return ()
    named = [
        (name, x, SCORES)
        for name, x in (("attn_bias", operands.attn_bias), ("attn_mask", operands.attn_mask))
        if x is not None
    ]
    forms = [form for form in masks if form.mask.shapes]
    own = [arrays for arrays in operands.masks if arrays]
    for form, arrays in zip(forms, own, strict=True):
        named += zip(form.names, arrays, form.mask.shapes.values(), strict=True)
    return tuple(
        Extent(name, word, size)
        for name, x, words in named
        for word, size in zip(words, x.shape, strict=True)
        if word in POSITIONS and size != 1
    )


def forms(mask: Any = None, segment_ids: Any = None) -> tuple[tuple[Form, ...], dict[str, Any]]:
    """Take masks apart: return their static parts, and their arrays by name.

    Parameters
    ----------
    mask : Mask, optional
        As `cupyflash.attention` takes it.
    segment_ids : array or pair of arrays, optional
        Likewise.

    Notes
    -----
    True in place of an array stays: one of its own, of a call that is only talked about.
    """
    if mask is not None and not isinstance(mask, Mask):
        raise InvalidType(
            f"`mask` must be a mask of cupyflash.masks, got {type(mask).__name__}: "
            "pass an array of bools as `attn_mask`"
        )
    parts = () if mask is None else mask.parts
    place = "mask" if len(parts) == 1 else "mask.parts[{}]"
    named = [
        ("mask", part, [f"{place.format(n)}.{name}" for name in part.shapes])
        for n, part in enumerate(parts)
    ]
    if segment_ids is True:
        segment_ids = (True, True)
    if isinstance(segment_ids, tuple):
        if len(segment_ids) != 2:
            raise InvalidArgument(
                f"`segment_ids` must be an array or a pair (of queries, of keys), got a tuple of "
                f"{len(segment_ids)}"
            )
        named.append(("segment_ids", Segments(*segment_ids), ["segment_ids[0]", "segment_ids[1]"]))
    elif segment_ids is not None:
        named.append(("segment_ids", Segments(segment_ids), ["segment_ids"] * 2))
    arrays: dict[str, Any] = {}
    found = []
    for argument, part, names in named:
        for n, x in enumerate(part.arrays):
            same = (m for m, other in enumerate(part.arrays) if other is x)
            first = n if x is True else next(same)
            names[n] = names[first]  # one array for queries and keys goes to the GPU once
            arrays.setdefault(names[n], _listed(x, names[n]))
        found.append(Form(argument, part.static, tuple(names)))
    return tuple(found), arrays


def stand_in(name: str, value: Any, q: Array) -> Array | None:
    """Return a record for a descale that is a number, beside q; None for any other argument."""
    if name not in DESCALES or factor(name, value) is None:
        return None
    return q._replace(pointer=0, shape=(), strides=(), dtype="float32", owner=None)


def shapes(packed: bool) -> dict[str, tuple[Shape, ...]]:
    """Return the shapes that arrays may have, by name, in the order in which they are bound."""
    return PACKED | SHAPES | PACKED if packed else SHAPES


def is_metadata(name: str) -> bool:
    """Return whether an array may lie in host memory beside arrays of a GPU."""
    return name in METADATA or not (name in DTYPES or name in RESULTS)


def host_metadata(x: Any, name: str) -> Any:
    """Return a list or tuple of integers as an array, any other argument as it is."""
    return _listed(x, name) if name in METADATA and isinstance(x, tuple | list) else x


def _listed(x: Any, name: str) -> Any:
    """Return an integer, or a list or tuple of integers, as an array; anything else as it is."""
    if isinstance(x, Array | bool) or not isinstance(x, tuple | list | int | np.integer):
        return x
    try:
        return np.asarray(x) if np.size(x) else np.zeros(np.shape(x), np.int64)
    except (TypeError, ValueError):  # ragged, or of what is no number
        rows = "integers in rows of one length"
        if name in METADATA:
            rows = "one integer per batch entry"
        pair = ", for a pair a tuple" if name == "segment_ids" else ""
        raise InvalidType(
            f"`{name}` must hold {rows}, got {shown(x)}: pass an array{pair}"
        ) from None


def output_dtype(dtype: str) -> str:
    """Return the dtype of the output for inputs of a dtype."""
    return "bfloat16" if dtype in FLOAT8S else dtype


def lse_dtype(dtype: str) -> str:
    """Return the dtype of the log-sum-exp for inputs of a dtype."""
    return "float64" if dtype == "float64" else "float32"


def _check_kinds(arrays: Mapping[str, Array]) -> None:
    """Check frameworks, devices and dtypes: q decides."""
    q = arrays["q"]
    for name in DESCALES:
        if name in arrays and q.dtype not in FLOAT8S:
            raise InvalidArgument(
                f"`{name}` is only for fp8 inputs, these are {q.dtype}: leave it out"
            )
    for name, array in arrays.items():
        if is_metadata(name) and array.device == HOST:
            continue
        if (array.framework, array.device) != (q.framework, q.device):
            raise InvalidArgument(
                f"`{name}` is {_origin(array)} and `q` is {_origin(q)}: "
                "pass arrays of one framework on one device"
            )
    for name, array in arrays.items():
        expected = DTYPES.get(name, INTEGERS)
        if name in RESULTS:
            expected = ((lse_dtype if "lse" in name else output_dtype)(q.dtype),)
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


def _check_one_dtype(form: Form, arrays: Mapping[str, Array]) -> None:
    """Check that the arrays of a mask have one dtype: what compares them is compiled for one."""
    for name in form.names[1:]:
        first, own = arrays[form.names[0]].dtype, arrays[name].dtype
        if own != first:
            raise InvalidType(
                f"`{name}` has dtype {own} and `{form.names[0]}` {first}: convert one to the other"
            )


def _origin(array: Array) -> str:
    """Say what an array is and where it lies."""
    place = "in host memory" if array.device == HOST else f"on CUDA device {array.device}"
    return f"a {array.framework} array {place}"


def _is_packed(arrays: Mapping[str, Array]) -> bool:
    """Return whether a call is of packed sequences."""
    both = ("cu_seqlens_q", "cu_seqlens_k")
    given = [name for name in both if name in arrays]
    if len(given) == 1:
        (missing,) = {*both} - {*given}
        raise InvalidArgument(f"`{missing}` is missing beside `{given[0]}`: pass both")
    return bool(given)


def _merged(band: Band, masks: Iterable[Form], *, aligned: bool) -> tuple[Band, tuple[Form, ...]]:
    """Return the band with the bands among the masks, where one diagonal serves, and the others.

    Where the alignment does not matter otherwise, the band without bounds has none.
    """
    rest = []
    for form in masks:
        met = None
        if isinstance(form.mask, Band):
            met = form.mask if not (band.bounded or aligned) else band.meet(form.mask)
        if met is None:
            rest.append(form)
        else:
            band = met
    return band, tuple(rest)


def _bind(
    arrays: Mapping[str, Array], table: Mapping[str, tuple[Shape, ...]], axes: tuple[int, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Bind the sizes as einsum binds letters; return them and the arrays in the contract's view."""
    sizes: dict[str, Any] = {}
    origin: dict[str, str] = {}
    operands: dict[str, Any] = {}
    for name, shapes in table.items():
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
                said = f"{word} = {size}" if " " in word else f"{word} {size}"
                raise InvalidArgument(
                    f"`{name}` of shape {array.shape} has {said} and `{origin[word]}` has "
                    f"{sizes[word]}: they must be equal"
                )
            origin.setdefault(word, name)
        if words == ("batch + 1",):
            if not sizes["batch + 1"]:
                raise InvalidArgument(
                    f"`{name}` must have shape (batch + 1,), got (0,): "
                    "pass [0] where there is no sequence"
                )
            sizes["batch"], origin["batch"] = sizes["batch + 1"] - 1, name
    for word in POSITIONS:
        sizes.setdefault(word, sizes.get(word.replace("len", "total")))
    return sizes, operands


def _spread(
    array: Array,
    name: str,
    words: Shape,
    sizes: Mapping[str, int],
    longest: Mapping[str, int | None],
) -> Array:
    """Return an array as broadcast to a shape; that of positions in sequences as far as it goes."""
    own = (1,) * (len(words) - len(array.shape)) + array.shape
    free = {word: size for word, size in zip(words, own, strict=False) if word in longest}
    shape = tuple(free.get(word, sizes[word]) for word in words)
    view = broadcast(array, shape)
    if view is None:
        wanted = ", ".join(w.replace("len", "longest") if w in free else w for w in words)
        raise InvalidArgument(
            f"`{name}` must broadcast to ({wanted}{',' if len(words) == 1 else ''}) = {shape}, "
            f"got shape {array.shape}"
        )
    for word, size in free.items():
        if size != 1 and sizes[word]:
            _check_extent(Extent(name, word, size), longest)
    return view


def _check_extent(extent: Extent, longest: Mapping[str, int | None]) -> None:
    """Check that an array has every position of the longest sequence, where that is known."""
    most = longest[extent.word]
    if extent.size < (1 if most is None else most):
        side = "queries" if extent.word == "len_q" else "keys"
        known = "" if most is None else f" and the longest sequence has {most}"
        raise InvalidArgument(
            f"`{extent.name}` has {extent.size} {side}{known}: "
            "it needs one for each position of a sequence, or 1 for all"
        )


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


def _check_lengths(
    operands: Mapping[str, Array], sizes: Mapping[str, int], packed: bool
) -> dict[str, int | None]:
    """Check the values of lengths that lie in host memory; those of a device are never read.

    Returns
    -------
    dict of str to int or None
        Of packed sequences: the positions of the longest, None where it is not known.
    """
    longest: dict[str, int | None] = {}
    for side in "qk":
        length, total = f"len_{side}", sizes[f"len_{side}"]
        bounds = _values(operands.get(f"cu_seqlens_{side}"))
        used = _values(operands.get(f"seqused_{side}"))
        limits: np.ndarray | int = total
        if bounds is not None:
            _check_bounds(bounds, f"cu_seqlens_{side}", f"total_{side}", total)
            limits = np.diff(bounds.astype(np.int64))
        if used is not None:
            beyond = np.flatnonzero((used < 0) | (used > limits))
            if beyond.size:
                entry = beyond[0]
                limit = np.broadcast_to(limits, used.shape)[entry]
                word = length if not packed else f"total_{side}"
                raise InvalidArgument(
                    f"`seqused_{side}[{entry}]` must be from 0 to "
                    f"{word if bounds is None else 'the length of its sequence'}"
                    f" = {limit}, got {used[entry]}"
                )
        if packed:
            known = used if used is not None else limits if bounds is not None else None
            longest[length] = None if known is None else int(np.max(known, initial=0))
    return longest


def _values(array: Array | None) -> np.ndarray | None:
    """Return the values of metadata that lies in host memory, and is there yet."""
    known = array is not None and array.device == HOST and (array.pointer or 0 in array.shape)
    return host_view(array) if known and array is not None else None


def _check_bounds(bounds: np.ndarray, name: str, word: str, total: int) -> None:
    """Check where packed sequences begin and end."""
    if bounds[0] != 0:
        raise InvalidArgument(
            f"`{name}[0]` must be 0, got {bounds[0]}: pass where the sequences begin and the last "
            "ends, not their lengths"
        )
    beyond = np.flatnonzero((bounds < 0) | (bounds > total))
    if beyond.size:
        raise InvalidArgument(
            f"`{name}[{beyond[0]}]` must be from 0 to {word} = {total}, got {bounds[beyond[0]]}"
        )
    falls = np.flatnonzero(bounds[1:] < bounds[:-1])
    if falls.size:
        n = falls[0]
        raise InvalidArgument(
            f"`{name}` must not decrease, got {bounds[n]} and then {bounds[n + 1]} at [{n + 1}]"
        )


def _check_out(arrays: Mapping[str, Array]) -> None:
    """Check that ``out`` can be written without changing an input."""
    out = arrays["out"]
    if out.readonly:
        raise InvalidArgument("`out` is read-only: pass a writable array")
    if out.shape[-1] > 1 and out.strides[-1] != 1:
        raise InvalidArgument(
            f"`out` must have a contiguous last dimension, got stride {out.strides[-1]}: "
            "pass a C-contiguous array"
        )
    if overlaps_itself(out):
        raise InvalidArgument(
            f"`out` must not overlap itself, got strides {out.strides} for shape {out.shape}: "
            "pass a C-contiguous array"
        )
    for name, array in arrays.items():
        if name != "out" and overlap(out, array):
            raise InvalidArgument(f"`out` must not overlap `{name}`: pass an array of its own")


def fresh(x: Array, head_dim: int) -> Array:
    """Return an array to allocate that is like an input, in its order of dimensions if dense."""
    shape = (*x.shape[:-1], head_dim)
    return x._replace(
        pointer=0,
        shape=shape,
        strides=strides_like(x, shape),
        dtype=output_dtype(x.dtype),
        readonly=False,
        owner=None,
    )


def one_entry(array: Array) -> Array:
    """Return the view of packed rows as a batch of one entry."""
    shape = (1, *array.shape)
    return array._replace(shape=shape, strides=normal_strides(shape, (0, *array.strides)))


def _check_alignment(arrays: Mapping[str, Array]) -> None:
    """Check that a GPU can read every array's elements."""
    for name, array in arrays.items():
        itemsize = ITEMSIZES[array.dtype]
        if array.pointer % itemsize:
            raise InvalidArgument(
                f"`{name}` starts at address {array.pointer:#x}, which is no multiple of the "
                f"{itemsize} bytes of its dtype: pass an aligned array"
            )


def access_width(arrays: Iterable[Array]) -> int:
    """Return the bytes of the widest access, at most 16, that all rows of the arrays allow."""
    width = 16
    for array in arrays:
        itemsize = ITEMSIZES[array.dtype]
        width = math.gcd(width, array.pointer)
        for stride, size in zip(array.strides[:3], array.shape[:3], strict=True):
            width = math.gcd(width, stride * itemsize if size > 1 else 0)
    return width


def _readable(x: Array) -> int:
    """Return how many neighbours in any row of an array may be read at once: 2, 1, or 0."""
    *outer, column = x.strides
    if column != 1 or x.shape[-1] == 1:  # one element of packed sequences is that of all keys
        return 0
    size = 2 * ITEMSIZES[x.dtype]
    steps = [stride for stride, length in zip(outer, x.shape, strict=False) if length > 1]
    pairs = (
        size <= ALIGNMENT
        and x.pointer % size == 0
        and not any(n % 2 for n in (x.shape[-1], *steps))
    )
    return 2 if pairs else 1


def _odd_stride(arrays: Iterable[Array]) -> int | None:
    """Return the first stride, in bytes, that no tensor map holds."""
    for array in arrays:
        for stride, size in zip(array.strides[:3], array.shape[:3], strict=True):
            step = stride * ITEMSIZES[array.dtype]
            if size > 1 and not 0 <= step < MAX_STRIDE:
                return step
    return None
