"""Boxes of tensors: loaded, stored and added, wherever they lie, with every swizzle."""

import itertools

import numpy as np
import pytest
from machine import Kernel, Machine, Out, Tensor
from model import BFLOAT16, E4M3, FLOAT16, integers, swizzled

FLOAT32 = np.dtype(np.float32)
BATCH, LENGTH, HEADS = 2, 13, 3
BOX = (5, 2, 2)  # rows, heads, batches
BUFFER = 8192
LOAD = Kernel(
    "tma mbarrier memory warp",
    "ptx::TensorMap map; const int *at; u32 *to; u32 bytes, count;",
    f"""
  struct Shared {{
    u32 box[{BUFFER} / 4];
    u64 full;
  }};
  Shared &s = ptx::shared<Shared>();
  const u32 t = threadIdx.x, full = ptx::smem_address(&s.full);
  if (t == 0) {{
    ptx::prefetch_tensor_map(p.map);
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
  }}
  ptx::barrier();
  for (u32 i = 0; i < p.count; ++i) {{
    if (t == 0) {{
      const int *c = p.at + 4 * i;
      ptx::mbarrier_arrive_expect_tx(full, p.bytes);
      ptx::tma_load_4d(ptx::smem_address(s.box), p.map, full, c[0], c[1], c[2], c[3]);
    }}
    ptx::mbarrier_wait(full, i & 1);
    for (u32 j = t; j < p.bytes / 4; j += blockDim.x) p.to[i * p.bytes / 4 + j] = s.box[j];
    ptx::barrier();  // all have read what the next copy overwrites
  }}
""",
    threads=64,
    shared=BUFFER + 1024,
    capability=90,
)
STORE = Kernel(
    "tma bulk memory warp",
    "ptx::TensorMap map; const int *at; const u32 *from; u32 bytes, count, add;",
    f"""
  u32 *box = ptx::shared<u32[{BUFFER} / 4]>();
  const u32 t = threadIdx.x;
  for (u32 i = 0; i < p.count; ++i) {{
    for (u32 j = t; j < p.bytes / 4; j += blockDim.x) box[j] = p.from[i * p.bytes / 4 + j];
    ptx::fence_proxy_async();
    ptx::barrier();
    if (t == 0) {{
      const int *c = p.at + 4 * i;
      if (p.add) {{
        ptx::tma_reduce_add_4d(p.map, ptx::smem_address(box), c[0], c[1], c[2], c[3]);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
      }} else {{
        ptx::tma_store_4d(p.map, ptx::smem_address(box), c[0], c[1], c[2], c[3]);
        ptx::bulk_commit();
        ptx::bulk_wait<0>();  // boxes overlap: the later one is to stay
      }}
    }}
    ptx::barrier();
  }}
  if (t == 0) ptx::bulk_wait<0>();
""",
    threads=64,
    shared=BUFFER,
    capability=90,
)
SPANS = [0, 32, 64, 128]


def columns_of(dtype: np.dtype, swizzle: int) -> int:
    """Return the columns of a box: a whole row of the swizzle, or some number without one."""
    return (swizzle or 80) // dtype.itemsize


