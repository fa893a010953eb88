"""The gradient of a bias: how its sum is divided and launched, and the kernel on a GPU."""

import itertools
import math
import struct
from typing import Any

import dbias
import numpy as np
import pytest
from cases import ALONE, VARLEN, Case, Modified
from gradients import seeds_of
from harness import same_bits
from hypothesis import given
from hypothesis import strategies as st

from cupyflash import _backward_dbias, _backward_delta
from cupyflash._array import Array, contiguous_strides
from cupyflash._launch import Launch
from cupyflash._problem import Operands, Problem
from cupyflash._problem_backward import Backward, describe_backward
from cupyflash._tuning_dbias import CHUNKS, chunk_of

gpu = pytest.mark.gpu


def array(shape: tuple[int, ...], dtype: str, pointer: int = 0) -> Array:
    return Array(pointer, shape, contiguous_strides(shape), dtype, 0, "no", False, None)


def described(
    bias: tuple[int, ...], *, dtype: str = "float16", bias_dtype: str = "float16", **sizes: Any
) -> tuple[Problem, Operands, Backward]:
    """Describe a call by sizes; every array has an address of its own."""
    names = ("batch", "len_q", "len_k", "heads_q", "heads_k", "dim", "dim_v")
    batch, len_q, len_k, heads_q, heads_k, dim, dim_v = (
        sizes.pop(name, default)
        for name, default in zip(names, (2, 300, 200, 4, 2, 64, 32), strict=True)
    )
    shapes = {
        "q": (batch, len_q, heads_q, dim),
        "k": (batch, len_k, heads_k, dim),
        "v": (batch, len_k, heads_k, dim_v),
        "out": (batch, len_q, heads_q, dim_v),
        "dout": (batch, len_q, heads_q, dim_v),
        "lse": (batch, heads_q, len_q),
        "dlse": (batch, heads_q, len_q),
        "attn_bias": bias,
    }
    dtypes = {"lse": "float32", "dlse": "float32", "attn_bias": bias_dtype}
    arrays = {
        name: array(shape, dtypes.get(name, dtype), 0x10000 * n)
        for n, (name, shape) in enumerate(shapes.items(), 1)
    }
    problem, operands, backward = describe_backward(arrays, arch=90, **sizes)
    return problem, operands, backward._replace(dbias=backward.dbias._replace(pointer=0x990000))


def launched(*args: Any, **sizes: Any) -> tuple[int, tuple[Launch, ...]]:
    return _backward_dbias.launches(*described(*args, **sizes), delta=512, scratch_offset=4096)


# How the sum is divided


