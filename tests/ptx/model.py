"""What the PTX ISA says of values and places, in NumPy: fragments, swizzles, roundings."""

from typing import Any

import ml_dtypes
import numpy as np

LANES = np.arange(32)
ROW, PAIR = LANES // 4, LANES % 4  # of a lane in a fragment: g and t of the ISA's figures
SMALLEST = np.float32(2.0**-126)  # the least that is not subnormal

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)


def codes(dtype: np.dtype) -> np.ndarray:
    """Return every value of a format, in the order of its codes."""
    return np.arange(1 << 8 * dtype.itemsize).astype(f"u{dtype.itemsize}").view(dtype)


def boundaries(dtype: np.dtype) -> np.ndarray:
    """Return the fp32 numbers at which rounding to a format is decided, with their neighbours.

    These are every number of the format, the middle between each two, what is beyond the largest,
    the infinities and NaN.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        finite = codes(dtype).astype(np.float32)
        finite = np.unique(finite[np.isfinite(finite)]).astype(np.float64)
        step = finite[-1] - finite[-2]
        finite = np.concatenate([finite, finite[[0, -1]] + [-step, step]])
        finite.sort()
        middles = (finite[1:] + finite[:-1]) / 2
        decided = np.concatenate([finite, middles]).astype(np.float32)
        around = [decided, np.nextafter(decided, -np.inf), np.nextafter(decided, np.inf)]
    special = [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 1, 0x80000001, 1 << 31]
    return np.concatenate([*around, np.array(special, np.uint32).view(np.float32)])


def pairs(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return unsigned numbers of twice the size, whose low half is the first argument."""
    size = low.dtype.itemsize
    both = np.stack([low, high], axis=-1).view(f"u{size}")
    return np.ascontiguousarray(both).view(f"u{2 * size}")[..., 0]


def words(elements: np.ndarray) -> np.ndarray:
    """Return the 32-bit registers that hold runs of elements along the last axis."""
    return np.ascontiguousarray(elements).view(np.uint32)


def flushed(x: np.ndarray) -> np.ndarray:
    """Return fp32 numbers with zeros in the place of subnormals, as ".ftz" has them."""
    return np.where(np.abs(x) < SMALLEST, np.copysign(np.float32(0), x), x)


