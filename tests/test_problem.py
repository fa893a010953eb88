"""Validation: what a call becomes, and the sentence that each wrong argument gets."""

import decimal
import fractions
import math
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash._array import Array, adapter_of, contiguous_strides
from cupyflash._problem import describe
from cupyflash._views import overlap, overlaps_itself, span, strides_like
from cupyflash.errors import CupyflashError, InvalidArgument, InvalidType
from cupyflash.masks import Band

BF16 = ml_dtypes.bfloat16


def records(**arrays: Any) -> dict[str, Array]:
    return {
        name: x if isinstance(x, Array) else adapter_of(x, name).array(x, name)
        for name, x in arrays.items()
    }


def make(dtype: Any = np.float16, **changes: Any) -> dict[str, Any]:
    """Return q, k and v of B2 Sq5 Sk7 H4 Hk2 D8 Dv6, with arrays exchanged or added."""
    arrays = {
        "q": np.zeros((2, 5, 4, 8), dtype),
        "k": np.zeros((2, 7, 2, 8), dtype),
        "v": np.zeros((2, 7, 2, 6), dtype),
    }
    return {**arrays, **changes}


def problem_of(arrays: dict[str, Any], **options: Any) -> Any:
    return describe(records(**arrays), arch=None, **options)[0]


def on_device(device: int = 0, framework: str = "cupy", **changes: Any) -> dict[str, Array]:
    """Return records of arrays of a GPU, at addresses that nobody reads."""
    placed = {}
    for place, (name, x) in enumerate(records(**make(**changes)).items()):
        pointer = (1 << 40) + (place << 20) if x.pointer else 0
        placed[name] = x._replace(pointer=pointer, device=device, framework=framework)
    return placed


# What a call becomes


def test_the_problem_holds_every_size() -> None:
    problem = problem_of(make(), causal=True)
    assert problem.batch, problem.heads_q == (2, 4)
    assert (problem.len_q, problem.len_k) == (5, 7)
    assert (problem.heads_q, problem.heads_k) == (4, 2)
    assert (problem.head_dim, problem.head_dim_v) == (8, 6)
    assert problem.dtype == problem.output_dtype == "float16"
    assert problem.lse_dtype == "float32"
    assert problem.band == Band(None, 0)
    assert problem.scale == 1 / math.sqrt(8)
    assert problem.modifiers == ()
    assert isinstance(hash(problem), int)


def test_layouts_describe_the_same_problem_without_a_copy() -> None:
    arrays = make()
    problem, operands = describe(records(**arrays), arch=None)
    turned = {name: x.transpose(0, 2, 1, 3) for name, x in arrays.items()}
    other, views = describe(records(**turned), arch=None, layout="bhsd")
    assert other == problem
    for name in ("q", "k", "v", "out"):
        assert getattr(views, name)[:3] == getattr(operands, name)[:3], name


def test_float64_and_float8_name_their_output() -> None:
    assert problem_of(make(np.float64)).lse_dtype == "float64"
    small = problem_of(make(ml_dtypes.float8_e4m3fn))
    assert (small.output_dtype, small.lse_dtype) == ("bfloat16", "float32")


def test_modifiers_are_named_in_the_order_in_which_they_act() -> None:
    arrays = make(
        learnable_sink=np.zeros(4, BF16),
        attn_mask=np.ones((1, 7), bool),
        attn_bias=np.zeros((4, 1, 7), np.float32),
        alibi_slopes=np.zeros((2, 4), np.float32),
        seqused_q=np.array([5, 0], np.uint8),
        seqused_k=np.array([7, 1]),
    )
    problem = problem_of(arrays, softcap=2.0, dropout_p=0.5, rng_state=(1, 2))
    assert problem.modifiers == (
        "softcap",
        "alibi_slopes",
        "attn_bias",
        "attn_mask",
        "seqused_q",
        "seqused_k",
        "learnable_sink",
        "dropout_p",
    )