def corners(columns: int, total: int, step: int) -> np.ndarray:
    """Return coordinates of boxes inside, across each edge, and outside of the tensor.

    Columns are multiples of `step`.
    """
    sizes = zip((columns, *BOX), (total, LENGTH, HEADS, BATCH), strict=True)
    along = [
        (size - box, -(box // 2 + 1), size - box // 2, -box, size, -box - 7, size + 3)
        for box, size in sizes
    ]
    along[0] = tuple(place // step * step for place in along[0])
    inside = [max(places[0] - 1, 0) for places in along]
    inside[0] = inside[0] // step * step
    single = [
        [*inside[:axis], place, *inside[axis + 1 :]]
        for axis, places in enumerate(along)
        for place in places
    ]
    corner = itertools.product(*((places[1], places[2]) for places in along))
    return np.array([inside, [0, 0, 0, 0], *single, *corner], np.int32)


def cells(at: np.ndarray, columns: int, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Return the indices [batch, head, row, column] of a box's elements, and which are inside."""
    column, row, head, batch = (
        start + np.arange(size) for start, size in zip(at, (columns, *BOX), strict=True)
    )
    index = np.ix_(batch, head, row, column)
    index = (index[0], index[2], index[1], index[3])  # as the array's axes
    inside = np.bool_(True)
    for places, size in zip(index, shape, strict=True):
        inside = inside & (places >= 0) & (places < size)
    return (*index, inside)


def loaded(array: np.ndarray, at: np.ndarray, columns: int) -> np.ndarray:
    """Return the box [batch, head, row, column] that a load reads."""
    *index, inside = cells(at, columns, array.shape)
    clipped = [np.clip(i, 0, size - 1) for i, size in zip(index, array.shape, strict=True)]
    return np.where(inside, array[tuple(clipped)], np.zeros((), array.dtype))


def in_shared(box: np.ndarray, swizzle: int) -> np.ndarray:
    """Return the bytes of shared memory that hold a box."""
    flat = np.frombuffer(np.ascontiguousarray(box).tobytes(), np.uint8)
    memory = np.empty_like(flat)
    memory[swizzled(np.arange(flat.size), swizzle)] = flat
    return memory


def distinct(dtype: np.dtype, columns: int) -> np.ndarray:
    """Return a tensor of which no two elements near each other are the same, none of them zero."""
    count = BATCH * LENGTH * HEADS * columns
    bits = np.arange(count, dtype=np.uint32) % (251 if dtype.itemsize == 1 else 0x7000) + 1
    array = bits.astype(f"u{dtype.itemsize}").view(dtype)
    return array.reshape(BATCH, LENGTH, HEADS, columns)


@pytest.mark.parametrize("swizzle", SPANS)
@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT32, E4M3], ids=lambda dtype: dtype.name)
def test_a_load_reads_its_box_and_zeros_beyond(
    machine: Machine, dtype: np.dtype, swizzle: int
) -> None:
    columns = columns_of(dtype, swizzle)
    array = distinct(dtype, total := columns + 32 // dtype.itemsize)
    at = corners(columns, total, 16 // dtype.itemsize)
    size = columns * dtype.itemsize * int(np.prod(BOX))
    (got,) = machine.run(
        LOAD, Tensor(array, (columns, *BOX), swizzle), at, Out.empty((len(at), size), np.uint8),
        np.uint32(size), np.uint32(len(at)),
    )  # fmt: skip
    for corner, memory in zip(at, got, strict=True):
        expected = in_shared(loaded(array, corner, columns), swizzle)
        np.testing.assert_array_equal(memory, expected, f"{corner}")


@pytest.mark.parametrize("swizzle", SPANS)
@pytest.mark.parametrize("add", [False, True], ids=["store", "add"])
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16, FLOAT32], ids=lambda dtype: dtype.name)
def test_a_store_writes_what_is_inside(
    machine: Machine, rng: np.random.Generator, dtype: np.dtype, add: bool, swizzle: int
) -> None:
    columns = columns_of(dtype, swizzle)
    total = columns + 32 // dtype.itemsize
    at = corners(columns, total, 16 // dtype.itemsize)
    at = np.unique(np.maximum(at, 0), axis=0)  # a store at a negative coordinate hangs
    before = integers(rng, (BATCH, LENGTH, HEADS, total), dtype)
    boxes = integers(rng, (len(at), *BOX[::-1], columns), dtype)
    expected = before.astype(np.float32)
    for corner, box in zip(at, boxes, strict=True):
        *index, inside = cells(corner, columns, before.shape)
        places = tuple(np.broadcast_to(i, inside.shape)[inside] for i in index)
        expected[places] = box[inside].astype(np.float32) + (expected[places] if add else 0)
    images = np.stack([in_shared(box, swizzle) for box in boxes])
    (got,) = machine.run(
        STORE, Tensor(Out(before), (columns, *BOX), swizzle), at, images,
        np.uint32(images.shape[1]), np.uint32(len(at)), np.uint32(add),
    )  # fmt: skip
    np.testing.assert_array_equal(got.astype(np.float32), expected)