def same_numbers(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two fp32 arrays are equal bit by bit, but for which NaN a NaN is."""
    nan = np.isnan(b)
    return bool((np.isnan(a) == nan).all() and (a[~nan].view("i4") == b[~nan].view("i4")).all())


# Fragments of a warp: [lane, register, element of the register] -> [row, column]


def a_fragment(a: np.ndarray) -> np.ndarray:
    """Return the registers [32, 4] of A [16, 32 bytes of K] in mma.sync."""
    each = 4 // a.dtype.itemsize  # elements of a register
    half = 4 * each
    registers = [
        a[(ROW + 8 * (i % 2))[:, None], (PAIR * each + half * (i // 2))[:, None] + np.arange(each)]
        for i in range(4)
    ]
    return np.stack([words(register)[:, 0] for register in registers], axis=1)


def b_fragment(b: np.ndarray) -> np.ndarray:
    """Return the registers [32, 2] of B [32 bytes of K, 8] in mma.sync."""
    each = 4 // b.dtype.itemsize
    registers = [
        b[(PAIR * each + 4 * each * i)[:, None] + np.arange(each), ROW[:, None]] for i in range(2)
    ]
    return np.stack([words(register)[:, 0] for register in registers], axis=1)


def d_fragment(d: np.ndarray) -> np.ndarray:
    """Return the fp32 registers [32, 4] of D [16, 8] in mma.sync."""
    i = np.arange(4)
    return d[ROW[:, None] + 8 * (i // 2), 2 * PAIR[:, None] + i % 2]


def matrix_fragment(matrices: np.ndarray, transposed: bool) -> np.ndarray:
    """Return the registers [32, matrices] of 8 x 8 matrices of 16 bits in ldmatrix."""
    if transposed:
        matrices = matrices.transpose(0, 2, 1)
    rows = np.ascontiguousarray(matrices[:, ROW])  # [matrix, lane, column]
    return words(rows)[:, LANES, PAIR].T


def swizzled(offsets: Any, span: int) -> Any:
    """Return where the bytes at offsets of shared memory are put (PTX ISA, "Swizzling Modes").

    The 16-byte chunks of a row of `span` bytes change places by the number of their 128-byte line.
    """
    chunks = max(span // 16, 1)
    return offsets ^ ((offsets >> 7 & (chunks - 1)) << 4)


def integers(rng: np.random.Generator, shape: Any, dtype: np.dtype, largest: int = 4) -> np.ndarray:
    """Return small integers, whose products and sums are exact in every order."""
    return rng.integers(-largest, largest + 1, shape).astype(np.float32).astype(dtype)


# Operands of wgmma in shared memory (PTX ISA, "Matrix Descriptor", "Strides")

LAYOUT_TYPES = {0: 0, 128: 1, 64: 2, 32: 3}
K_BYTES = 32  # of one product, along K
LINES = 8  # of a core matrix, and of a swizzle atom


def shared_operand(matrix: np.ndarray, mn_major: bool, span: int) -> tuple[np.ndarray, list[int]]:
    """Put a matrix [rows of A or columns of B, K] into shared memory, in panels of a swizzle.

    A line runs along K, or along the rows or columns where the matrix is `mn_major`; a panel is all
    lines, so many bytes wide as the swizzle (16 without one).

    Returns
    -------
    memory : numpy.ndarray
        Its bytes, from an address that is a multiple of 1024.
    descriptors : list of int
        Of each k-step, relative to that address.
    """
    lines = np.ascontiguousarray(matrix.T if mn_major else matrix)
    width = span or 16
    size = lines.shape[1] * lines.itemsize
    panels, count = -(-size // width), len(lines)
    padded = np.zeros((count, panels * width), np.uint8)
    padded[:, :size] = lines.view(np.uint8)
    flat = padded.reshape(count, panels, width).transpose(1, 0, 2).ravel()
    memory = np.zeros(-(-flat.size // 1024) * 1024, np.uint8)
    memory[swizzled(np.arange(flat.size), span)] = flat

    panel, group = count * width, LINES * width  # bytes from one to the next
    # Without a swizzle the leading dimension is K's, whichever way the lines run.
    leading, stride = (group, panel) if mn_major and not span else (panel, group)
    steps = matrix.shape[1] * matrix.itemsize // K_BYTES
    descriptors = []
    for step in range(steps):
        if mn_major:
            start = step * K_BYTES // matrix.itemsize * width
        else:
            start = step * K_BYTES // width * panel + step * K_BYTES % width
        fields = start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | LAYOUT_TYPES[span] << 62
        descriptors.append(fields)
    return memory, descriptors


THREADS = np.arange(128)
FIRST_ROW = THREADS // 32 * 16 + THREADS % 32 // 4


def warpgroup_a(a: np.ndarray) -> np.ndarray:
    """Return the registers [steps, 128, 4] of A [64, K] in wgmma."""
    each = 4 // a.dtype.itemsize
    steps = np.split(a, a.shape[1] // (8 * each), axis=1)
    columns = (THREADS % 4 * each)[:, None] + np.arange(each)
    return np.stack(
        [
            np.stack(
                [
                    words(step[(FIRST_ROW + 8 * (i % 2))[:, None], columns + 4 * each * (i // 2)])
                    for i in range(4)
                ],
                axis=1,
            )[..., 0]
            for step in steps
        ]
    )


def warpgroup_d(d: np.ndarray) -> np.ndarray:
    """Return the fp32 registers [128, N / 2] of D [64, N] in wgmma."""
    i = np.arange(d.shape[1] // 2)
    rows = FIRST_ROW[:, None] + i // 2 % 2 * 8
    return d[rows, i // 4 * 8 + THREADS[:, None] % 4 * 2 + i % 2]