def test_a_dropout_that_drops_nothing_is_none() -> None:
    problem = problem_of(make(), dropout_p=2.0**-18)
    assert problem.dropout_p == 0
    assert problem.modifiers == ()


def test_broadcast_bias_and_mask_have_strides_of_zero() -> None:
    bias, mask = np.zeros((4, 1, 7), np.float32), np.ones((2, 1, 5, 1), bool)
    _, operands = describe(records(**make(attn_bias=bias, attn_mask=mask)), arch=None)
    assert operands.attn_bias.shape == operands.attn_mask.shape == (2, 4, 5, 7)
    assert operands.attn_bias.strides == (0, 7, 0, 1)
    assert operands.attn_mask.strides == (5, 0, 1, 0)
    scalar = np.zeros((), np.float64)
    _, operands = describe(records(**make(attn_bias=scalar)), arch=None)
    assert operands.attn_bias.strides == (0, 0, 0, 0)


# Scalars


@pytest.mark.parametrize(
    "scale",
    [
        2, 0.125, -1.5, 0.0, np.float64(0.3), np.float32(0.25), np.float16(2), np.int8(-3),
        np.uint64(4), BF16(0.5), np.array(0.125), np.array(3, np.int32), np.array(0.5, BF16),
        fractions.Fraction(1, 3), np.longdouble(0.1),
    ],
    ids=lambda x: f"{type(x).__name__}-{x}",
)  # fmt: skip
def test_scale_may_be_of_any_real_type(scale: Any) -> None:
    problem = problem_of(make(), softmax_scale=scale)
    assert type(problem.scale) is float
    assert problem.scale == float(scale)


@pytest.mark.parametrize(
    ("scale", "error"),
    [
        (True, InvalidType),
        (np.bool_(False), InvalidType),
        (np.array(True), InvalidType),
        (1j, InvalidType),
        (np.complex64(1), InvalidType),
        ("0.5", InvalidType),
        (b"1", InvalidType),
        (decimal.Decimal("0.5"), InvalidType),
        (np.str_("1"), InvalidType),
        (np.timedelta64(1, "s"), InvalidType),
        ([0.5], InvalidType),
        (np.zeros(1), InvalidType),
        (np.zeros((1, 1)), InvalidType),
        (math.nan, InvalidArgument),
        (math.inf, InvalidArgument),
        (-math.inf, InvalidArgument),
        (np.float32("inf"), InvalidArgument),
        (10**400, InvalidArgument),
        (1e39, InvalidArgument),
    ],
    ids=repr,
)
def test_scale_must_be_a_finite_real_number(scale: Any, error: type) -> None:
    with pytest.raises(error, match="`softmax_scale`"):
        problem_of(make(), softmax_scale=scale)


def test_scale_beyond_float32_is_right_for_float64() -> None:
    assert problem_of(make(np.float64), softmax_scale=1e39).scale == 1e39


@pytest.mark.parametrize("head_dim", [1, 3, 40, 56, 72, 80, 100, 160, 192])
def test_default_scale_is_of_the_true_head_dim(head_dim: int) -> None:
    q = np.zeros((1, 2, 1, head_dim), np.float32)
    assert problem_of({"q": q, "k": q, "v": q}).scale == 1 / math.sqrt(head_dim)


