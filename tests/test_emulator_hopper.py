"""Hopper's asynchronous world on the emulator: a pipeline of copies, and each fault's sentence.

What the instructions do where a kernel is right is held against a GPU in ``tests/ptx``.
"""

import ctypes
import re
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from emulated import SEEDS, needs_compiler

import cupyflash
from cupyflash import _emulator
from cupyflash._emulator import build
from cupyflash._emulator.stats import Stats
from cupyflash._launch import Launch
from cupyflash._tensor_map import BYTES, TensorMap

pytestmark = needs_compiler

EAGER = 8  # a seed whose copies happen at once
TILES, ROWS, COLUMNS = 5, 8, 32  # of the tensors; a tile is 1024 bytes, its rows 128
SHARED_BYTES = 8 << 10

UNIT = """#include "ptx/atomic.cuh"
#include "ptx/bulk.cuh"
#include "ptx/group.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
struct Params { ptx::TensorMap in, out; float *x, *y; int chosen; };
struct Shared {
  float tile[2][256], staged[256];
  u64 full[2], empty[2];
};
%s
extern "C" __global__ void tiny(const __grid_constant__ Params p) {
  Shared &s = ptx::shared<Shared>();
  switch (p.chosen) {
%s
  }
}
"""
FUNCTION = """
DEVICE void function_%d(const Params &p, Shared &s) {
  const int t = threadIdx.x, warp = t / 32, lane = t %% 32;
  const u32 tile[2] = {ptx::smem_address(s.tile[0]), ptx::smem_address(s.tile[1])};
  const u32 full[2] = {ptx::smem_address(&s.full[0]), ptx::smem_address(&s.full[1])};
  const u32 empty[2] = {ptx::smem_address(&s.empty[0]), ptx::smem_address(&s.empty[1])};
  const u32 staged = ptx::smem_address(s.staged);
  %s
}
"""

READ = """
      for (int j = 0; j < 4; ++j) x[j] = s.tile[i % 2][c + 64 * j];
"""
RELEASE = """
      ptx::warp_barrier();
      if (lane == 0) ptx::mbarrier_arrive(empty[i % 2]);
"""

# One warp loads the tiles of x into two slots, two warps write them, doubled, to y.
PIPELINE = f"""
  if (t == 0) {{
    for (int i = 0; i < 2; ++i) {{
      ptx::mbarrier_init(full[i], 1);
      ptx::mbarrier_init(empty[i], 2);
    }}
    ptx::fence_mbarrier_init();
  }}
  ptx::barrier();
  if (warp == 0) {{
    if (ptx::elect()) {{
      for (int i = 0; i < 5; ++i) {{
        ptx::mbarrier_wait(empty[i % 2], i / 2 % 2 ^ 1);
        ptx::mbarrier_arrive_expect_tx(full[i % 2], 1024);
        ptx::tma_load_4d(tile[i % 2], p.in, full[i % 2], 0, 8 * i, 0, 0);
      }}
    }}
  }} else {{
    const int c = t - 32;
    for (int i = 0; i < 5; ++i) {{
      float x[4];
      ptx::mbarrier_wait(full[i % 2], i / 2 % 2);
{READ}{RELEASE}      if (c == 0) ptx::bulk_wait_read<0>();
      ptx::named_barrier_sync(1, 64);
      for (int j = 0; j < 4; ++j) s.staged[c + 64 * j] = 2 * x[j];
      ptx::fence_proxy_async();
      ptx::named_barrier_sync(2, 64);
      if (c == 0) {{
        ptx::tma_store_4d(p.out, staged, 0, 8 * i, 0, 0);
        ptx::bulk_commit();
      }}
    }}
    if (c == 0) ptx::bulk_wait_read<0>();  // before the exit
  }}
"""

