"""Products of a warpgroup: every width, type and layout of operands, exact in small integers."""

from dataclasses import dataclass

import numpy as np
import pytest
from machine import Kernel, Machine, Out
from model import BFLOAT16, E4M3, E5M2, FLOAT16, integers, shared_operand, warpgroup_a, warpgroup_d

SHARED = 64 * 1024  # bytes
WIDTHS = range(16, 257, 16)
SPANS = [0, 32, 64, 128]

PARAMS = """
  const u32 *memory;      // what shared memory holds
  const u64 *a, *b;       // descriptors of each step, relative to it
  const u32 *registers;   // A of each step [step, thread, 4]
  const float *c;         // D before [thread, N / 2]
  float *d;
  u32 bytes, keep, product;
"""
FUNCTIONS = """
template <int STEPS>
DEVICE void registers(u32 (&a)[STEPS][4], const Params &p) {
  for (int step = 0; step < STEPS; ++step)
    for (int i = 0; i < 4; ++i) a[step][i] = p.registers[(step * 128 + threadIdx.x) * 4 + i];
}
template <int SIZE>
DEVICE void begin(float (&d)[SIZE], const Params &p) {
  for (int i = 0; i < SIZE; ++i) {
    if (p.keep) {
      d[i] = p.c[threadIdx.x * SIZE + i];
    } else {
      ptx::undefined(d[i]);
    }
  }
  ptx::wgmma_fence();
}
template <int SIZE>
DEVICE void end(float (&d)[SIZE], const Params &p) {
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  for (int i = 0; i < SIZE; ++i) ptx::pin(d[i]);
  for (int i = 0; i < SIZE; ++i) p.d[threadIdx.x * SIZE + i] = d[i];
}
"""
BODY = """
  u32 *shared = ptx::shared<u32[16384]>();
  const u32 t = threadIdx.x;
  for (u32 i = t; i < p.bytes / 4; i += blockDim.x) shared[i] = p.memory[i];
  ptx::fence_proxy_async();
  ptx::barrier();
  const u64 base = ptx::smem_address(shared) >> 4;
"""


@dataclass(frozen=True)
class Product:
    """One function of wgmma_shapes.cuh: with A in shared memory, or in registers."""

    function: str
    n: int
    a: np.dtype
    b: np.dtype
    registers: bool
    trans_a: int = 0
    trans_b: int = 0
    steps: int = 2  # how many are chained along K

    def __str__(self) -> str:
        letters = "r" if self.registers else "km"[self.trans_a]
        return f"{self.function}-{self.n}-{letters}{'km'[self.trans_b]}"

    @property
    def text(self) -> str:
        """The code that multiplies by it, with D and A of each step in registers of their own."""
        majors = [self.trans_b] if self.registers else [self.trans_a, self.trans_b]
        which = f"<{', '.join(map(str, majors))}>" if self.a.itemsize == 2 else ""
        a = "a[{0}]" if self.registers else "base + p.a[{0}]"
        product = f"ptx::wgmma_{self.function}{which}(d, {a}, base + p.b[{{0}}], {{0}} || p.keep);"
        lines = [
            f"float d[{self.n // 2}];",
            f"u32 a[{self.steps}][4];" if self.registers else "",
            "registers(a, p);" if self.registers else "",
            "begin(d, p);",
            *(product.format(step) for step in range(self.steps)),
            "end(d, p);",
        ]
        return "\n".join(f"      {line}" for line in lines if line)


def kernel(products: tuple[Product, ...]) -> Kernel:
    """Return the kernel that has these products."""
    cases = "\n".join(
        f"    case {i}: {{\n{product.text}\n      break;\n    }}"
        for i, product in enumerate(products)
    )
    body = f"{BODY}  switch (p.product) {{\n{cases}\n  }}"
    headers = "wgmma bulk memory warp"
    return Kernel(headers, PARAMS, body, FUNCTIONS, threads=128, shared=SHARED, capability=90)