def test_default_scale_of_no_head_dim_is_finite() -> None:
    q = np.zeros((1, 2, 1, 0), np.float32)
    assert math.isfinite(problem_of({"q": q, "k": q, "v": q}).scale)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"softcap": -1.0}, InvalidArgument, "`softcap` must be positive.*-1.0"),
        ({"softcap": math.nan}, InvalidArgument, "`softcap` must be finite.*nan"),
        ({"softcap": math.inf}, InvalidArgument, "`softcap` must be finite.*inf"),
        ({"softcap": None}, InvalidType, "`softcap` must be a real number.*None"),
        ({"dropout_p": -0.1}, InvalidArgument, "`dropout_p`.*0 to 1.*-0.1"),
        ({"dropout_p": 1.1}, InvalidArgument, "`dropout_p`.*0 to 1.*1.1"),
        ({"dropout_p": math.nan}, InvalidArgument, "`dropout_p`.*0 to 1.*nan"),
        ({"dropout_p": "half"}, InvalidType, "`dropout_p`.*'half'"),
        ({"dropout_p": 0.1}, InvalidArgument, "`rng_state` is None.*rng_state="),
        ({"dropout_p": 1.0}, InvalidArgument, "`rng_state` is None"),
        ({"dropout_p": 0.1, "rng_state": 5}, InvalidType, "`rng_state`"),
        ({"dropout_p": 0.1, "rng_state": (1,)}, InvalidType, "`rng_state`"),
        ({"dropout_p": 0.1, "rng_state": (2**64, 0)}, InvalidArgument, "`rng_state`"),
        ({"layout": "sbhd"}, InvalidArgument, "`layout` must be 'bshd' or 'bhsd', got 'sbhd'"),
        ({"layout": None}, InvalidArgument, "`layout`.*None"),
        ({"layout": ["bshd"]}, InvalidArgument, "`layout`"),
        ({"window_size": (-1, -3), "causal": True}, InvalidArgument, "`window_size`.*-3"),
        ({"window_size": (-2, -1)}, InvalidArgument, "`window_size`.*-2"),
        ({"alignment": "top"}, InvalidArgument, "`alignment`.*'top'"),
        ({"causal": 1}, InvalidType, "`causal`.*bool.*int"),
    ],
)
def test_wrong_scalars(options: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        problem_of(make(), **options)


@pytest.mark.parametrize(
    "state",
    [(7, 9), [7, 9], np.array([7, 9]), np.array([7, 9], np.uint64), np.array([7, 0, 9, 0], "u4")],
    ids=repr,
)
def test_random_states_are_read_alike(state: Any) -> None:
    given = records(rng_state=state)["rng_state"] if isinstance(state, np.ndarray) else state
    _, operands = describe(records(**make()), arch=None, dropout_p=0.5, rng_state=given)
    assert operands.rng_state == (7, 9)


# Arrays


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q": (5, 4, 8)}, InvalidArgument, r"`q` must have shape \(batch, len_q, heads_q, head_d"),
        ({"k": (2, 7, 2, 8, 1)}, InvalidArgument, r"`k` must have shape.*got \(2, 7, 2, 8, 1\)"),
        ({"v": ()}, InvalidArgument, r"`v` must have shape.*got \(\)"),
        ({"k": (3, 7, 2, 8)}, InvalidArgument, "`k` .*has batch 3 and `q` has 2: .*equal"),
        ({"k": (2, 7, 2, 9)}, InvalidArgument, "`k` .*has head_dim 9 and `q` has 8"),
        ({"v": (2, 6, 2, 6)}, InvalidArgument, "`v` .*has len_k 6 and `k` has 7"),
        ({"v": (2, 7, 4, 6)}, InvalidArgument, "`v` .*has heads_k 4 and `k` has 2"),
        ({"v": (1, 7, 2, 6)}, InvalidArgument, "`v` .*has batch 1 and `q` has 2"),
        ({"alibi_slopes": (3,)}, InvalidArgument, "`alibi_slopes` .*has heads_q 3"),
        ({"alibi_slopes": (4, 2)}, InvalidArgument, "`alibi_slopes` .*has batch 4"),
        ({"alibi_slopes": (2, 4, 1)}, InvalidArgument, r"`alibi_slopes` .*\(heads_q,\) or \(batch"),
        ({"alibi_slopes": ()}, InvalidArgument, "`alibi_slopes` must have shape"),
        ({"learnable_sink": (2,)}, InvalidArgument, "`learnable_sink` .*has heads_q 2"),
        ({"learnable_sink": (1, 4)}, InvalidArgument, r"`learnable_sink` .*\(heads_q,\)"),
        ({"attn_bias": (2, 5, 7)}, InvalidArgument, r"`attn_bias` must broadcast.*\(2, 4, 5, 7\)"),
        ({"attn_bias": (1, 2, 4, 5, 7)}, InvalidArgument, "`attn_bias` must broadcast"),
        ({"attn_bias": (3, 4, 5, 7)}, InvalidArgument, "`attn_bias` must broadcast"),
        ({"attn_bias": (2, 2, 5, 7)}, InvalidArgument, "`attn_bias` must broadcast"),
    ],
)
def test_wrong_shapes(changes: dict[str, Any], error: type, words: str) -> None:
    arrays = {
        name: np.zeros(shape, np.float16 if name in "qkv" else np.float32)
        for name, shape in changes.items()
    }
    with pytest.raises(error, match=words) as caught:
        problem_of(make(**arrays))
    assert isinstance(caught.value, CupyflashError)


