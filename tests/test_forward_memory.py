"""Forward kernels on any strides and offsets, `out=` between guard bands, and fresh outputs."""

from typing import Any

import numpy as np
import pytest
from cases import Case
from harness import KERNELS, attend, call, fetch, judge, run, same_bits, strided
from strided import BROADCAST, COPIED, LAYOUTS, ROWWISE, Layout, Strided, dense

pytestmark = pytest.mark.parametrize("kernel", KERNELS)
CASE = Case(50, 90, 40, 24, "float16", 3, 4, 2, causal=True)
# (Dv, memory): outputs whose rows are no multiple of a vector, next to bytes that are not theirs.
OUTPUTS = (
    *((24, name) for name in ROWWISE),
    *((dim, "row_gap_1") for dim in (1, 5, 31, 64, 100, 128, 255, 256)),
    *((dim, "packed") for dim in (1, 3, 33, 129)),
)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("dim", "memory"), OUTPUTS)
def test_only_the_output_is_written(kernel: str, dim: int, memory: str, dtype: str) -> None:
    case = Case(50, 90, 40, dim, dtype, 2, 4, 2, causal=True)
    q, k, v = case.arrays()
    out = Strided.output((2, 50, 4, dim), dtype, memory)
    before = out.storage.copy()
    inputs = [x.storage.copy() for x in (q, k, v)]

    result = run(kernel, q, k, v, out=out, **case.options)

    judge(result, q, k, v, **case.options)
    outside = ~out.inside
    assert same_bits(out.written(kernel).storage[outside], before[outside])
    for x, storage in zip((q, k, v), inputs, strict=True):
        assert same_bits(x.written(kernel).storage, storage)


def test_rows_that_see_no_key_are_written(kernel: str) -> None:
    q, k, v = Case(200, 30, 64, 64, "float16", heads_q=2).arrays()
    out = Strided.output((1, 200, 2, 64), "float16", "row_gap_8")
    result, lse = run(kernel, q, k, v, causal=True, out=out)
    assert not result[:, :170].any()
    assert np.isneginf(lse[:, :, :170]).all()
    assert np.isfinite(lse[:, :, 170:]).all()


@pytest.mark.parametrize("return_lse", [False, True])
def test_the_given_output_is_returned(kernel: str, return_lse: bool) -> None:
    q, k, v = (x.on(kernel) for x in CASE.arrays())
    out = Strided.output((3, 50, 4, 24), "float16", "packed").on(kernel)
    result = attend(kernel, q, k, v, out=out, return_lse=return_lse)
    assert (result[0] if return_lse else result) is out


@pytest.mark.parametrize("memory", LAYOUTS)
def test_a_layout_changes_no_bit(kernel: str, memory: str) -> None:
    arrays = [Strided.of(x.host, memory) for x in CASE.arrays()]
    dense_arrays = [x.host.copy() for x in arrays]
    expected = run(kernel, *dense_arrays, **CASE.options)
    result = run(kernel, *arrays, **CASE.options)
    assert same_bits(result[0], expected[0])
    assert same_bits(result[1], expected[1])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("memory", ["offset_1", "offset_2", "offset_3"])
def test_an_offset_changes_no_bit(kernel: str, memory: str, dtype: str) -> None:
    q, k, v = Case(64, 64, 64, 64, dtype, 6, 4, 4).arrays()
    expected = run(kernel, q, k, v)
    for moved in range(3):  # one operand misaligned at a time
        arrays = [q, k, v]
        arrays[moved] = Strided.of(arrays[moved].host, memory)
        result = run(kernel, *arrays)
        assert same_bits(result[0], expected[0])
        assert same_bits(result[1], expected[1])


def test_slices_of_a_fused_projection_are_read_in_place(kernel: str) -> None:
    rng = np.random.default_rng(1)
    fused = rng.standard_normal((2, 70, 3, 4, 64)).astype(np.float16)
    qkv = Strided.of(fused, dense(fused.shape)).on(kernel)
    result = fetch(kernel, *call(kernel, *(qkv[:, :, i] for i in range(3)), causal=True))
    judge(result, *(fused[:, :, i] for i in range(3)), causal=True)