# A copy that has landed is on its way to those who have not waited for it.
IN_FLIGHT = (
    "(into which a copy is in flight|which a copy has written, and its barrier was not waited for)"
)
UNORDERED = "no barrier stands between"
UNFENCED = r"thread \d+ has written, and no fence.proxy.async stands between"
BEING_READ = "which an instruction of warp 1 in flight reads"

# Edits of the pipeline, and what they lead to with every seed.
MUTANTS = {
    "the producer does not wait": (
        "ptx::mbarrier_wait(empty[i % 2], i / 2 % 2 ^ 1);", "", f"{IN_FLIGHT}|more arrivals",
    ),
    "the producer waits for the other parity": (
        "i / 2 % 2 ^ 1", "i / 2 % 2", r"parity 0 of the mbarrier .*; phase 0, pending arrivals 2",
    ),
    "all lanes produce": (
        "if (ptx::elect())", "", f"{IN_FLIGHT}|more arrivals than its 1|DEADLOCK",
    ),
    "the consumers do not wait": (
        "ptx::mbarrier_wait(full[i % 2], i / 2 % 2);", "",
        rf"thread \d+ has read, and {UNORDERED}|a load reads .* {IN_FLIGHT}|which nobody wrote",
    ),
    "half of the bytes are announced": (
        "full[i % 2], 1024", "full[i % 2], 512", "tx bytes -512|more arrivals|" + IN_FLIGHT,
    ),
    "twice the bytes are announced": (
        "full[i % 2], 1024", "full[i % 2], 2048", r"pending arrivals 0 of 1, tx bytes 1024",
    ),
    "too many bytes are announced": (
        "full[i % 2], 1024", "full[i % 2], 1 << 20", "announces 1048576 bytes .* counts to 1048575",
    ),
    "one consumer too many is expected": (
        "empty[i], 2", "empty[i], 3", "pending arrivals 1 of 3",
    ),
    "the consumers release a tile before they read it": (
        f"{READ}{RELEASE}", f"{RELEASE}{READ}",
        rf"which thread \d+ has read, and {UNORDERED}|a load reads .* {IN_FLIGHT}",
    ),
    "copies are not told of the barriers": (
        "ptx::fence_mbarrier_init();", "", "no fence.mbarrier_init of the thread that made",
    ),
    "the barriers are used before they are made": (
        "  ptx::barrier();", "", f"used before its init|{UNORDERED}",
    ),
    "a barrier is made twice": (
        "ptx::mbarrier_init(full[i], 1);", "ptx::mbarrier_init(full[0], 1);", "was made before",
    ),
    "a barrier takes no arrival": ("full[i], 1", "full[i], 0", "with 0 arrivals"),
    "a barrier is overwritten": (
        "ptx::fence_mbarrier_init();", "ptx::fence_mbarrier_init(); s.full[1] = 0;",
        r"the mbarrier at \+3080 \(made at unit.cpp:\d+\) was overwritten",
    ),
    "a parity is no bit": ("i / 2 % 2);", "i / 2 % 2 + 2);", "with parity [23]: 0 or 1"),
    "a box is not aligned": (
        "tma_load_4d(tile[i % 2]", "tma_load_4d(tile[i % 2] + 128", "not 1024-byte aligned",
    ),
    "a box is not in shared memory": (
        "tma_load_4d(tile[i % 2]", "tma_load_4d(tile[i % 2] + 8192", "which has 8192 bytes",
    ),
    "a store begins inside a chunk": (
        "tma_store_4d(p.out, staged, 0,", "tma_store_4d(p.out, staged, 6,",
        "TMA store: the box begins 24 bytes into a row: not a multiple of 16, in which hardware",
    ),
    "a sum begins inside a chunk": (
        "tma_store_4d(p.out, staged, 0,", "tma_reduce_add_4d(p.out, staged, 3,",
        "TMA reduction: the box begins 12 bytes into a row: not a multiple of 16",
    ),
    "a load begins inside a chunk": (
        "full[i % 2], 0, 8", "full[i % 2], -6, 8",
        "TMA load: the box begins -24 bytes into a row: not a multiple of 16, in which hardware",
    ),
    **{
        f"a store begins before dimension {d}": (
            "tma_store_4d(p.out, staged, 0, 8 * i, 0, 0)", f"tma_store_4d(p.out, staged, {at})",
            f"TMA store: the box begins at -[14] of dimension {d}: negative, in which hardware",
        ) for d, at in enumerate(("-4, 0, 0, 0", "0, -1, 0, 0", "0, 0, -1, 0", "0, 0, 0, -1"))
    },
    "a sum begins before its tensor": (
        "tma_store_4d(p.out, staged, 0, 8 * i,", "tma_reduce_add_4d(p.out, staged, 0, 8 * i - 8,",
        "TMA reduction: the box begins at -8 of dimension 1: negative, in which hardware hangs",
    ),
    "a map is none": (
        "p.in, full", "*reinterpret_cast<const ptx::TensorMap *>(p.x), full", "no tensor map",
    ),
    "a tile in flight is written": (
        "ptx::tma_load_4d(tile[i % 2], p.in, full[i % 2], 0, 8 * i, 0, 0);",
        "ptx::tma_load_4d(tile[i % 2], p.in, full[i % 2], 0, 8 * i, 0, 0); s.tile[i % 2][3] = 1;",
        f"a store overwrites .* {IN_FLIGHT}",
    ),
    "no fence before the store": (
        "ptx::fence_proxy_async();", "", UNFENCED,
    ),
    "the fence of one thread before the store": (
        "ptx::fence_proxy_async();", "if (c == 0) ptx::fence_proxy_async();", UNFENCED,
    ),
    "the fence comes before the stores": (
        "for (int j = 0; j < 4; ++j) s.staged[c + 64 * j] = 2 * x[j];\n"
        "      ptx::fence_proxy_async();",
        "ptx::fence_proxy_async(); ptx::named_barrier_sync(3, 64);"
        "for (int j = 0; j < 4; ++j) s.staged[c + 64 * j] = 2 * x[j];",
        UNFENCED,
    ),
    "the staged tile is not waited for": (
        "if (c == 0) ptx::bulk_wait_read<0>();\n", "", BEING_READ,
    ),
    "one group too few is waited for": (
        "if (c == 0) ptx::bulk_wait_read<0>();\n", "if (c == 0) ptx::bulk_wait_read<1>();\n",
        BEING_READ,
    ),
    "the store is not committed": (
        "ptx::bulk_commit();", "", BEING_READ,
    ),
    "the last store is not waited for": (
        "if (c == 0) ptx::bulk_wait_read<0>();  // before", "//",
        "exited before TMA store had read",
    ),
    "no barrier after the wait for the store": (
        "ptx::named_barrier_sync(1, 64);", "", f"{BEING_READ}|{UNORDERED}",
    ),
    "no barrier before the store": (
        "ptx::named_barrier_sync(2, 64);", "",
        rf"thread \d+ has written, and {UNORDERED}|which nobody wrote",
    ),
    "a barrier of too many": (
        "sync(2, 64)", "sync(2, 96)", "named barrier 2, 64 of 96 threads have come",
    ),
    "a barrier of two sizes": (
        "sync(2, 64)", "sync(2, 32 + 32 * warp)", "while others at unit.cpp:.* wait for (64|96)",
    ),
    "a barrier of half warps": (
        "ptx::named_barrier_sync(2, 64);", "if (lane < 16) ptx::named_barrier_sync(2, 32);",
        r"named barrier 2: lane 16 of warp \d has come 0 times, lane 0 1 times",
    ),
    "a barrier of no full warps": ("sync(2, 64)", "sync(2, 65)", "for 65 threads: a multiple of"),
    "a barrier with the block's number": (
        "sync(2, 64)", "sync(0, 64)", "named barriers are 1 to 15",
    ),
}  # fmt: skip