def test_shapes_in_errors_are_in_the_callers_layout() -> None:
    with pytest.raises(InvalidArgument, match=r"\(batch, heads_q, len_q, head_dim\), got \(2, 5"):
        problem_of(make(q=np.zeros((2, 5, 8), np.float16)), layout="bhsd")


@pytest.mark.parametrize(
    ("heads_q", "heads_k", "fits"),
    [(33, 2, False), (3, 2, False), (2, 4, False), (4, 0, False), (0, 0, True), (0, 4, True),
     (4, 4, True), (6, 2, True), (5, 1, True)],
)  # fmt: skip
def test_heads_of_q_are_a_multiple_of_heads_of_k(heads_q: int, heads_k: int, fits: bool) -> None:
    q, k = np.zeros((1, 2, heads_q, 8), np.float16), np.zeros((1, 3, heads_k, 8), np.float16)
    if fits:
        assert problem_of({"q": q, "k": k, "v": k}).heads_q == heads_q
        return
    words = f"`k` has {heads_k} heads and `q` has {heads_q}: heads of q must be a multiple"
    with pytest.raises(InvalidArgument, match=words):
        problem_of({"q": q, "k": k, "v": k})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k": "float32"}, "`k` has dtype float32 and `q` float16"),
        ({"v": "bfloat16"}, "`v` has dtype bfloat16 and `q` float16"),
        ({"q": "int32", "k": "int32", "v": "int32"}, "`q` has dtype int32.*expected float16"),
        ({"q": "bool"}, "`q` has dtype bool"),
        ({"attn_mask": "float32"}, "`attn_mask` has dtype float32: expected bool"),
        ({"attn_bias": "bool"}, "`attn_bias` has dtype bool: expected float16"),
        ({"attn_bias": "int64"}, "`attn_bias` has dtype int64"),
        ({"alibi_slopes": "float64"}, "`alibi_slopes` has dtype float64: expected float32"),
        ({"learnable_sink": "int32"}, "`learnable_sink` has dtype int32"),
        ({"seqused_k": "float32"}, "`seqused_k` has dtype float32"),
        ({"seqused_q": "bool"}, "`seqused_q` has dtype bool"),
        ({"out": "float32"}, "`out` has dtype float32: expected float16"),
    ],
)
def test_wrong_dtypes(changes: dict[str, str], words: str) -> None:
    shapes = {
        "attn_mask": (5, 7), "attn_bias": (5, 7), "alibi_slopes": (4,), "learnable_sink": (4,),
        "seqused_k": (2,), "seqused_q": (2,), "out": (2, 5, 4, 6),
    }  # fmt: skip
    plain = make()
    arrays = {
        name: np.zeros(shapes.get(name) or plain[name].shape, dtype)
        for name, dtype in changes.items()
    }
    with pytest.raises(InvalidType, match=words):
        problem_of(make(**arrays))