@given(
    st.sampled_from(list(itertools.product((False, True), repeat=4))),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 5000),
    st.integers(1, 5000),
)
def test_no_more_blocks_share_tiles_than_keep_a_gpu_busy(
    axes: tuple[bool, ...], batch: int, heads: int, len_q: int, len_k: int
) -> None:
    full = (batch, heads, len_q, len_k)
    shape = tuple(n if axis else 1 for n, axis in zip(full, axes, strict=True))
    sizes = dict(zip(("batch", "heads_q", "len_q", "len_k"), full, strict=True))
    problem, operands, backward = described(shape, heads_k=heads, **sizes)
    assert backward.dbias is not None
    config = _backward_dbias.config(problem, backward.dbias)
    split = _backward_dbias.split(problem, backward.dbias.shape, config)
    scratch, launches = _backward_dbias.launches(
        problem, operands, backward, delta=0, scratch_offset=4096
    )
    *_, rows, columns = backward.dbias.shape
    tiles = math.prod(shape[:2]) * -(-rows // config.block_q) * -(-columns // config.block_k)
    assert launches[0].grid == (tiles * split.parts, 1, 1)
    if split.parts == 1:
        assert (scratch, len(launches)) == (0, 1)
        return
    assert tiles * split.parts <= _backward_dbias.BLOCKS
    assert scratch == 4 * math.prod(shape) * split.parts
    assert scratch <= 4 * _backward_dbias.BLOCKS * config.block_q * config.block_k
    assert config.out == "Float32"
    # No part is empty of entries, or of blocks of an entry that has all of them.
    entries = (batch if shape[0] == 1 else 1) * (heads if shape[1] == 1 else 1)
    assert (split.entries - 1) * -(-entries // split.entries) < entries
    if 1 not in shape[2:]:
        assert split.blocks == 1


def test_long_sums_are_divided_and_short_ones_are_not() -> None:
    def parts(*args: Any, **sizes: Any) -> Any:
        problem, _, backward = described(*args, **sizes)
        assert backward.dbias is not None
        config = _backward_dbias.config(problem, backward.dbias)
        return _backward_dbias.split(problem, backward.dbias.shape, config)

    sizes = {"batch": 64, "heads_q": 16, "len_q": 512, "len_k": 512}
    assert parts((512, 512), **sizes) == (16, 1)
    assert parts((1, 1, 1, 512), **sizes) == (64, 1)
    assert parts((64, 16, 512, 512), **sizes) == (1, 1)
    assert parts((64, 16, 1, 512), **sizes) == (1, 1)
    one = {"batch": 1, "heads_q": 1, "heads_k": 1, "len_q": 8192, "len_k": 8192}
    assert parts((1, 8192), **one) == (1, 4)
    assert parts((8192, 1), **one) == (1, 8)
    assert parts((), **one) == (1, 64)


def test_a_chunk_wastes_few_columns() -> None:
    expected = {16: 16, 7: 16, 32: 32, 40: 48, 64: 64, 80: 48, 96: 48, 128: 64, 192: 64, 256: 64}
    for dim, chunk in expected.items():
        assert chunk_of("float16", dim, dim) == chunk
    for dtype, chunks in CHUNKS.items():
        for dims in itertools.product(range(0, 257, 8), repeat=2):
            assert chunk_of(dtype, *dims) in chunks


# Launches


def test_every_address_in_params_has_a_name_or_a_place_in_the_scratch() -> None:
    options = {"dropout_p": 0.5, "rng_state": (1, 2)}
    for shape, parts in (((1, 1, 1, 200), True), ((40, 64, 300, 200), False)):
        sizes = {"batch": 40, "heads_q": 64, "heads_k": 64} | options
        problem, operands, backward = described(shape, **sizes)
        _, launches = _backward_dbias.launches(
            problem, operands, backward, delta=512, scratch_offset=4096
        )
        assert len(launches) == 1 + parts
        arrays = operands._asdict() | backward._asdict()
        for launch in launches:
            found = {}
            for name, at in launch.places:
                if name != "rng_state":
                    (found[name],) = struct.unpack_from("<Q", launch.params, at)
                    assert found[name] == arrays[name].pointer
            assert len({at for _, at in (*launch.places, *launch.scratch)}) == len(
                launch.places
            ) + len(launch.scratch)
        assert launches[0].scratch[0] == (40, 512)
        if parts:
            assert {*dict(launches[0].places)} == {
                "q", "k", "v", "dout", "lse", "attn_bias", "rng_state",
            }  # fmt: skip
            assert launches[0].scratch[1:] == ((48, 4096),)
            assert launches[1].places == (("dbias", 8),)
            assert launches[1].scratch == ((0, 4096),)
        else:
            assert dict(launches[0].places)["dbias"] == 48
            assert launches[0].scratch[1:] == ()


def test_a_sink_is_not_read_again() -> None:
    with_sink = described((300, 200))
    _, operands, backward = with_sink
    sink = array((4,), "float32", 0x880000)
    arrays = {
        name: x
        for name, x in (operands._asdict() | backward._asdict()).items()
        if name in ("q", "k", "v", "out", "dout", "lse", "dlse")
    }
    arrays["attn_bias"] = array((300, 200), "float16", 0x80000)
    other = describe_backward({**arrays, "learnable_sink": sink}, arch=90, wanted=("dbias",))
    units = {
        _backward_dbias.launches(*call, delta=0, scratch_offset=0)[1][0].unit
        for call in (with_sink, (other[0], other[1], other[2]))
    }
    assert len(units) == 1


def test_what_is_launched_where_there_is_nothing() -> None:
    assert launched((2, 4, 300, 0), len_k=0) == (0, ())
    assert launched((0, 1, 1, 1), batch=0) == (0, ())
    scratch, (only,) = launched((1, 1, 1, 200), batch=0)
    assert (scratch, only.symbol, only.grid) == (0, _backward_dbias.SUM_NAME, (1, 1, 1))
    scratch, (only,) = launched((300, 1), len_k=0)
    assert (scratch, only.symbol, only.grid) == (0, _backward_dbias.NAME, (3, 1, 1))


def test_the_rows_of_the_statistics_hold_whole_tiles() -> None:
    for dtype in ("float16", "float32"):
        problem, _, backward = described((300, 200), dtype=dtype)
        assert backward.dbias is not None
        config = _backward_dbias.config(problem, backward.dbias)
        assert _backward_delta.STAT_ROWS % config.block_q == 0


# On a GPU


BIASED = [case for case in ALONE + VARLEN if any(x.startswith("bias") for x in case.modifiers)]
LARGE = (
    *(
        Modified(300, 270, dim, dim, dtype, 3, 4, 2, causal=True, modifiers=(name,), label="large")
        for (dim, dtype), name in zip(
            itertools.product((16, 40, 64, 96, 128, 256), ("bfloat16", "float16", "float32")),
            itertools.cycle(("bias", "bias_fp16", "bias_of_keys", "bias_of_queries", "bias_fp64")),
            strict=False,
        )
    ),
    Modified(
        200, 300, 128, 128, "bfloat16", 3, 4, 2, window_size=(90, 20), label="all",
        modifiers=(
            "bias_bf16", "softcap", "alibi", "mask", "segments", "sink", "dropout", "used_k",
        ),
    ),
)  # fmt: skip


@gpu
@pytest.mark.parametrize("case", [*BIASED, *LARGE], ids=lambda case: case.id)
def test_case(case: Modified) -> None:
    dbias.check(*case.arrays(), place="gpu", **case.options)


@gpu
@pytest.mark.parametrize("axes", list(itertools.product((False, True), repeat=4)), ids=str)
def test_a_bias_repeats_along_any_axis(axes: tuple[bool, ...]) -> None:
    """A sum of n numbers is off by at most n u times the sum of their sizes; its bits stay."""
    case = Case(700, 600, 64, 64, "float16", batch=4, heads_q=6, heads_k=3, causal=True)
    q, k, v = case.arrays()
    dout, dlse = seeds_of(q.host, v.host)
    full = np.zeros((4, 6, 700, 600), np.float32)
    every = dbias.run(q, k, v, dout, dlse, place="gpu", attn_bias=full, **case.options)
    shape = tuple(n if axis else 1 for n, axis in zip(full.shape, axes, strict=True))
    bias = np.zeros(shape, np.float32)
    one, other = (
        dbias.run(q, k, v, dout, dlse, place="gpu", attn_bias=bias, **case.options)
        for _ in range(2)
    )
    repeated = tuple(n for n, axis in enumerate(axes) if not axis)
    exact = every.astype(np.float64)
    bound = 2**-24 * (full.size // one.size) * abs(exact).sum(axis=repeated, keepdims=True)
    assert (abs(one - exact.sum(axis=repeated, keepdims=True)) <= bound).all()
    assert same_bits(one, other)


@gpu
def test_many_entries() -> None:
    """As of a pair bias that all rows of an alignment share."""
    case = Case(130, 130, 32, 32, "bfloat16", batch=300, heads_q=4, heads_k=4)
    bias = np.random.default_rng(0).standard_normal((1, 4, 130, 130)).astype("bfloat16")
    dbias.check(*case.arrays(), place="gpu", attn_bias=bias, **case.options)