ONE_BARRIER = """
  if (t == 0) {
    ptx::mbarrier_init(full[0], 1);
    ptx::fence_mbarrier_init();
  }
  ptx::barrier();
"""
LOADED = f"""{ONE_BARRIER}
  if (t == 0) {{
    ptx::mbarrier_arrive_expect_tx(full[0], 1024);
    ptx::bulk_load(tile[0], p.x, 1024, full[0]);
  }}
"""
MATRIX = """
  u32 d[4] = {1, 2, 3, 4};
  const u32 row = tile[0] + 16 * lane;
"""

# Kernels of a few lines, and what they lead to with every seed.
FAULTS = {
    "a copy in flight at the exit": (
        LOADED, "cp.async.bulk is in flight at the exit of the block|exits, .* nobody waited for",
    ),
    "bytes announced at the exit": (
        f"{ONE_BARRIER} if (t == 0) ptx::mbarrier_arrive_expect_tx(full[0], 16);",
        r"the block exits, and the mbarrier at \+3072 .* has phase 0, .* tx bytes 16",
    ),
    "a turn that nobody takes": (
        "if (warp == 1) ptx::named_barrier_arrive(3, 64);",
        "the block exits, and 32 of 64 threads have come to named barrier 3",
    ),
    "two copies into the same bytes": (
        f"{LOADED} if (t == 0) ptx::bulk_load(tile[0] + 1008, p.x, 32, full[0]);", IN_FLIGHT,
    ),
    "a load of bytes in flight": (
        f"{MATRIX} {LOADED} if (warp == 0) ptx::ldmatrix_x4(d, row);",
        f"ldmatrix reads.*{IN_FLIGHT}",
    ),
    "a store of bytes in flight": (
        f"{LOADED} if (t == 0) ptx::bulk_store(p.y, tile[0], 16);",
        f"cp.async.bulk reads.*{IN_FLIGHT}",
    ),
    "a copy into bytes that a store reads": (
        f"{LOADED} if (t == 0) {{ ptx::mbarrier_wait(full[0], 0);"
        "  ptx::bulk_store(p.y, tile[0], 64); ptx::mbarrier_arrive_expect_tx(full[0], 16);"
        "  ptx::bulk_load(tile[0], p.x, 16, full[0]); }",
        r"overwrites shared memory \+0, which an instruction of warp 0 in flight reads",
    ),
    "a store of what nobody wrote": (
        "if (t == 0) ptx::bulk_store(p.y, tile[0], 16);", r"memory \+0, which nobody wrote",
    ),
    "a bulk copy of an odd size": (
        f"{ONE_BARRIER} if (t == 0) ptx::bulk_load(tile[0], p.x, 24, full[0]);", "a multiple of 16",
    ),
    "a bulk copy from an odd address": (
        f"{ONE_BARRIER} if (t == 0) ptx::bulk_load(tile[0], p.x + 1, 16, full[0]);",
        r"x \+4 of 5120 bytes, which is not 16-byte aligned",
    ),
    "a bulk copy of too many bytes": (
        f"{ONE_BARRIER} if (t == 0) ptx::bulk_load(tile[0], p.x + 1024, 2048, full[0]);",
        r"cp.async.bulk of 2048 bytes at x \+4096 of 5120 bytes",
    ),
    "a sum beyond the array": (
        "ptx::reduce_add(p.y + 1280, 1.0f);", r"red.add of 4 bytes at y \+5120 of 5120 bytes",
    ),
    "a barrier of no address": ("ptx::mbarrier_arrive(full[0] + 4);", "is not 8-byte aligned"),
    "a barrier nobody made": (
        "ptx::mbarrier_arrive(full[0]);", "is no mbarrier: used before its init",
    ),
    "a phase that a thread misses": (
        f"{ONE_BARRIER} if (t) ptx::mbarrier_wait(full[0], 0);"
        "else ptx::mbarrier_arrive(full[0]), ptx::mbarrier_arrive(full[0]);",
        "the phase after it has ended too, before this thread looked|DEADLOCK.*\n.*; phase 2, ",
    ),
    "matrices that are not aligned": (
        f"{MATRIX} ptx::stmatrix_x4(row + 8, d);", "stmatrix .* not 16-byte aligned",
    ),
    "matrices of another warp": (
        f"{MATRIX} if (warp == 0) ptx::stmatrix_x4(row, d);"
        "if (warp == 1) ptx::ldmatrix_x4(d, row);",
        rf"which (thread \d+|warp 1) has (written|read), and {UNORDERED}",
    ),
    "an arrival before the stores": (
        f"{MATRIX} {ONE_BARRIER} if (t == 0) ptx::mbarrier_arrive(full[0]);"
        "if (warp == 1) ptx::mbarrier_wait(full[0], 0);"
        "if (warp == 0) ptx::stmatrix_x4(row, d); if (warp == 1) ptx::ldmatrix_x4(d, row);",
        f"has (written|read), and {UNORDERED}",
    ),
    "registers of one warp": (
        "if (warp == 0) ptx::registers_decrease<24>();",
        "setmaxnreg to 24, 32 of 128 threads have come",
    ),
    "registers of two numbers": (
        "if (warp == 0) ptx::registers_decrease<24>(); else ptx::registers_decrease<32>();",
        "setmaxnreg to (24|32), while other threads of the warpgroup are at unit.cpp",
    ),
    "more registers than there are": (
        "if (t < 128) ptx::registers_decrease<24>();"
        "else if (t < 256) ptx::registers_increase<240>(); else ptx::registers_increase<248>();",
        r"DEADLOCK.*\n(.*\n)*.*the warpgroups have (24 240 168|24 168 248) registers a thread",
    ),
    "fewer registers by an increase": (
        "ptx::registers_increase<160>();", "setmaxnreg.inc to 160 .* the warpgroup has 168",
    ),
}  # fmt: skip