@pytest.mark.parametrize(
    ("name", "lengths", "words"),
    [
        ("seqused_q", [6, 0], r"`seqused_q\[0\]` must be from 0 to len_q = 5, got 6"),
        ("seqused_k", [7, -1], r"`seqused_k\[1\]` must be from 0 to len_k = 7, got -1"),
        ("seqused_k", [2**40, 0], r"`seqused_k\[0\]`.*1099511627776"),
    ],
)
def test_lengths_of_the_host_are_checked(name: str, lengths: list[int], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        problem_of(make(**{name: np.array(lengths)}))


def test_lengths_may_be_strided_and_of_any_integer_type() -> None:
    for dtype in ("int8", "uint16", "int32", "uint64"):
        lengths = np.array([7, 99, 3, 99], dtype)[::2]
        _, operands = describe(records(**make(seqused_k=lengths)), arch=None)
        assert operands.seqused_k.dtype == dtype


# Devices and frameworks


def test_host_and_device_do_not_mix() -> None:
    arrays = on_device() | {"k": records(**make())["k"]}
    with pytest.raises(
        InvalidArgument, match="`k` is a numpy array in host memory and `q` is a cu"
    ):
        describe(arrays, arch=90)


def test_devices_do_not_mix() -> None:
    arrays = on_device() | {"v": on_device(device=1)["v"]}
    with pytest.raises(InvalidArgument, match=r"`v` .* CUDA device 1 and `q` .* CUDA device 0"):
        describe(arrays, arch=90)


def test_frameworks_do_not_mix() -> None:
    arrays = on_device() | {"k": on_device(framework="torch")["k"]}
    with pytest.raises(InvalidArgument, match=r"`k` is a torch array.* and `q` is a cupy array"):
        describe(arrays, arch=90)


def test_lengths_may_be_of_the_host_beside_a_gpu() -> None:
    lengths = records(seqused_k=np.array([7, 2]))
    problem, _ = describe(on_device() | lengths, arch=90)
    assert problem.modifiers == ("seqused_k",)
    with pytest.raises(InvalidArgument, match="`alibi_slopes` is a numpy array in host memory"):
        describe(on_device() | records(alibi_slopes=np.zeros(4, np.float32)), arch=90)


def test_a_state_of_another_device_is_refused() -> None:
    state = on_device(device=1)["q"]
    with pytest.raises(InvalidArgument, match="`rng_state` is on CUDA device 1"):
        describe(on_device(), arch=90, dropout_p=0.5, rng_state=state)


def test_device_values_are_never_read() -> None:
    """Their address is nobody's: reading it would end the process."""
    arrays = on_device(seqused_q=np.zeros(2, np.int32), seqused_k=np.zeros(2, np.int64))
    state = arrays["q"]._replace(dtype="int64", shape=(2,), strides=(1,))
    _, operands = describe(arrays, arch=90, dropout_p=0.5, rng_state=state)
    assert operands.rng_state is state


# Widths


@pytest.mark.parametrize(
    ("offset", "width"), [(0, 16), (8, 8), (4, 4), (2, 2), (6, 2), (12, 4), (16, 16)]
)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_width_follows_every_pointer(name: str, offset: int, width: int) -> None:
    arrays = on_device(v=np.zeros((2, 7, 2, 8), np.float16))
    moved = arrays[name]._replace(pointer=arrays[name].pointer + offset)
    assert describe(arrays | {name: moved}, arch=90)[0].width == width


def test_width_follows_the_strides_but_not_those_of_single_rows() -> None:
    wide = np.zeros((2, 7, 2, 9), np.float16)[..., :8]
    v = np.zeros((2, 7, 2, 8), np.float16)
    assert describe(on_device(v=v), arch=90)[0].width == 16
    assert describe(on_device(v=v, k=wide), arch=90)[0].width == 2
    one = {name: np.zeros((1, 1, 1, 9), np.float16) for name in "qkv"}
    assert describe(on_device(**one), arch=90)[0].width == 16
    # The output's rows have Dv elements, and it may be given with strides of its own.
    assert describe(on_device(), arch=90)[0].width == 4
    out = np.zeros((2, 5, 4, 16), np.float16)[..., :8]
    assert describe(on_device(v=v, out=out), arch=90)[0].width == 16
    out = np.zeros((2, 5, 4, 12), np.float16)[..., :8]
    assert describe(on_device(v=v, out=out), arch=90)[0].width == 8


def test_a_pointer_within_an_element_is_refused_on_a_gpu() -> None:
    arrays = on_device(**make(np.float32))
    moved = arrays["v"]._replace(pointer=arrays["v"].pointer + 2)
    with pytest.raises(InvalidArgument, match=r"`v` starts at address 0x.*4 bytes"):
        describe(arrays | {"v": moved}, arch=90)


def test_empty_arrays_allow_the_widest_access() -> None:
    empty = np.zeros((2, 0, 2, 8), np.float16)
    assert describe(on_device(k=empty, v=empty), arch=90)[0].width == 16


# The output


def fresh(q: np.ndarray, head_dim_v: int = 6, **options: Any) -> tuple[int, ...]:
    k = np.zeros((*q.shape[:3], q.shape[3]), q.dtype)
    v = np.zeros((*q.shape[:3], head_dim_v), q.dtype)
    return describe(records(q=q, k=k, v=v), arch=None, **options)[1].out.strides


def test_a_fresh_output_has_the_order_of_dimensions_of_q() -> None:
    q = np.zeros((2, 5, 4, 8), np.float16)
    assert fresh(q) == (5 * 4 * 6, 4 * 6, 6, 1)
    assert fresh(np.zeros((2, 4, 5, 8), np.float16).transpose(0, 2, 1, 3)) == (120, 6, 30, 1)
    assert fresh(np.zeros((5, 2, 4, 8), np.float16).transpose(1, 0, 2, 3)) == (24, 48, 6, 1)


def test_a_fresh_output_of_a_strange_q_is_contiguous() -> None:
    c_contiguous = (5 * 4 * 6, 4 * 6, 6, 1)
    shape = (2, 5, 4, 8)
    assert fresh(np.zeros((2, 5, 4, 9), np.float16)[..., :8]) == c_contiguous  # gaps
    assert fresh(np.broadcast_to(np.zeros((1, 1, 1, 8), np.float16), shape)) == c_contiguous
    assert fresh(np.zeros((2, 5, 8, 4), np.float16).swapaxes(2, 3)) == c_contiguous
    assert fresh(np.zeros(shape, np.float16)[:, ::-1]) == c_contiguous
    assert fresh(np.zeros((2, 8, 4, 5), np.float16).transpose(0, 3, 2, 1)) == c_contiguous


def test_a_fresh_output_is_contiguous_in_the_callers_layout() -> None:
    gaps = np.zeros((2, 4, 5, 9), np.float16)[..., :8]  # (batch, heads, length, head_dim)
    assert fresh(gaps, layout="bhsd") == (120, 6, 30, 1)
    dense = np.zeros((2, 5, 4, 8), np.float16).transpose(0, 2, 1, 3)
    assert fresh(dense, layout="bhsd") == (120, 24, 6, 1)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=4, max_size=4),
    st.permutations(range(3)),
    st.integers(0, 5),
)
def test_strides_of_a_fresh_output_are_dense(shape: list[int], order: list[int], last: int) -> None:
    inner = np.zeros([shape[axis] for axis in order] + [shape[3]], np.float32)
    x = records(x=inner.transpose([*(order.index(axis) for axis in range(3)), 3]))["x"]
    wanted = (*x.shape[:3], last)
    strides = strides_like(x, wanted)
    if 0 in wanted or 0 in x.shape:
        assert strides == contiguous_strides(wanted)
        return
    offsets = sum(stride * index for stride, index in zip(strides, np.indices(wanted), strict=True))
    assert sorted(np.ravel(offsets)) == list(range(math.prod(wanted)))
    larger = [axis for axis in range(3) if wanted[axis] > 1]
    by_q = sorted(larger, key=lambda axis: -x.strides[axis])
    assert by_q == sorted(larger, key=lambda axis: -strides[axis])