def test_slices_of_a_grouped_projection_are_read_in_place(kernel: str) -> None:
    rng = np.random.default_rng(2)
    fused = rng.standard_normal((2, 70, 8 + 2 + 2, 32)).astype(np.float16)
    cuts = (slice(0, 8), slice(8, 10), slice(10, 12))
    heads = Strided.of(fused).on(kernel)
    result = fetch(kernel, *call(kernel, *(heads[:, :, cut] for cut in cuts)))
    judge(result, *(fused[:, :, cut] for cut in cuts))


@pytest.mark.parametrize("stride", [1, 0, 3, 2**40, -1])
def test_the_stride_of_an_axis_of_one_means_nothing(kernel: str, stride: int) -> None:
    rng = np.random.default_rng(3)
    values = rng.standard_normal((2, 1, 3, 8)).astype(np.float16)
    expected = run(kernel, values, values, values)
    odd = Strided.of(values, Layout((24, stride, 8, 1), 64))
    result = run(kernel, odd, odd, odd)
    assert same_bits(result[0], expected[0])
    assert same_bits(result[1], expected[1])


def test_one_head_seen_as_many_gives_the_same_bits_on_every_call(kernel: str) -> None:
    rng = np.random.default_rng(4)
    q = rng.standard_normal((1, 1, 16, 128)).astype(np.float16)
    row = rng.standard_normal((1, 16, 1, 128)).astype(np.float16)
    wide = np.repeat(row, 16, axis=2)
    expected = run(kernel, q, wide, wide)
    judge(expected, q, wide, wide)
    one = Strided.of(wide, "one_head")
    for repeat in range(20):
        run(kernel, *Case(20 + repeat, 30, 128, 128, "float16").arrays())
        result = run(kernel, q, one, one)
        assert same_bits(result[0], expected[0])
        assert same_bits(result[1], expected[1])


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 1, 3)])
def test_a_fresh_output_lies_in_memory_as_q_does(kernel: str, axes: tuple[int, ...]) -> None:
    q, k, v = CASE.arrays()
    dense_q = Strided.of(q.host, dense(q.shape, axes))
    out, lse = run(kernel, dense_q, k, v)
    assert out.transpose(axes).flags.c_contiguous
    assert lse.flags.c_contiguous


@pytest.mark.parametrize("memory", [*BROADCAST, *COPIED, "row_gap_1", "reversed_rows"])
def test_a_fresh_output_of_any_other_q_is_contiguous(kernel: str, memory: str) -> None:
    q, k, v = CASE.arrays()
    out, _ = run(kernel, Strided.of(q.host, memory), k, v)
    assert out.flags.c_contiguous


@pytest.mark.parametrize("memory", ["packed", "heads_first"])
def test_bhsd_reads_the_same_arrays(kernel: str, memory: str) -> None:
    arrays = [Strided.of(x.host, memory) for x in CASE.arrays()]
    out, lse = run(kernel, *arrays, **CASE.options)
    turned = [x.on(kernel).transpose(0, 2, 1, 3) for x in arrays]
    options: dict[str, Any] = CASE.options | {"layout": "bhsd"}
    out_bhsd, lse_bhsd = fetch(kernel, *call(kernel, *turned, **options))
    assert same_bits(out_bhsd.transpose(0, 2, 1, 3), out)
    assert same_bits(lse_bhsd, lse)


def test_without_lse_the_output_is_the_same(kernel: str) -> None:
    arrays = CASE.arrays()
    expected, _ = run(kernel, *arrays, **CASE.options)
    out = attend(kernel, *(strided(x).on(kernel) for x in arrays), **CASE.options)
    assert same_bits(*fetch(kernel, out), expected)