# Kernels of a few lines that are right.
RIGHT = {
    "stores are known to those who wait for an mbarrier": f"""{MATRIX} {ONE_BARRIER}
      if (warp == 0) {{
        ptx::stmatrix_x4(row, d);
        ptx::warp_barrier();
        if (lane == 0) ptx::mbarrier_arrive(full[0]);
      }} else {{
        ptx::mbarrier_wait(full[0], 0);
        ptx::ldmatrix_x4(d, row);
      }}""",
    "stores are known to those who come to a named barrier": f"""{MATRIX}
      if (warp == 0) {{
        ptx::stmatrix_x4(row, d);
        ptx::named_barrier_arrive(7, 64);
      }} else if (warp == 1) {{
        ptx::named_barrier_sync(7, 64);
        ptx::ldmatrix_x4(d, row);
      }}""",
    "a fence covers what its thread knows": """
      if (warp == 1) for (int i = 0; i < 8; ++i) s.tile[0][lane + 32 * i] = 1;
      ptx::barrier();
      if (t == 64) ptx::fence_proxy_async();
      ptx::barrier();
      if (t == 0) {
        ptx::bulk_store(p.y, tile[0], 1024);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
      }""",
    "copies are known to those who wait": f"""{MATRIX} {LOADED}
      ptx::mbarrier_wait(full[0], 0);
      ptx::ldmatrix_x4(d, row);""",
    "registers go from one warpgroup to the others": """
      if (t < 128) ptx::registers_decrease<24>();
      else ptx::registers_increase<240>();""",
    "the elected lane is the same every time": """
      const bool elected = ptx::elect();
      for (int i = 0; i < 3; ++i)
        if (ptx::elect() != elected) p.y[0] = 0;
      if (warp == 0) p.y[lane] = elected ? 1.0f : 0.0f;""",
}
FUNCTIONS = (
    PIPELINE,
    *(PIPELINE.replace(old, new, 1) for old, new, _ in MUTANTS.values()),
    *(body for body, _ in FAULTS.values()),
    *RIGHT.values(),
)