def multiply(
    machine: Machine,
    rng: np.random.Generator,
    products: tuple[Product, ...],
    product: Product,
    spans: tuple[int, int],
    keep: bool,
) -> None:
    """Run one of a kernel's products and hold it against A B, or A B + C."""
    k = product.steps * 32 // product.a.itemsize
    a, b = integers(rng, (64, k), product.a), integers(rng, (product.n, k), product.b)
    c = np.arange(64 * product.n, dtype=np.float32).reshape(64, -1) % 1021
    memory_a, descriptors_a = shared_operand(a, bool(product.trans_a), spans[0])
    memory_b, descriptors_b = shared_operand(b, bool(product.trans_b), spans[1])
    memory = np.concatenate([memory_a, memory_b])
    after_a = len(memory_a) >> 4
    (d,) = machine.run(
        kernel(products),
        memory,
        np.array(descriptors_a, np.uint64),
        np.array([descriptor + after_a for descriptor in descriptors_b], np.uint64),
        warpgroup_a(a),
        warpgroup_d(c),
        Out.empty((128, product.n // 2), np.float32),
        *(np.uint32(x) for x in (len(memory), keep, products.index(product))),
    )
    expected = a.astype(np.float32) @ b.astype(np.float32).T + (c if keep else 0)
    np.testing.assert_array_equal(d, warpgroup_d(expected))


def both(function: str, n: int, a: np.dtype, b: np.dtype | None = None) -> tuple[Product, ...]:
    """Return the products with A in shared memory and in registers."""
    return tuple(Product(function, n, a, b or a, registers) for registers in (False, True))


def widths(function: str, dtype: np.dtype, registers: bool) -> tuple[Product, ...]:
    """Return the products of every width, the columns of B side by side where they may be."""
    trans_b = int(dtype.itemsize == 2)
    return tuple(Product(function, n, dtype, dtype, registers, 0, trans_b) for n in WIDTHS)


def layouts(function: str, n: int, dtype: np.dtype) -> tuple[Product, ...]:
    """Return the products of every way that their operands may run."""
    ways = [(False, 0, 0), (False, 0, 1), (False, 1, 0), (False, 1, 1), (True, 0, 0), (True, 0, 1)]
    return tuple(Product(function, n, dtype, dtype, *way, 6) for way in ways)


ALL_WIDTHS = [  # of each macro: kernels of their own, for they take long to compile
    widths(function, dtype, registers)
    for function, dtype in (("bf16", BFLOAT16), ("e4m3", E4M3))
    for registers in (False, True)
]
LAYOUTS = layouts("bf16", 128, BFLOAT16)
TYPES = (
    *layouts("f16", 64, FLOAT16),
    *both("e5m2", 64, E5M2),
    *both("e4m3_e5m2", 64, E4M3, E5M2),
)
KERNELS = [kernel(products) for products in (*ALL_WIDTHS, LAYOUTS, TYPES)]
SHARED_LAYOUTS = [
    (product, (a, b))
    for product in LAYOUTS
    for a in SPANS
    for b in SPANS
    if not (product.registers and a)
]


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("products", ALL_WIDTHS, ids=lambda products: str(products[0]))
def test_every_width(
    machine: Machine, rng: np.random.Generator, products: tuple[Product, ...], n: int
) -> None:
    product = products[WIDTHS.index(n)]
    # The columns are whole atoms of a swizzle where they lie side by side.
    span = next(x for x in (128, 64, 32) if not product.trans_b or 2 * n % x == 0)
    multiply(machine, rng, products, product, (128, span), True)


@pytest.mark.parametrize(("product", "spans"), SHARED_LAYOUTS, ids=str)
def test_every_layout(
    machine: Machine, rng: np.random.Generator, product: Product, spans: tuple[int, int]
) -> None:
    """The steps along K go from chunk to chunk of a swizzle's atom and from panel to panel."""
    multiply(machine, rng, LAYOUTS, product, spans, False)


@pytest.mark.parametrize("keep", [False, True], ids=["D = A B", "D += A B"])
@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("product", TYPES, ids=str)
def test_every_type(
    machine: Machine, rng: np.random.Generator, product: Product, span: int, keep: bool
) -> None:
    multiply(machine, rng, TYPES, product, (span, span), keep)
