"""Fragments of a warp: between shared memory and registers, and in matrix products."""

import ml_dtypes
import numpy as np
import pytest
from machine import Kernel, Machine, Out
from model import (
    BFLOAT16,
    E4M3,
    E5M2,
    FLOAT16,
    LANES,
    a_fragment,
    b_fragment,
    d_fragment,
    integers,
    matrix_fragment,
)

ROWS = 64  # of 16 bytes in shared memory, of which a fragment names 32
MATRIX = Kernel(
    "ldmatrix memory warp",
    "const u32 *from, *row; u32 *to; u32 transposed;",
    f"""
  u32 *shared = ptx::shared<u32[{ROWS * 4}]>();
  for (u32 i = threadIdx.x; i < {ROWS * 4}; i += 32) shared[i] = p.from[i];
  ptx::barrier();
  const u32 row = ptx::smem_address(shared + 4 * p.row[threadIdx.x]);
  u32 d[4];
  if (p.transposed) ptx::ldmatrix_x4_trans(d, row); else ptx::ldmatrix_x4(d, row);
  for (u32 i = 0; i < 4; ++i) p.to[threadIdx.x * 4 + i] = d[i];
""",
    shared=ROWS * 16,
)
STORE = Kernel(
    "stmatrix memory warp",
    "const u32 *from, *row; u32 *to; u32 transposed;",
    f"""
  u32 *shared = ptx::shared<u32[{ROWS * 4}]>();
  for (u32 i = threadIdx.x; i < {ROWS * 4}; i += 32) shared[i] = 0;
  ptx::barrier();
  const u32 row = ptx::smem_address(shared + 4 * p.row[threadIdx.x]);
  u32 d[4];
  for (u32 i = 0; i < 4; ++i) d[i] = p.from[threadIdx.x * 4 + i];
  if (p.transposed) ptx::stmatrix_x4_trans(row, d); else ptx::stmatrix_x4(row, d);
  ptx::barrier();
  for (u32 i = threadIdx.x; i < {ROWS * 4}; i += 32) p.to[i] = shared[i];
""",
    shared=ROWS * 16,
    capability=90,
)


def product(headers: str, first: str, second: str, capability: int = 80) -> Kernel:
    """Return the kernel of two products, each D = A B + C with its own registers."""
    return Kernel(
        headers,
        "const u32 *a, *b; const float *c; float *d; u32 other;",
        f"""
  const u32 t = threadIdx.x;
  u32 a[4], b[2];
  float d[4];
  for (u32 i = 0; i < 4; ++i) a[i] = p.a[t * 4 + i];
  for (u32 i = 0; i < 2; ++i) b[i] = p.b[t * 2 + i];
  for (u32 i = 0; i < 4; ++i) d[i] = p.c[t * 4 + i];
  if (p.other) ptx::{second}(d, a, b[0], b[1]); else ptx::{first}(d, a, b[0], b[1]);
  for (u32 i = 0; i < 4; ++i) p.d[t * 4 + i] = d[i];
""",
        capability=capability,
    )


PRODUCT_16 = product("mma", "mma_m16n8k16_bf16", "mma_m16n8k16_f16")
PRODUCT_8 = product("fp8", "mma_m16n8k32_e4m3", "mma_m16n8k32_e5m2", 89)
PRODUCTS = {
    "bf16": (BFLOAT16, PRODUCT_16, 0),
    "f16": (FLOAT16, PRODUCT_16, 1),
    "e4m3": (E4M3, PRODUCT_8, 0),
    "e5m2": (E5M2, PRODUCT_8, 1),
}


@pytest.mark.parametrize("transposed", [0, 1])
def test_ldmatrix_places_every_element(
    machine: Machine, rng: np.random.Generator, transposed: int
) -> None:
    memory = np.arange(ROWS * 8, dtype=np.uint16).reshape(ROWS, 8)
    row = rng.permutation(ROWS)[:32].astype(np.uint32)
    out = Out.empty((32, 4), np.uint32)
    (d,) = machine.run(MATRIX, memory, row, out, np.uint32(transposed))
    expected = matrix_fragment(memory[row].reshape(4, 8, 8), bool(transposed))
    np.testing.assert_array_equal(d, expected)


@pytest.mark.parametrize("transposed", [0, 1])
def test_stmatrix_places_every_element(
    machine: Machine, rng: np.random.Generator, transposed: int
) -> None:
    matrices = np.arange(1, 257, dtype=np.uint16).reshape(4, 8, 8)
    row = rng.permutation(ROWS)[:32].astype(np.uint32)
    fragment = matrix_fragment(matrices, bool(transposed))
    out = Out.empty((ROWS, 8), np.uint16)
    (memory,) = machine.run(STORE, fragment, row, out, np.uint32(transposed))
    expected = np.zeros((ROWS, 8), np.uint16)
    expected[row] = matrices.reshape(32, 8)
    np.testing.assert_array_equal(memory, expected)


@pytest.mark.parametrize("name", PRODUCTS)
def test_mma_multiplies_the_elements_of_its_fragments(
    machine: Machine, rng: np.random.Generator, name: str
) -> None:
    dtype, kernel, other = PRODUCTS[name]
    k = 32 // dtype.itemsize
    a, b = integers(rng, (16, k), dtype), integers(rng, (k, 8), dtype)
    c = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    out = Out.empty((32, 4), np.float32)
    fragments = (a_fragment(a), b_fragment(b), d_fragment(c))
    (d,) = machine.run(kernel, *fragments, out, np.uint32(other))
    expected = a.astype(np.float32) @ b.astype(np.float32) + c
    np.testing.assert_array_equal(d, d_fragment(expected))


@pytest.mark.parametrize("name", PRODUCTS)
def test_mma_takes_every_number_of_its_format(machine: Machine, name: str) -> None:
    """Each number times one, subnormals and infinities included, one in each row of A."""
    dtype, kernel, other = PRODUCTS[name]
    k = 32 // dtype.itemsize
    finfo = ml_dtypes.finfo(dtype)
    subnormal = float(finfo.smallest_subnormal)
    values = [subnormal, -3 * subnormal, float(finfo.smallest_normal), float(finfo.max), -0.0]
    values += [float(finfo.min), 1.0, -1.5] + ([np.inf, -np.inf] if name != "e4m3" else [])
    values += [np.nan]
    a = np.zeros((16, k), dtype)
    a[LANES[: len(values)], LANES[: len(values)] * (k - 1) // 15] = np.array(values).astype(dtype)
    ones = np.ones((k, 8), dtype)
    c = np.zeros((16, 8), np.float32)
    out = Out.empty((32, 4), np.float32)
    fragments = (a_fragment(a), b_fragment(ones), d_fragment(c))
    (d,) = machine.run(kernel, *fragments, out, np.uint32(other))
    column = np.zeros(16, np.float32)
    column[: len(values)] = values
    np.testing.assert_array_equal(d, d_fragment(np.repeat(column[:, None], 8, axis=1)))