def text() -> str:
    """Return the unit of all functions."""
    functions = "".join(FUNCTION % (i, body) for i, body in enumerate(FUNCTIONS))
    cases = "".join(f"    case {i}: return function_{i}(p, s);\n" for i in range(len(FUNCTIONS)))
    return UNIT % (functions, cases)


class Tensors:
    """x and y in guarded memory, [batch, row, head, column] of one batch and head."""

    def __init__(self) -> None:
        self._runtime = build.runtime()
        self.x = np.arange(TILES * ROWS * COLUMNS, dtype=np.float32)
        self._x, self._y = (
            int(self._runtime.emu_alloc(self.x.nbytes, name, 1)) for name in (b"x", b"y")
        )
        ctypes.memmove(self._x, self.x.tobytes(), self.x.nbytes)

    @property
    def y(self) -> np.ndarray:
        """What the kernel has written."""
        return np.frombuffer(ctypes.string_at(self._y, self.x.nbytes), np.float32)

    def run(self, body: str, seed: int, threads: int = 96) -> Stats:
        """Run the function of this body."""
        row = 4 * COLUMNS
        maps = tuple(
            TensorMap(
                pointer, "float32", (COLUMNS, TILES * ROWS, 1, 1), (row,) * 3,
                (COLUMNS, ROWS, 1, 1), row,
            ) for pointer in (self._x, self._y)
        )  # fmt: skip
        params = bytes(2 * BYTES) + struct.pack("<2Qi44x", self._x, self._y, FUNCTIONS.index(body))
        launch = Launch(
            text(), "tiny", "sm_90a", (1, 1, 1), (threads, 1, 1), SHARED_BYTES, params,
            ((0, maps[0]), (BYTES, maps[1])),
        )  # fmt: skip
        return _emulator.run(launch, seed)

    def free(self) -> None:
        """Free both."""
        for address in (self._x, self._y):
            self._runtime.emu_free(address)