def test_out_is_taken_as_it_is() -> None:
    out = np.zeros((2, 5, 4, 7), np.float16)[..., :6]
    _, operands = describe(records(**make(out=out)), arch=None)
    assert operands.out.pointer == out.ctypes.data
    assert operands.out.strides == (140, 28, 7, 1)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (lambda: np.zeros((2, 5, 4, 7), np.float16), "`out` .*has head_dim_v 7 and `v` has 6"),
        (lambda: np.zeros((2, 5, 4), np.float16), r"`out` must have shape \(batch, len_q"),
        (lambda: np.zeros((2, 5, 4, 12), np.float16)[..., ::2], "`out` must have a contiguous"),
        (lambda: np.zeros((2, 5, 4, 6), np.float16)[..., ::-1], "`out` must have a contiguous"),
        (
            lambda: np.broadcast_to(np.zeros((1, 5, 4, 6), np.float16), (2, 5, 4, 6)),
            "`out` is read-only",
        ),
        (
            lambda: np.lib.stride_tricks.as_strided(
                np.zeros(999, np.float16), (2, 5, 4, 6), (0, 48, 12, 2)
            ),
            "`out` must not overlap itself",
        ),
        (
            lambda: np.lib.stride_tricks.as_strided(
                np.zeros(999, np.float16), (2, 5, 4, 6), (240, 48, 10, 2)
            ),
            "`out` must not overlap itself",
        ),
    ],
)
def test_wrong_outputs(out: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        problem_of(make(out=out()))


def test_out_must_not_share_bytes_with_an_input() -> None:
    buffer = np.zeros(4096, np.float16)
    q = buffer[: 2 * 5 * 4 * 8].reshape(2, 5, 4, 8)
    out = buffer[100 : 100 + 2 * 5 * 4 * 6].reshape(2, 5, 4, 6)
    with pytest.raises(InvalidArgument, match="`out` must not overlap `q`"):
        problem_of(make(q=q, out=out))
    bias = buffer[200:201]
    with pytest.raises(InvalidArgument, match="`out` must not overlap `attn_bias`"):
        problem_of(make(out=out, attn_bias=bias))


def test_out_must_not_share_bytes_with_the_state_of_dropout() -> None:
    out = np.zeros((2, 5, 4, 6), np.float16)
    record = adapter_of(out, "rng_state").array(out.reshape(-1)[8:16].view(np.int64), "rng_state")
    for p in (0.0, 0.5):
        with pytest.raises(InvalidArgument, match="`out` must not overlap `rng_state`"):
            problem_of(make(out=out), dropout_p=p, rng_state=record)


def test_out_may_lie_between_the_rows_of_an_input() -> None:
    fused = np.zeros((2, 5, 4, 14), np.float16)
    q, out = fused[..., :8], fused[..., 8:]
    assert problem_of(make(q=q, out=out)).head_dim_v == 6


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_overlap_is_about_bytes(data: st.DataObject) -> None:
    """Against the sets of the offsets of both arrays in one buffer, which is never read."""
    views = []
    for _ in range(2):
        shape = tuple(data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=2)))
        strides = tuple(data.draw(st.lists(st.integers(-4, 4), min_size=2, max_size=2)))
        start = data.draw(st.integers(20, 40))
        offsets = {
            start + i * strides[0] + j * strides[1]
            for i in range(shape[0])
            for j in range(shape[1])
        }
        at = (1 << 40) + 4 * start
        views.append((Array(at, shape, strides, "float32", 0, "cupy", False, None), offsets))
    (a, at_a), (b, at_b) = views
    assert overlap(a, b) == bool(at_a & at_b)
    if at_a:
        assert span(a, 4) == (
            4 * min(at_a) - (a.pointer - (1 << 40)),
            4 * max(at_a) + 4 - (a.pointer - (1 << 40)),
        )
    if not overlaps_itself(a):
        assert len(at_a) == math.prod(a.shape)


def test_every_error_is_one_sentence_with_the_argument_in_backquotes() -> None:
    with pytest.raises(CupyflashError) as caught:
        problem_of(make(v=np.zeros((2, 6, 2, 6), np.float16)))
    assert re.fullmatch(r"`\w+`[^\n]*", str(caught.value))
