"""wgmma on the emulator: what it multiplies, and each misuse with its sentence.

Operands are written by plain stores, in the layouts that NumPy makes here from the PTX ISA's words.
"""

import ctypes
import re
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from emulated import SEEDS, needs_compiler

import cupyflash
from cupyflash import _emulator
from cupyflash._emulator import build
from cupyflash._emulator.stats import Stats
from cupyflash._launch import Launch

pytestmark = needs_compiler

ROWS, K_BYTES, CHUNK = 64, 32, 16  # of D and A; of a row of one product; what a swizzle moves
THREADS = 128
STEPS = 4  # products that add up in a D: K is 128 bytes, a row of the widest swizzle
SHARED_BYTES = 64 << 10
DTYPES = {
    "bf16": (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    "f16": (np.float16, np.float16),
    "e4m3": (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
    "e5m2": (ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2),
    "e4m3_e5m2": (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
}

UNIT = """#include "ptx/bulk.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
struct Params { const u32 *image, *a; float *d; u64 descriptors[8]; int bytes, chosen; };
%s
extern "C" __global__ void tiny(const __grid_constant__ Params p) {
  u32 *shared = ptx::shared<u32[%d]>();
  const int t = threadIdx.x;
  for (int i = t; i < p.bytes / 4; i += blockDim.x) shared[i] = p.image[i];
  const u32 base = ptx::smem_address(shared);
  switch (p.chosen) {
%s
  }
}
"""


def unit(functions: Sequence[str]) -> str:
    """Return a unit that calls one of these functions, of which each has a body."""
    text = "".join(
        f"DEVICE void function_{i}(const Params &p, u32 *shared, int t, u32 base) {{\n{body}\n}}\n"
        for i, body in enumerate(functions)
    )
    cases = "".join(
        f"    case {i}: return function_{i}(p, shared, t, base);\n" for i in range(len(functions))
    )
    return UNIT % (text, SHARED_BYTES // 4, cases)


class Result(NamedTuple):
    """What a launch left: the registers of D by thread, and its counts."""

    registers: np.ndarray
    stats: Stats


class Device:
    """Memory of one test."""

    def __init__(self) -> None:
        self._runtime = build.runtime()
        self._allocations: list[int] = []

    def place(self, array: np.ndarray, name: str) -> int:
        """Return the address of a copy."""
        address = int(self._runtime.emu_alloc(max(array.nbytes, 16), name.encode(), 1))
        self._allocations.append(address)
        ctypes.memmove(address, array.tobytes(), array.nbytes)
        return address

    def run(
        self,
        text: str,
        chosen: int,
        image: np.ndarray,
        a: np.ndarray,
        columns: int,
        descriptors: Sequence[int],
        seed: int,
        threads: int = THREADS,
    ) -> Result:
        """Run a function of a unit."""
        d = np.full((threads, columns // 2), np.nan, np.float32)
        address = self.place(d, "d")
        pointers = (self.place(image, "image"), self.place(a, "a"), address)
        params = struct.pack("<3Q8Q2i", *pointers, *descriptors, image.nbytes, chosen)
        launch = Launch(text, "tiny", "sm_90a", (1, 1, 1), (threads, 1, 1), SHARED_BYTES, params)
        stats = _emulator.run(launch, seed)
        content = ctypes.string_at(address, d.nbytes)
        return Result(np.frombuffer(content, np.float32).reshape(d.shape), stats)

    def free(self) -> None:
        """Free all."""
        while self._allocations:
            self._runtime.emu_free(self._allocations.pop())


@pytest.fixture
def device() -> Iterator[Device]:
    """Memory, freed after the test."""
    memory = Device()
    yield memory
    memory.free()


# Layouts


def descriptor(start: int, leading: int, stride: int, swizzle: int) -> int:
    """Return the bits of a descriptor whose start is an offset in shared memory."""
    layout = {128: 1, 64: 2, 32: 3, 0: 0}[swizzle]
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | layout << 62


def tiled(matrix: np.ndarray, swizzle: int) -> tuple[np.ndarray, int, int]:
    """Lay the lines of a matrix out in atoms of 8 lines.

    Returns
    -------
    image, panel, atoms : array of bytes, int, int
        The atoms of one column of atoms lie one after the other; ``panel`` bytes further, the next
        column's. ``atoms`` is the distance of the atoms in a column.
    """
    width = swizzle or CHUNK
    lines, size = matrix.shape[0], matrix.shape[1] * matrix.itemsize
    chunks = matrix.view(np.uint8).reshape(lines // 8, 8, size // width, width // CHUNK, CHUNK)
    image = np.empty((size // width, lines // 8, 8, width // CHUNK, CHUNK), np.uint8)
    for line in range(8):
        row = line * width // 128  # whose 128 bytes hold the line
        for chunk in range(width // CHUNK):
            moved = chunk ^ row % (width // CHUNK)
            image[:, :, line, moved] = chunks[:, line, :, chunk].swapaxes(0, 1)
    return image.reshape(-1), lines * width, 8 * width


class Operand(NamedTuple):
    """A matrix in shared memory, and the descriptors of its parts for each step along K."""

    image: np.ndarray
    descriptors: list[int]


def operand(matrix: np.ndarray, k_major: bool, swizzle: int, offset: int) -> Operand:
    """Lay [rows, K] out at an offset, which the largest atom divides."""
    width = swizzle or CHUNK
    image, panel, atom = tiled(matrix if k_major else np.ascontiguousarray(matrix.T), swizzle)
    descriptors = []
    for step in range(STEPS):
        if k_major:
            at = step * K_BYTES
            start = offset + at // width * panel + at % width
            leading = 0 if swizzle else panel
            descriptors.append(descriptor(start, leading, atom, swizzle))
        else:
            start = offset + step * (K_BYTES // 2) // 8 * atom
            strides = (panel, atom) if swizzle else (atom, panel)
            descriptors.append(descriptor(start, *strides, swizzle))
    return Operand(image, descriptors)


def a_registers(a: np.ndarray) -> np.ndarray:
    """Return A's registers [step, thread, 4]."""
    t = np.arange(THREADS)[:, None]
    i = np.arange(4)
    row = t // 32 * 16 + t % 32 // 4 + i % 2 * 8
    word = t % 4 + i // 2 * 4
    words = a.view(np.uint32).reshape(ROWS, STEPS, 8)
    return np.ascontiguousarray(words.swapaxes(0, 1)[:, row, word])


def d_matrix(registers: np.ndarray) -> np.ndarray:
    """Return [64, columns] of D's registers [thread, columns / 2]."""
    t = np.arange(THREADS)[:, None]
    i = np.arange(registers.shape[1])
    d = np.full((ROWS, 2 * registers.shape[1]), np.nan, np.float32)
    d[t // 32 * 16 + t % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + t % 4 * 2 + i % 2] = registers
    return d


# What it multiplies


class Form(NamedTuple):
    """An instruction."""

    kind: str
    columns: int
    a_in_registers: bool = False
    a_major: int = 0  # 0: K
    b_major: int = 0

    @property
    def body(self) -> str:
        """A function's body: D = A B in STEPS products, the first of which drops what D held."""
        registers = self.a_in_registers
        majors = (self.b_major,) if registers else (self.a_major, self.b_major)
        template = "" if "e" in self.kind else f"<{', '.join(map(str, majors))}>"
        a = "a[step]" if registers else "p.descriptors[step] + base / 16"
        return f"""
  ptx::fence_proxy_async();
  ptx::barrier();
  float d[{self.columns // 2}];
  u32 a[{STEPS}][4];
  for (int step = 0; step < {STEPS}; ++step)
    for (int i = 0; i < 4; ++i) a[step][i] = p.a[(step * {THREADS} + t) * 4 + i];
  for (float &x : d) ptx::undefined(x);
  ptx::wgmma_fence();
  for (int step = 0; step < {STEPS}; ++step)
    ptx::wgmma_{self.kind}{template}(d, {a}, p.descriptors[{STEPS} + step] + base / 16, step > 0);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  for (int i = 0; i < {self.columns // 2}; ++i) p.d[t * {self.columns // 2} + i] = d[i];"""


MAJORS = [
    *(Form(kind, 64, False, a, b) for kind in ("bf16", "f16") for a in (0, 1) for b in (0, 1)),
    *(Form(kind, 64, True, 0, b) for kind in ("bf16", "f16") for b in (0, 1)),
]
EIGHT_BITS = [
    Form(kind, 32, registers) for kind in DTYPES if "e" in kind for registers in (False, True)
]
WIDTHS = [Form("bf16", columns, b_major=1) for columns in range(16, 257, 48)]
WIDTHS.append(Form("e4m3", 256, True))


def multiplied(
    device: Device, forms: list[Form], form: Form, swizzles: tuple[int, int], seed: int
) -> None:
    """Hold one form against NumPy."""
    rng = np.random.default_rng(7)
    dtype_a, dtype_b = DTYPES[form.kind]
    k = STEPS * K_BYTES // np.dtype(dtype_a).itemsize
    # Multiples of 1/8: sums of their products are exact in fp32, in every order.
    a = (rng.integers(-8, 9, (ROWS, k)) / 8).astype(dtype_a)
    b = (rng.integers(-8, 9, (form.columns, k)) / 8).astype(dtype_b)
    placed_a = operand(a, not form.a_major, swizzles[0], 0)
    offset = -(-placed_a.image.nbytes // 1024) * 1024
    placed_b = operand(b, not form.b_major, swizzles[1], offset)
    image = np.zeros(offset + placed_b.image.nbytes, np.uint8)
    image[: placed_a.image.nbytes] = placed_a.image
    image[offset:] = placed_b.image
    result = device.run(
        unit([each.body for each in forms]),
        forms.index(form),
        image,
        a_registers(a),
        form.columns,
        placed_a.descriptors + placed_b.descriptors,
        seed,
    )
    expected = a.astype(np.float32) @ b.astype(np.float32).T
    np.testing.assert_array_equal(d_matrix(result.registers), expected)
    assert result.stats.wgmma == STEPS


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("form", MAJORS, ids=lambda form: "-".join(map(str, form)))
def test_sixteen_bits_of_every_major(form: Form, swizzle: int, seed: int, device: Device) -> None:
    multiplied(device, MAJORS, form, (swizzle, swizzle), seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("form", EIGHT_BITS, ids=lambda form: "-".join(map(str, form)))
def test_eight_bits(form: Form, seed: int, device: Device) -> None:
    multiplied(device, EIGHT_BITS, form, (32, 128), seed)


@pytest.mark.parametrize("form", WIDTHS, ids=lambda form: "-".join(map(str, form)))
def test_widths(form: Form, device: Device) -> None:
    multiplied(device, WIDTHS, form, (64, 32), 0)


# What it must not do

SETUP = """
  ptx::fence_proxy_async();
  ptx::barrier();
"""
OPERANDS = """
  float d[8] = {};
  u32 r[4] = {};
  const u64 a = p.descriptors[0] + base / 16, b = p.descriptors[4] + base / 16;
"""
BEGIN = f"{SETUP}{OPERANDS}  ptx::wgmma_fence();\n"
END = """
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  for (int i = 0; i < 8; ++i) p.d[t * 8 + i] = d[i];
"""
ISSUE = "  ptx::wgmma_bf16<0, 0>(d, a, b, false);\n"
ADD = "  ptx::wgmma_bf16<0, 0>(d, a, b, true);\n"
REGISTERS = "  ptx::wgmma_bf16<0>(d, r, b, false);\n"


class Fault(NamedTuple):
    """A body, of which the line that the message names ends with a mark, and what it says."""

    body: str
    sentence: str


MARK = "  // here\n"
FAULTS = {
    "no wgmma_fence": Fault(
        SETUP + OPERANDS + ISSUE.rstrip() + MARK + END,
        "accumulators that were accessed since the last wait, and no wgmma_fence since",
    ),
    "no wgmma_fence after accumulators changed": Fault(
        BEGIN + ISSUE + END + "  d[3] += 1;\n" + ADD.rstrip() + MARK + END,
        "accumulators that were accessed since the last wait, and no wgmma_fence since",
    ),
    "no wgmma_fence before A in registers": Fault(
        BEGIN + ISSUE + END + "  r[0] = 1;\n" + REGISTERS.rstrip() + MARK + END,
        "A in registers, and no wgmma_fence since the last wait",
    ),
    "arithmetic with an accumulator": Fault(
        BEGIN + ISSUE + f"  d[5] *= 2;{MARK}" + END,
        "arithmetic with an accumulator that a wgmma in flight owns",
    ),
    "arithmetic by a function of the C library": Fault(
        BEGIN + ISSUE + f"  p.d[0] = log2f(d[5]);{MARK}" + END,
        "arithmetic with an accumulator that a wgmma in flight owns",
    ),
    "comparison of an accumulator": Fault(
        BEGIN + ISSUE + f"  p.d[0] = max(d[0], d[1]);{MARK}" + END,
        "arithmetic with an accumulator that a wgmma in flight owns",
    ),
    "a wait for one group too few": Fault(
        BEGIN + ISSUE + "  ptx::wgmma_commit();\n  ptx::wgmma_wait<1>();\n"
        f"  p.d[0] = d[0] + 1;{MARK}",
        "arithmetic with an accumulator that a wgmma in flight owns",
    ),
    "accumulators written": Fault(
        BEGIN + ISSUE.rstrip() + MARK + "  d[2] = 0;\n" + END,
        "accumulator 2 was written while this wgmma was in flight",
    ),
    "A's registers written": Fault(
        BEGIN + REGISTERS.rstrip() + MARK + "  r[1] = 5;\n" + END,
        "A's registers were written while this wgmma was in flight",
    ),
    "no commit": Fault(
        BEGIN + ISSUE.rstrip() + MARK + "  ptx::wgmma_wait<0>();\n",
        "exited with 1 wgmma in flight, of which this is the first",
    ),
    "no wait": Fault(
        BEGIN + ISSUE.rstrip() + MARK + ADD + "  ptx::wgmma_commit();\n",
        "exited with 2 wgmma in flight, of which this is the first",
    ),
    "one warp waits": Fault(
        BEGIN + ISSUE + "  ptx::wgmma_commit();\n  if (t < 32) ptx::wgmma_wait<0>();\n" + ADD + END,
        r"at the wait of unit\.cpp:\d+|after 1 wgmma, while other threads .* have issued 2",
    ),
    "one warp commits": Fault(
        BEGIN + ISSUE + f"  if (t < 32) ptx::wgmma_commit();\n  ptx::wgmma_wait<0>();{MARK}",
        r"wgmma_wait<0> after [01] groups, while other threads .* at wgmma_wait<0> .* after [01]",
    ),
    "waits for other groups": Fault(
        BEGIN + ISSUE + "  ptx::wgmma_commit();\n"
        f"  if (t < 64) ptx::wgmma_wait<1>(); else ptx::wgmma_wait<0>();{MARK}",
        r"wgmma_wait<\d> after 1 groups, while other threads .* are at wgmma_wait<\d>",
    ),
    "different descriptors": Fault(
        BEGIN + f"  ptx::wgmma_bf16<0, 0>(d, a + (t / 64) * 64, b, false);{MARK}" + END,
        "the threads of a warpgroup issue different wgmma: wgmma_bf16 of N = 16 with a = ",
    ),
    "one thread exits": Fault(
        BEGIN + "  if (t == 70) return;\n" + ISSUE + END,
        "threads of its warpgroup have exited|exited with 1 wgmma in flight|at this wgmma_wait",
    ),
    "no whole warpgroup": Fault(
        f"  ptx::wgmma_fence();{MARK}",
        "wgmma_fence by a thread of no whole warpgroup: the block has 64 threads",
    ),
    "no fence.proxy.async": Fault(
        "  ptx::barrier();\n" + OPERANDS + "  ptx::wgmma_fence();\n" + ISSUE.rstrip() + MARK + END,
        r"A of wgmma reads shared memory \+\d+, .*fence\.proxy\.async",
    ),
    "no barrier after fence.proxy.async": Fault(
        "  ptx::fence_proxy_async();\n" + OPERANDS + "  ptx::wgmma_fence();\n" + ISSUE + END,
        r"[AB] of wgmma.* shared memory \+\d+, w",
    ),
    "uninitialised bytes": Fault(
        BEGIN + f"  ptx::wgmma_bf16<0, 0>(d, a, b + 2048, false);{MARK}" + END,
        r"B of wgmma reads shared memory \+40960, which nobody wrote",
    ),
    "an address that was not shifted": Fault(
        BEGIN + f"  ptx::wgmma_bf16<0, 0>(d, p.descriptors[0] + (16 << 10), b, false);{MARK}" + END,
        "descriptor of wgmma's A, 0x[0-9a-f]+, has reserved bits 0x4000",
    ),
    "a base offset": Fault(
        BEGIN + f"  ptx::wgmma_bf16<0, 0>(d, a | 1ull << 49, b, false);{MARK}" + END,
        "descriptor of wgmma's A, 0x[0-9a-f]+, has a base offset, which is not emulated",
    ),
    "a start in a row of an atom": Fault(
        BEGIN + f"  ptx::wgmma_bf16<0, 0>(d, a, b + 8, false);{MARK}" + END,
        r"wgmma's B, .* begins at shared memory \+8320, not in the first row of a swizzle atom",
    ),
    "beyond the end": Fault(
        BEGIN + f"  ptx::wgmma_bf16<0, 0>(d, a + (1ull << 42), b, false);{MARK}" + END,
        r"wgmma's A, .* reaches shared memory \+69632 of 65536 bytes",
    ),
    "overwritten in flight": Fault(
        BEGIN + ISSUE + "  if (t == 9) memset(shared + 256, 1, t * 8);\n"
        "  ptx::fence_proxy_async();\n" + END,
        r"overwrites shared memory|of wgmma, in flight, reads shared memory \+\d+, which was overw",
    ),
    "another warp's rows of A are overwritten after the wait": Fault(
        BEGIN + ISSUE + END + f"  shared[(t + 32) % 128 / 32 * 512 + t % 32] = 1;{MARK}",
        r"a store overwrites shared memory \+\d+, which warp \d has read, and no barrier",
    ),
    "columns of B are overwritten after the wait": Fault(
        BEGIN + ISSUE + END + f"  if (t == 0) shared[2048] = 3;{MARK}",
        r"a store overwrites shared memory \+8192, which warp [123] has read, and no barrier",
    ),
    "a part of other accumulators": Fault(
        BEGIN + "  float wide[16];\n  auto &part = reinterpret_cast<float (&)[8]>(wide[4]);\n"
        "  ptx::wgmma_bf16<0, 0>(part, a, b, false);\n"
        f"  ptx::wgmma_bf16<0, 0>(wide, a, b, false);{MARK}" + END,
        "accumulators of which a wgmma of another shape in flight has a part",
    ),
}
RIGHT = {
    "as it should be": BEGIN + ISSUE + ADD + END,
    "two groups, the later waited for last": (
        BEGIN + "  float e[8];\n  ptx::wgmma_bf16<0, 0>(e, a, b, false);\n  ptx::wgmma_commit();\n"
        + REGISTERS + "  ptx::wgmma_commit();\n  ptx::wgmma_wait<1>();\n"
        "  ptx::wgmma_wait<0>();\n  ptx::wgmma_fence();\n"
        "  for (int i = 0; i < 8; ++i) d[i] = 2 * e[i] - e[i];\n" + ADD + END
    ),
    "a warp overwrites its rows of A after the wait": (
        BEGIN + ISSUE + ADD + END + "  shared[t / 32 * 512 + t % 32] = 2;\n"
    ),
    "accumulators that nobody touched need no second fence": BEGIN + ISSUE + END + ADD + END,
    "A and B are the same matrix, overwritten after a barrier": (
        BEGIN + "  float e[32];\n  ptx::wgmma_bf16<0, 0>(e, a, a, false);\n" + ISSUE + ADD + END
        + "  ptx::barrier();\n  shared[t] = 4;\n"
    ),
    "other invalid operations in flight make NaN": (
        BEGIN + "  volatile float x = ptx::bits_float(0x7f800000);\n" + ISSUE + ADD
        + "  x = x - x;\n  x = max(x, 0.0f) * 0.0f;\n" + END
    ),
}  # fmt: skip
COPY = (
    BEGIN + ISSUE + "  float copy[8];\n  memcpy(copy, d, sizeof copy);\n  ptx::wgmma_commit();\n"
    "  ptx::wgmma_wait<0>();\n  for (int i = 0; i < 8; ++i) p.d[t * 8 + i] = copy[i];\n"
)
BODIES = [*(fault.body for fault in FAULTS.values()), *RIGHT.values(), COPY]


def misuse(device: Device, chosen: int, seed: int, threads: int = THREADS) -> np.ndarray:
    """Run one of the bodies on matrices of ones; return D, of 64 rows for each warpgroup."""
    ones = np.ones((ROWS, 64), ml_dtypes.bfloat16)
    a, b = operand(ones, True, 128, 0), operand(ones, True, 128, ones.nbytes)
    image = np.concatenate([a.image, b.image])
    result = device.run(
        unit(BODIES),
        chosen,
        image,
        a_registers(ones),
        16,
        a.descriptors + b.descriptors,
        seed,
        threads,
    )
    return result.registers


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FAULTS)
def test_a_misuse_is_named_with_its_line(name: str, seed: int, device: Device) -> None:
    fault = FAULTS[name]
    threads = 64 if name == "no whole warpgroup" else THREADS
    with pytest.raises(cupyflash.KernelFault, match=fault.sentence) as caught:
        misuse(device, BODIES.index(fault.body), seed, threads)
    if MARK in fault.body:
        line = int(re.search(r"unit\.cpp:(\d+)", str(caught.value))[1])
        assert MARK.strip() in unit(BODIES).splitlines()[line - 1]


@pytest.mark.parametrize("seed", [*SEEDS, 4, 8])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_use_is_left_alone(name: str, seed: int, device: Device) -> None:
    d = misuse(device, BODIES.index(RIGHT[name]), seed)
    assert (d == 32).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_of_accumulators_in_flight_is_nan(seed: int, device: Device) -> None:
    assert np.isnan(misuse(device, BODIES.index(COPY), seed)).all()