@pytest.fixture
def tensors() -> Iterator[Tensors]:
    """The arrays of one test."""
    memory = Tensors()
    yield memory
    memory.free()


@pytest.mark.parametrize("seed", range(12))
def test_the_pipeline_is_right_and_counted(seed: int, tensors: Tensors) -> None:
    stats = tensors.run(PIPELINE, seed)
    assert (tensors.y == 2 * tensors.x).all()
    assert (stats.tma, stats.bulk, stats.wgmma) == (2 * TILES, 0, 0)
    moved = {stats.tiles_loaded_bytes, stats.global_read_bytes, stats.global_written_bytes}
    assert moved == {tensors.x.nbytes}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_of_the_pipeline_is_noticed(name: str, seed: int, tensors: Tensors) -> None:
    old, new, words = MUTANTS[name]
    assert old in PIPELINE
    refuse(tensors, PIPELINE.replace(old, new, 1), seed, words)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_its_sentence(name: str, seed: int, tensors: Tensors) -> None:
    body, words = FAULTS[name]
    refuse(tensors, body, seed, words, 384 if "registers" in body else 96)


def refuse(tensors: Tensors, body: str, seed: int, words: str, threads: int = 96) -> None:
    """Run a function that must fail with these words, at a line of the unit."""
    with pytest.raises(cupyflash.KernelFault, match=words) as caught:
        tensors.run(body, seed, threads)
    assert re.search(r"unit\.cpp:\d+ block \(0,0,0\) thread", str(caught.value))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_let_through(name: str, seed: int, tensors: Tensors) -> None:
    assert tensors.run(RIGHT[name], seed, 384).blocks == 1


