"""Forward on sizes and strides beyond 16 and 32 bits (GPU)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from harness import GPU_KERNEL, GPU_KERNELS, HOPPER, call, check, judge, run, same_bits
from strided import Layout

pytestmark = pytest.mark.gpu
GB = 10**9
CHUNK = 2**27  # elements compared at a time
both = pytest.mark.parametrize("kernel", GPU_KERNELS)


@pytest.fixture(autouse=True)
def _give_memory_back() -> Iterator[None]:
    """Return CuPy's pool to the device after each test, for the workers beside this one."""
    yield
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()


def need(gigabytes: float) -> None:
    import gpu

    free = gpu.free_bytes() / GB
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GB of free GPU memory, there are {free:.1f}")


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


@both
@pytest.mark.parametrize(
    ("batch", "heads_q", "heads_k"),
    [(65536, 1, 1), (1, 65536, 65536), (1, 65536, 1), (300, 300, 300), (70001, 3, 1)],
)
def test_more_than_65535_batches_or_heads(
    kernel: str, batch: int, heads_q: int, heads_k: int
) -> None:
    q = normal(1, batch, 1, heads_q, 8)
    k, v = normal(2, batch, 1, heads_k, 8), normal(3, batch, 1, heads_k, 8)
    out, lse = run(kernel, q, k, v, causal=True)
    assert same_bits(out, np.repeat(v, heads_q // heads_k, axis=2))
    assert np.isfinite(lse).all()


@both
def test_more_than_65535_query_tiles(kernel: str) -> None:
    q = normal(1, 1, 65536 * 128 + 1, 1, 8)
    k, v = normal(2, 1, 1, 1, 8), normal(3, 1, 1, 1, 8)
    out, lse = run(kernel, q, k, v)
    assert (out == v).all()
    assert np.isfinite(lse).all()


@both
def test_a_million_keys(kernel: str) -> None:
    q, k, v = normal(1, 1, 3, 2, 16), normal(2, 1, 2**20, 1, 16), normal(3, 1, 2**20, 1, 16)
    check(kernel, q, k, v)
    band = {"causal": True, "window_size": (1000, 0)}
    last = slice(-1024, None)  # all that the band shows; their positions end where the queries' do
    judge(run(kernel, q, k, v, **band), q, k[:, last], v[:, last], **band)


# Offsets. One operand lies in 8.6 GB of NaN with a stride that takes its last element past 2^32.

FAR_ELEMENTS = 2**32
SHAPE = (2, 65, 2, 64)
FAR = {"batch": 0, "row": 1, "head": 2}


def far_layout(shape: tuple[int, ...], axis: int) -> Layout:
    """Lay out an array whose last index along the axis starts 2^32 elements after the first."""
    strides = [0, 0, 0, 1]
    span = shape[3]
    for other in (2, 1, 0):
        if other != axis:
            strides[other] = span
            span *= shape[other]
    strides[axis] = FAR_ELEMENTS // (shape[axis] - 1)
    return Layout(tuple(strides), 64)


def row_bytes(layout: Layout, shape: tuple[int, ...], index: tuple[int, ...]) -> slice:
    """Return where a row of a float16 array lies in its storage."""
    steps = zip(index, layout.strides, strict=False)
    start = 2 * (layout.offset + sum(i * s for i, s in steps))
    return slice(start, start + 2 * shape[3])


def scatter(memory: Any, layout: Layout, values: np.ndarray) -> None:
    """Copy the rows of an array to their places, one by one (no kernel that could overflow too)."""
    for index in np.ndindex(values.shape[:3]):
        memory[row_bytes(layout, values.shape, index)].set(values[index].view(np.uint8))


def gather(memory: Any, layout: Layout, shape: tuple[int, ...]) -> np.ndarray:
    """Copy the rows of an array from their places."""
    values = np.empty(shape, np.float16)
    for index in np.ndindex(shape[:3]):
        values[index] = memory[row_bytes(layout, shape, index)].get().view(np.float16)
    return values


def words_written(memory: Any) -> int:
    """Count the 8-byte words that are not all ones any more."""
    import cupy

    words = memory.view(np.uint64)
    ones = np.uint64(2**64 - 1)
    chunks = (words[begin : begin + CHUNK] for begin in range(0, words.size, CHUNK))
    return sum(int(cupy.count_nonzero(chunk != ones)) for chunk in chunks)


@both
@pytest.mark.parametrize("axis", FAR)
@pytest.mark.parametrize("operand", ["q", "k", "v", "out"])
def test_offsets_beyond_32_bits(kernel: str, operand: str, axis: str) -> None:
    import cupy

    need(10)
    shape = tuple(5 if a == FAR[axis] and a != 1 else n for a, n in enumerate(SHAPE))
    layout = far_layout(shape, FAR[axis])
    memory = cupy.empty(2 * (FAR_ELEMENTS + 2**20), np.uint8)
    memory.data.memset_async(0xFF, memory.nbytes)
    far = cupy.ndarray(
        shape, np.float16, memory.data + 2 * layout.offset, tuple(2 * s for s in layout.strides)
    )
    values = {name: normal(seed, *shape) for seed, name in enumerate("qkv")}
    arrays: dict[str, Any] = {name: cupy.asarray(x) for name, x in values.items()}
    if operand == "out":
        out, lse = call(kernel, *arrays.values(), out=far)
        assert out is far
        result = gather(memory, layout, shape)
        rows = shape[0] * shape[1] * shape[2]
        assert words_written(memory) == rows * shape[3] * 2 // 8
    else:
        scatter(memory, layout, values[operand])
        arrays[operand] = far
        out, lse = call(kernel, *arrays.values())
        result = out.get()
    judge((result, lse.get()), *values.values())


@both
def test_arrays_of_more_than_two_to_the_31_elements(kernel: str) -> None:
    import cupy

    need(10)
    rows = 2**20 + 1
    q = cupy.zeros((1, rows, 16, 128), np.float16)
    k, v = cupy.asarray(normal(2, 1, 1, 16, 128)), cupy.asarray(normal(3, 1, 1, 16, 128))
    out, lse = call(kernel, q, k, v)
    assert not lse.any()
    for begin in range(0, rows, CHUNK // 2048):
        assert (out[:, begin : begin + CHUNK // 2048] == v).all(), begin


def test_an_lse_of_more_than_two_to_the_31_elements() -> None:
    import cupy

    need(30)
    rows, heads = 2**29, 5
    q = cupy.zeros((1, rows, heads, 1), np.float16)
    v = cupy.asarray(normal(3, 1, 1, heads, 1))
    out, lse = call(GPU_KERNEL, q, cupy.ones_like(v), v)
    for begin in range(0, rows, CHUNK):
        for head in range(heads):
            assert not lse[0, head, begin : begin + CHUNK].any(), begin
        assert (out[:, begin : begin + CHUNK] == v).all(), begin


def test_an_lse_of_more_than_two_to_the_31_elements_on_hopper() -> None:
    """Rows of q overlap, so that it is small: one begins 16 bytes after another."""
    import cupy

    need(48)
    batch, rows, heads, dim = 8, 2**25 + 1, 8, 8
    memory = cupy.zeros((batch + rows + heads, dim), np.float16)
    q = cupy.ndarray((batch, rows, heads, dim), np.float16, memory.data, (16, 16, 16, 2))
    v = cupy.asarray(normal(3, batch, 1, heads, dim))
    out, lse = call(HOPPER, q, cupy.ones_like(v), v)
    assert lse.size > 2**31
    chunk = CHUNK // (heads * dim)
    for entry in range(batch):
        assert not lse[entry].any(), entry
        for begin in range(0, rows, chunk):
            assert (out[entry, begin : begin + chunk] == v[entry]).all(), (entry, begin)