def test_any_lane_may_be_elected(tensors: Tensors) -> None:
    lanes = set()
    for seed in range(6):
        tensors.run(RIGHT["the elected lane is the same every time"], seed)
        (lane,) = np.flatnonzero(tensors.y[:32])
        lanes.add(int(lane))
    assert len(lanes) > 2


def test_a_copy_that_landed_is_unknown_to_who_did_not_wait(tensors: Tensors) -> None:
    body, _ = FAULTS["a load of bytes in flight"]
    refuse(tensors, body, EAGER, "ldmatrix reads .* a copy has written, and its barrier was not")


# Tensor maps

MAP = {
    "offset": 0, "dtype": 7, "address": 4096, "size": (80, 5, 2, 2), "strides": (320, 1600, 3200),
    "box": (32, 8, 1, 1), "steps": (1, 1, 1, 1), "interleave": 0, "swizzle": 3, "promotion": 2,
    "fill": 0,
}  # fmt: skip
REFUSALS: dict[str, dict[str, Any]] = {
    "the map is not 64-byte aligned": {"offset": 16},
    "no such data type": {"dtype": 13},
    "1 to 5 dimensions": {
        "size": (1,) * 6, "strides": (16,) * 5, "box": (4,) * 6, "steps": (1,) * 6,
    },
    "the tensor's address is not 16-byte aligned": {"address": 4104},
    "a size is not from 1": {"size": (80, 0, 2, 2)},
    "a stride is not a multiple of 16": {"strides": (324, 1600, 3200)},
    "a stride .* below 2": {"strides": (320, 1600, 2**40)},
    "a size of the box": {"box": (32, 257, 1, 1)},
    "an element stride is not": {"steps": (1, 9, 1, 1)},
    "element strides other than 1": {"steps": (1, 2, 1, 1)},
    "interleaved layouts": {"interleave": 1},
    "no such swizzle": {"swizzle": 4},
    "no such promotion": {"promotion": 4},
    "no such fill": {"fill": 2},
    "integers have no NaN": {"dtype": 2, "fill": 1},
    "whole 16 bytes": {"box": (33, 8, 1, 1)},
    "longer than the span": {"box": (36, 8, 1, 1)},
}  # fmt: skip


def encode(**changes: Any) -> tuple[str | None, bytes]:
    """Return what the runtime says to a map, and its bytes."""
    of = MAP | changes
    rank, u32, u64 = len(of["size"]), ctypes.c_uint32, ctypes.c_uint64
    room = ctypes.create_string_buffer(BYTES + 128)
    start = -ctypes.addressof(room) % 64 + of["offset"]
    said = build.runtime().emu_tensor_map(
        ctypes.addressof(room) + start, of["dtype"], rank, of["address"], (u64 * rank)(*of["size"]),
        (u64 * (rank - 1))(*of["strides"]), (u32 * rank)(*of["box"]), (u32 * rank)(*of["steps"]),
        of["interleave"], of["swizzle"], of["promotion"], of["fill"],
    )  # fmt: skip
    return said and said.decode(), room.raw[start : start + BYTES]


@pytest.mark.parametrize("words", REFUSALS)
def test_a_map_is_refused_where_the_driver_refuses_it(words: str) -> None:
    said, content = encode(**REFUSALS[words])
    assert said
    assert re.search(words, said)
    assert content == bytes(BYTES)


def test_the_limits_of_a_map_are_taken() -> None:
    for changes in (
        {}, {"size": (2**32, 2**32, 1, 1)}, {"strides": (16, 16, 2**40 - 16)}, {"fill": 1},
        {"box": (256, 256, 256, 256), "swizzle": 0}, {"dtype": 0, "box": (128, 1, 1, 1)},
        {"size": (80,), "strides": (), "box": (32,), "steps": (1,)},
    ):  # fmt: skip
        said, content = encode(**changes)
        assert said is None
        assert content != bytes(BYTES)
